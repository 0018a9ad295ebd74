"""Long polls over HTTP: give up what waits when its client has closed the connection."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class DisconnectWatch:
    """Requests that wait; each ends when its client disconnects."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def wait(self, answer: Coroutine[Any, Any, _T], receive: Receive) -> _T | None:
        """Return the answer to a request, or None if the client disconnects first.

        A claim that is granted tasks while it is given up keeps them: its client repeats the claim with the same
        `claim_id` and gets these tasks, or their leases expire.
        """
        waiting = asyncio.create_task(answer)
        watch = asyncio.create_task(_until_disconnect(receive))
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
            return None


async def _until_disconnect(receive: Receive) -> None:
    # After the request body, the next message says that the client has disconnected.
    while (await receive())["type"] != "http.disconnect":
        pass
