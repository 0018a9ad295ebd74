"""Long polls: a claim that waits is given up when nobody waits for its answer any more."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from litestar.types import Receive

from leasekit.task import Claimed

__all__ = ["DisconnectWatch"]


class DisconnectWatch:
    """The claims that wait: each ends when its client goes away."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    async def wait(self, claim: Coroutine[Any, Any, Claimed], receive: Receive) -> Claimed:
        """What the claim was granted; nothing if it was given up.

        A claim that was granted while it was being given up keeps its tasks: its client asks again with the same
        `claim_id` and gets them, or their leases run out.
        """
        waiting = asyncio.create_task(claim)
        watch = asyncio.create_task(_gone(receive))
        self._count += 1
        try:
            await asyncio.wait((waiting, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._count -= 1
            watch.cancel()
            waiting.cancel()
        try:
            return await waiting
        except asyncio.CancelledError:
            return Claimed(tasks=[])


async def _gone(receive: Receive) -> None:
    # After the body there is one more message: that the client has closed the connection.
    while (await receive())["type"] != "http.disconnect":
        pass
