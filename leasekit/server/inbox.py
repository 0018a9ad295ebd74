"""Takes in what applications have put into the inbox of a shared database: at each tick, and when one of them rings.

Rule 1: nothing waits for the inbox: what is in it may be much, or slow to refuse.
Rule 2: rows that are refused together are tried by halves, until those that are refused are alone.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context

from leasekit.errors import BackendError
from leasekit.server.commit import GroupCommit, RequestClass
from leasekit.server.roles import inbox
from leasekit.server.roles.inbox import NotTaken
from leasekit.server.unit_of_work import UnitOfWork

logger = logging.getLogger("leasekit.server")
_fault_logger = logging.getLogger("leasekit.server.inbox")  # whose lines are limited


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
        """Take in what is there, soon: a tick has come, or an application says that it has put something in."""
        self._rung = True
        if self._taking is None:
            self._taking = asyncio.get_running_loop().create_task(self._take_in_all(), context=Context())

    async def _take_in_all(self) -> None:
        try:
            while self._rung:
                self._rung = False
                await self.take_in()
        except BackendError as error:
            logger.debug("the inbox waits for the next tick: %s", error)
        except Exception:
            _fault_logger.exception("the inbox waits for the next tick: it could not be taken in")
        finally:
            self._taking = None

    async def take_in(self) -> None:
        """Take in the rows of the inbox, some at a time, until there are none."""
        while await self._take(None):
            pass

    async def _take(self, numbers: Sequence[int] | None) -> int:
        """Take in these rows, or (None) the next ones; return how many have left the inbox, or were set aside."""
        try:
            size = inbox.STEP if numbers is None else len(numbers)
            taken: int = await self._commit.ask(TAKE_IN, numbers, size=size)
        except NotTaken as error:
            if len(error.numbers) == 1:
                await self._commit.ask(SET_ASIDE, {error.numbers[0]: str(error)}, size=1)
                return 1
            half = len(error.numbers) // 2
            return await self._take(error.numbers[:half]) + await self._take(error.numbers[half:])
        return taken

    async def idle(self) -> None:
        """Wait until nothing more is taken in."""
        while self._taking is not None:
            await asyncio.wait([self._taking])

    async def stop(self) -> None:
        """Stop taking in rows."""
        if self._taking is not None:
            self._taking.cancel()
            with suppress(asyncio.CancelledError):
                await self._taking
