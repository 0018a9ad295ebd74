"""Token watch: keeps what an engine remembers of access tokens as new as the store, whichever node has changed them."""

import asyncio
from contextlib import suppress

from leasekit.errors import BackendError
from leasekit.server.commit import GroupCommit
from leasekit.server.readers import Readers
from leasekit.server.request_classes import USE_TOKENS
from leasekit.server.token_book import TokenBook


class TokenWatch:
    """Reads the access tokens of a store into a `TokenBook`; for the event loop.

    With `every`, tokens are read so many seconds apart, since other nodes change them too and hints may be lost.
    """

    def __init__(self, book: TokenBook, readers: Readers, commit: GroupCommit, *, every: float | None) -> None:
        self._book = book
        self._readers = readers
        self._commit = commit
        self._every = every
        self._has_news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.read()
        if self._every is not None:
            self._following = asyncio.create_task(self._follow(self._every), name="leasekit-tokens")

    async def stop(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    def hear(self) -> None:
        """Read the tokens soon: another node has changed some."""
        if self._following is not None:
            self._has_news.set()

    async def read(self) -> None:
        """Read the access tokens: what was changed by then holds from now on."""
        # However many reads of callers wait: a flood of them must not keep a token that was revoked.
        self._book.learn(await self._readers.read(lambda view: view.tokens(), is_vital=True))

    async def look(self) -> None:
        """End what waits for tokens that have expired, and note which tokens are in use."""
        self._book.look()
        if used := self._book.to_note():
            await self._commit.ask(USE_TOKENS, used, size=1)

    async def _follow(self, every: float) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._has_news.wait()
            self._has_news.clear()
            with suppress(BackendError):  # what is remembered counts for some time; then requests are refused
                await self.read()
