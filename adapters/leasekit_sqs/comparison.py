"""Compare leases of a user's own receive loop with the queue's visibility timeout, and warn if they differ.

A receive that does not say for how long hides its messages for as long as the queue says; a heartbeat replaces that by
the time of the lease. A lease that is shorter makes a message come again earlier. A lease that is longer is trusted
before its first heartbeat when the message may be visible already. Messages whose receive was not observed are not
compared: it may have named the time of the lease.
"""

import asyncio
import logging

from leasekit.errors import BackendError
from leasekit_sqs.queues import Queues

logger = logging.getLogger("leasekit")

_EARLIER = (
    "queue %(queue)s hides a message for %(timeout)d s, but a lease of this loop for %(ttl)d s at a time: when the "
    "process has died, or after a block with settle=False, the message comes again that much earlier. To keep the "
    "queue's time, pass visibility_timeout=%(timeout)d"
)
_TWICE = (
    "queue %(queue)s hides a message for %(timeout)d s, but this loop leases it with visibility_timeout=%(ttl)d: a "
    "message that waits longer than %(timeout)d s for its block can be with two workers at once. Pass "
    "visibility_timeout=%(timeout)d to lease, or VisibilityTimeout=%(ttl)d to receive_message"
)


class Comparison:
    """The queues that were compared with the `ttl` of one connection's leases."""

    def __init__(self, queues: Queues, ttl: int) -> None:
        self._queues = queues
        self._ttl = ttl
        self._calls: dict[str, asyncio.Task[None]] = {}

    def start(self, url: str) -> None:
        """Compare the queue at this URL, unless that was done before; return at once."""
        if url not in self._calls:
            self._calls[url] = asyncio.create_task(self._compare(url))

    async def aclose(self) -> None:
        """End the comparisons under way."""
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _compare(self, url: str) -> None:
        try:
            timeout = await self._queues.visibility_timeout(url)
        except BackendError:  # the permission `sqs:GetQueueAttributes` is not needed for leases
            return
        if timeout not in (0, self._ttl):  # 0: SQS has not told it, or each receive names a time
            times = {"queue": url.rpartition("/")[2], "timeout": timeout, "ttl": self._ttl}
            logger.warning(_EARLIER if timeout > self._ttl else _TWICE, times)
