"""Claims in progress: repeat each claim until it is answered, and give back the tasks of an abandoned claim.

A task that was granted to no caller is idle until its lease expires. So a claim keeps its `claim_id` over all tries,
and an abandoned claim is ended under this id: its tasks are released, and a try that is still under way gets nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from leasekit._driver.context import Context
from leasekit._driver.reporting.ledger import Ledger, PendingClaim
from leasekit._driver.reporting.outbox import Delivery, Outbox
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit._lifecycle.validation import check_kinds
from leasekit.backend import NameSource, cancel_all
from leasekit.errors import BackendError, Closed, Throttled, Unavailable
from leasekit.task import Claimed, NewTask, Settlement, Task

_NO_LABELS: Mapping[str, str] = {}
logger = logging.getLogger("leasekit")

_SPARE = 10.0  # seconds by which an answer may come after the wait that the claim asked for

Call = Callable[[str], Coroutine[Any, Any, Claimed]]  # asks the service once for the tasks of the claim of this id


class Ended(NamedTuple):
    """The tasks that an ended claim was granted, and the error if there may be more."""

    tasks: list[Task]
    error: BackendError | None = None


async def end_claim(end: Callable[[Sequence[str]], Awaitable[Claimed]], kinds: Sequence[str]) -> Ended:
    """End a claim at the service, with calls of `end(kinds)`; return the tasks that it was granted.

    Kinds may be kept by several servers. If a server does not answer, each kind is ended by a call of its own, so that
    the grants of the other servers are known.
    """
    ended = await _try_to_end(end, kinds)
    if not isinstance(ended.error, Unavailable) or len(kinds) == 1:
        return ended
    each = await asyncio.gather(*(_try_to_end(end, [kind]) for kind in kinds))
    tasks = {task.token: task for one in each for task in one.tasks}  # each call may return all tasks
    return Ended(list(tasks.values()), next((one.error for one in each if one.error), None))


async def _try_to_end(end: Callable[[Sequence[str]], Awaitable[Claimed]], kinds: Sequence[str]) -> Ended:
    try:
        return Ended((await end(kinds)).tasks)
    except BackendError as error:
        return Ended([], error)


class Claims:
    """The claims of one connection. A claim is repeated for at most `patience` seconds beyond its wait, by default."""

    def __init__(self, context: Context, outbox: Outbox, *, patience: float) -> None:
        self._context = context
        self._outbox = outbox
        self._patience = patience
        self._waiting: set[asyncio.Task[Claimed]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self.ledger: Ledger | None = None  # where a supervisor reads which claims are in progress

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        repeat_for: float | None = None,
        failing: Callable[[BaseException], None] | None = None,
        probes: bool = False,
        labels: Mapping[str, str] = _NO_LABELS,
    ) -> tuple[Claimed, float]:
        """Return the granted tasks, and when they were first asked for: a repeat may return the grant of the first try.

        `probes`: while the service is not known to answer, the claim does not wait for a task: its answer tells.
        Cancelling this call gives back tasks that may have been granted; so does closing, which raises `Closed`
        here. Raises `Refused`, without asking, if no service would accept so many kinds.
        """
        check_kinds(kinds)
        ask = partial(self._context.claim, kinds, limit=min(limit, self._context.backend.capabilities.max_claim))
        if labels:
            ask = partial(ask, labels=labels)

        def call(claim_id: str) -> Coroutine[Any, Any, Claimed]:
            poll = 0 if probes and not self._context.reachability.answers_claims else wait
            asking = partial(ask, wait=poll, claim_id=claim_id)
            return self._context.reachability.call("claim", asking, within=poll + _SPARE)

        if repeat_for is None:
            # For longer than the wait: an answer lost at the end of a long poll must be asked for again as well.
            repeat_for = wait + self._patience
        return await self._claim(kinds, call, repeat_for, failing)

    async def claim_name(
        self, source: NameSource, task: NewTask, *, repeat_for: float, within: float
    ) -> tuple[Claimed, float]:
        """Make and claim the task that stands for a name (`named`, `once`); the result is as that of `claim`.

        `within`: the seconds for the answer to each try.
        """

        def call(claim_id: str) -> Coroutine[Any, Any, Claimed]:
            asking = partial(source.claim_name, task, claim_id=claim_id)
            return self._context.reachability.call("claim", asking, within=within)

        return await self._claim([task.kind], call, repeat_for)

    async def _claim(
        self,
        kinds: Sequence[str],
        call: Call,
        repeat_for: float,
        failing: Callable[[BaseException], None] | None = None,
    ) -> tuple[Claimed, float]:
        if self._closed.is_set():
            raise Closed
        claim_id = f"{self._context.chance.getrandbits(128):032x}"
        claim = PendingClaim(claim_id, list(kinds))
        entry = self._note_claim(claim_id, kinds)
        asked_at = self._context.clock.now()
        waiting = asyncio.create_task(self._claim_until_answered(claim, call, repeat_for, failing, entry))
        self._waiting.add(waiting)
        try:
            claimed = await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.exception() is None:  # answered at the same moment
                self._release(waiting.result().tasks)
            if waiting.cancelled():
                entry = None  # the entry stays until the granted tasks have been given back
            if self._closed.is_set():
                raise Closed from None
            raise
        finally:
            self._waiting.discard(waiting)
            if entry is not None and self.ledger is not None:
                # Not now but soon: the caller first notes the granted tasks, without an await, when this call returns.
                asyncio.get_running_loop().call_soon(self.ledger.remove, entry)
        if self._closed.is_set():  # as above
            self._release(claimed.tasks)
            raise Closed
        return claimed, asked_at

    def _note_claim(self, claim_id: str, kinds: Sequence[str]) -> int | None:
        if self.ledger is None or not self._context.backend.capabilities.remembers_claims:
            return None
        return self.ledger.record_claim(claim_id, kinds)

    async def _claim_until_answered(
        self,
        claim: PendingClaim,
        call: Call,
        repeat_for: float,
        failing: Callable[[BaseException], None] | None,
        entry: int | None,
    ) -> Claimed:
        remembered = self._context.backend.capabilities.remembers_claims
        tries = 0

        async def ask() -> Claimed:
            nonlocal tries
            tries += 1
            return await (call(claim.claim_id) if remembered else self._ask_once(call(claim.claim_id)))

        try:
            claimed = await call_until(ask, for_at_most=repeat_for, failing=failing)
        except asyncio.CancelledError:
            if remembered:
                self._end(claim, entry)
            raise
        except (Unavailable, Throttled):
            if remembered:
                self._end(claim)
            raise
        if remembered and tries > 1 and not claimed.tasks:  # an earlier try may still be on its way
            self._end(claim)
        return claimed

    async def _ask_once(self, call: Coroutine[Any, Any, Claimed]) -> Claimed:
        """Make a call whose claim the service does not remember. What a cancelled call was granted is given back."""
        asking = asyncio.create_task(call)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            keeps_claims = self._context.backend.capabilities.keeps_claims
            if not (keeps_claims and asking.cancel()):  # only this call can tell which tasks it was granted
                spawn(self._release_when_answered(asking), self._returning)
            raise

    def _end(self, claim: PendingClaim, entry: int | None = None) -> None:
        """Have the service end this claim, release the tasks that it was granted, and remove its ledger `entry`."""

        def end(kinds: Sequence[str]) -> Awaitable[Claimed]:
            call = partial(self._context.backend.claim, kinds, limit=0, wait=0, claim_id=claim.claim_id)
            return call_once(call, within=_SPARE)

        async def give_back() -> None:
            ended = await end_claim(end, claim.kinds)
            self._release(ended.tasks)
            if ended.error is not None:
                _log_not_given_back(ended.error)
            elif entry is not None and self.ledger is not None:
                self.ledger.remove(entry)

        spawn(give_back(), self._returning)

    async def _release_when_answered(self, asking: Awaitable[Claimed]) -> None:
        try:
            self._release((await asking).tasks)
        except BackendError as error:
            _log_not_given_back(error)

    def _release(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._outbox.put(Delivery(Settlement(id=task.id, token=task.token, outcome="release")))

    async def abandon(self) -> None:
        """Stop claiming: pending `claim` calls raise `Closed`, and tasks that they were granted are given back."""
        self._closed.set()
        for waiting in self._waiting:
            waiting.cancel()
        if self._waiting:
            await asyncio.wait(list(self._waiting))
        if self._returning:
            await asyncio.wait(list(self._returning))

    async def aclose(self) -> None:
        """Cancel what still tries to give tasks back."""
        await cancel_all(self._returning)


def _log_not_given_back(error: BackendError) -> None:  # best effort: these leases expire by themselves
    logger.debug("an abandoned claim could not be given back: %s", error)
