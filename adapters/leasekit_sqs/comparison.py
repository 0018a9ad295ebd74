"""Compare leases of a user's own receive loop with the queue's visibility timeout, and warn if they differ.

A receive that does not say for how long hides its messages for as long as the queue says; a heartbeat replaces that by
the time of the lease. A lease that is shorter makes a message come again earlier. A lease that is longer is trusted
before its first heartbeat when the message may be visible already. The first receive of a process is not observed: its
messages are compared only if their leases have the default time.
"""

import asyncio
import logging

from leasekit.errors import BackendError
from leasekit_sqs.queues import Queues

logger = logging.getLogger("leasekit")


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
        name = url.rpartition("/")[2]
        if timeout > self._ttl:
            logger.warning(
                "queue %s hides a message for %d s, but a lease of this loop for %d s at a time: when the process has "
                "died, or after a block with settle=False, the message comes again that much earlier. To keep the "
                "queue's time, pass visibility_timeout=%d; all is well if receive_message names VisibilityTimeout=%d",
                name,
                timeout,
                self._ttl,
                timeout,
                self._ttl,
            )
        elif 0 < timeout < self._ttl:
            logger.warning(
                "queue %s hides a message for %d s, but this loop leases it with visibility_timeout=%d: a message that "
                "waits longer than %d s for its block can be with two workers at once. Pass visibility_timeout=%d to "
                "lease, or VisibilityTimeout=%d to receive_message",
                name,
                timeout,
                self._ttl,
                timeout,
                timeout,
                self._ttl,
            )
