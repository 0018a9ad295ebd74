"""Token watch: keeps what an engine remembers of access tokens as new as the store, whichever node has changed them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from leasekit.errors import BackendError, Unavailable
from leasekit.server.access import Access
from leasekit.server.commit import GroupCommit
from leasekit.server.readers import Readers
from leasekit.server.request_classes import USE_TOKENS
from leasekit.server.token_book import TokenBook

_TRUSTED = 1.0  # seconds for which what was read counts
_PATIENCE = 10.0  # seconds that a read may take


class TokenWatch:
    """Reads the access tokens of a store into a `TokenBook`; for the event loop.

    With `every`, tokens are read so many seconds apart, since other nodes change them too and hints may be lost.
    `instant` is a clock without steps, which goes on while this process stands still.
    """

    def __init__(
        self,
        book: TokenBook,
        readers: Readers,
        commit: GroupCommit,
        *,
        every: float | None,
        instant: Callable[[], float],
    ) -> None:
        self._book = book
        self._readers = readers
        self._commit = commit
        self._every = every
        self._instant = instant
        self._has_news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[None] | None = None

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
        began_at = self._instant()
        # However many reads of callers wait: a flood of them must not keep a token that was revoked.
        self._book.learn(await self._readers.read(lambda view: view.tokens(), is_vital=True), read_at=began_at)

    async def freshen(self) -> None:
        """Return once the tokens are known as they were a second ago, at the longest.

        This process may have stood still since they were read. Raises `Unavailable` if they cannot be read now.
        """
        if self._every is None:
            return
        since = self._instant() - _TRUSTED
        while self._book.read_at < since:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.ensure_future(self.read())
                self._reading.add_done_callback(_ignore)  # all who waited may have gone
            try:
                async with asyncio.timeout(_PATIENCE):
                    await asyncio.shield(self._reading)  # one read for all who wait
            except (TimeoutError, BackendError) as error:
                age = self._instant() - self._book.read_at
                raise Unavailable(
                    f"the access tokens could not be read (last {age:.0f} s ago): try again later"
                ) from error

    async def is_valid(self, access: Access) -> bool:
        """Return whether what was allowed to a caller, when it came, is allowed now. Raises what `freshen` does."""
        if access.may_end:
            await self.freshen()
        return self._book.is_valid(access)

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
            with suppress(BackendError):  # then requests read them
                await self.read()


def _ignore(reading: "asyncio.Future[None]") -> None:
    if not reading.cancelled():
        reading.exception()
