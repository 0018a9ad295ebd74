"""Takes in what applications have put into the inbox of a shared database: at each tick, and when one of them rings."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from leasekit.errors import BackendError
from leasekit.server.commit import GroupCommit, RequestClass
from leasekit.server.roles import inbox
from leasekit.server.roles.inbox import NotTaken
from leasekit.server.unit_of_work import UnitOfWork

logger = logging.getLogger("leasekit.server")

_MOST = 20_000  # rows that are taken in at one tick, about


def _set_aside(turn: UnitOfWork, requests: Sequence[Mapping[int, str]]) -> Sequence[None]:
    for refused in requests:
        inbox.set_aside(turn, refused)
    return [None] * len(requests)


TAKE_IN = RequestClass("inboxes", lambda turn, asked: [inbox.take_in(turn, numbers) for numbers in asked], 10_000)
SET_ASIDE = RequestClass("refusals", _set_aside, 10_000)


class Inbox:
    """The rows of the inbox, and the task that takes them in; for the event loop."""

    def __init__(self, commit: GroupCommit) -> None:
        self._commit = commit
        self._taking: asyncio.Task[None] | None = None
        self._rung = False

    def ring(self) -> None:
        """Take in what is there, soon: an application says that it has put something in."""
        self._rung = True
        if self._taking is None:
            self._taking = asyncio.get_running_loop().create_task(self._take_in_all())

    async def _take_in_all(self) -> None:
        try:
            while self._rung:
                self._rung = False
                await self.take_in()
        except BackendError as error:
            logger.debug("the inbox waits for the next tick: %s", error)
        finally:
            self._taking = None

    async def take_in(self) -> None:
        """Take in the rows of the inbox, some at a time."""
        taken = 0
        while taken < _MOST and (some := await self._take()):
            taken += some

    async def _take(self) -> int:
        try:
            taken: int = await self._commit.ask(TAKE_IN, None, size=inbox.STEP)
        except NotTaken as error:
            return await self._take_each(error)
        return taken

    async def _take_each(self, refused: NotTaken) -> int:
        for number in refused.numbers:
            try:
                await self._commit.ask(TAKE_IN, [number], size=1)
            except NotTaken as error:
                await self._commit.ask(SET_ASIDE, {number: str(error)}, size=1)
        return len(refused.numbers)

    async def stop(self) -> None:
        """Stop taking in rows."""
        if self._taking is not None:
            self._taking.cancel()
            with suppress(asyncio.CancelledError):
                await self._taking
