"""Compare leases of a user's own receive loop with the queue's visibility timeout, and warn if they differ.

A receive that does not say for how long hides its messages for as long as the queue says; a heartbeat replaces that by
the time of the lease. A lease that is shorter makes a message come again earlier. A lease that is longer is trusted
before its first heartbeat when the message may be visible already. A receive that was not observed may have named the
time of the lease: the warning says so, and is only of a lease that is shorter. A queue whose time cannot be read is
named too. There is one warning for each queue.
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
_NOT_SEEN = (
    "queue %(queue)s hides a message for %(timeout)d s, but a lease of this loop for %(ttl)d s at a time, and leasekit "
    "has not seen what the first receive named: if it named no time, the message comes again that much earlier when "
    "the process has died. To keep the queue's time, pass visibility_timeout=%(timeout)d; if each receive names "
    "VisibilityTimeout=%(ttl)d, call leasekit_sqs.watch before the first one"
)
_NOT_READ = (
    "the visibility timeout of queue %(queue)s cannot be read (%(error)s): if it is longer than the %(ttl)d s of a "
    "lease of this loop, and the receive names no time, a message comes again that much earlier when the process has "
    "died. Allow sqs:GetQueueAttributes; or call leasekit_sqs.watch before the first receive, and pass one time as "
    "visibility_timeout to lease and as VisibilityTimeout to receive_message"
)


class Comparison:
    """The queues that were compared with the `ttl` of one connection's leases."""

    def __init__(self, queues: Queues, ttl: int) -> None:
        self._queues = queues
        self._ttl = ttl
        self._calls: dict[tuple[str, bool], asyncio.Task[None]] = {}
        self._warned: set[str] = set()

    def start(self, url: str, *, is_seen: bool) -> None:
        """Compare the queue at this URL, unless that was done before; return at once.

        `is_seen`: the receive of the message was observed.
        """
        if (url, is_seen) not in self._calls:
            self._calls[url, is_seen] = asyncio.create_task(self._compare(url, is_seen=is_seen))

    async def aclose(self) -> None:
        """End the comparisons under way."""
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _compare(self, url: str, *, is_seen: bool) -> None:
        facts: dict[str, object] = {"queue": url.rpartition("/")[2], "ttl": self._ttl}
        try:
            timeout = facts["timeout"] = await self._queues.visibility_timeout(url)
        except BackendError as error:  # the permission `sqs:GetQueueAttributes` is not needed for leases
            self._warn(url, _NOT_READ, {**facts, "error": error})
            return
        if timeout > self._ttl:
            self._warn(url, _EARLIER if is_seen else _NOT_SEEN, facts)
        elif is_seen and timeout not in (0, self._ttl):  # 0: SQS has not told it, or each receive names a time
            self._warn(url, _TWICE, facts)

    def _warn(self, url: str, text: str, facts: dict[str, object]) -> None:
        if url not in self._warned:
            self._warned.add(url)
            logger.warning(text, facts)
