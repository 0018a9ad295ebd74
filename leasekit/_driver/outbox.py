"""Settlements on their way: gathered into batches, and reported again until they are answered (SYSTEMS D6).

Rule 1: whoever puts something in gets one answer: a verdict, or the `Refused` of that very item.
Rule 2: one that is refused holds up nobody else.
Rule 3: nothing is dropped because the service is away; only closing ends the tries.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from leasekit._core.backoff import Backoff
from leasekit._driver.clock import Clock
from leasekit.backend import Backend
from leasekit.errors import BackendError, ProtocolError, Refused, Throttled
from leasekit.hooks import Hooks, Unreported
from leasekit.task import Settlement, Verdict

__all__ = ["Outbox", "Report"]

_CALLS = 2  # under way at once: while one is answered the next batch gathers
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0


@dataclass(slots=True, eq=False)
class Report:
    """One settlement, and its answer to be."""

    settlement: Settlement
    answer: Future[Verdict] = field(default_factory=Future[Verdict])


class Outbox:
    """The settlements of one connection."""

    def __init__(
        self, backend: Backend, *, clock: Clock, hooks: Hooks, random: Callable[[], float], call_timeout: float
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._hooks = hooks
        self._call_timeout = call_timeout
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=random)
        self._pending: deque[Report] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._never = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, report: Report) -> None:
        """Report it as soon as there is a call to spare."""
        self._pending.append(report)
        self._empty.clear()
        if len(self._calls) < _CALLS:
            task = asyncio.create_task(self._drain())
            self._calls.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not self._calls and not self._pending:
            self._empty.set()

    async def empty(self) -> None:
        """Wait until everything is answered."""
        await self._empty.wait()

    async def aclose(self) -> None:
        """End the tries; what is unanswered stays so."""
        for task in list(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        while self._pending:
            self._pending.popleft().answer.cancel()

    async def _drain(self) -> None:
        while self._pending:
            limit = self._backend.traits.max_batch
            batch = [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
            try:
                await self._report(batch)
            except asyncio.CancelledError:
                for report in batch:
                    report.answer.cancel()
                raise

    async def _report(self, batch: Sequence[Report]) -> None:
        """Until each of them is answered."""
        left = list(batch)
        while left:
            wait = 0.0
            try:
                left = self._take(left, await self._settle([report.settlement for report in left]))
                why = "the service answered: later"
            except Refused as refused:
                left = await self._refused(left, refused)
                why = str(refused)
            except Exception as error:  # noqa: BLE001 - whatever an adapter lets through, the results are kept
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, Throttled):
                    wait = error.retry_after or 0.0
            if not left:
                self._backoff.reset()
                return
            if self._hooks:
                ids = [report.settlement.id for report in left]
                self._hooks(Unreported(at=self._clock.now(), task_ids=ids, why=why))
            wait = max(self._backoff.wait(), min(wait, _LONGEST_WAIT))
            await self._clock.wait(self._never, self._clock.now() + wait)

    async def _settle(self, settlements: list[Settlement]) -> list[Verdict]:
        try:
            async with asyncio.timeout(self._call_timeout):
                verdicts = await self._backend.settle(settlements)
        except TimeoutError as error:
            raise BackendError(f"no answer within {self._call_timeout:g} s") from error
        if [verdict.id for verdict in verdicts] != [settlement.id for settlement in settlements]:
            raise ProtocolError("the verdicts do not match the settlements")
        return verdicts

    def _take(self, reports: list[Report], verdicts: list[Verdict]) -> list[Report]:
        left: list[Report] = []
        for report, verdict in zip(reports, verdicts, strict=True):
            if verdict.verdict in ("settled", "gone"):
                _answer(report, verdict)
            else:
                left.append(report)
        return left

    async def _refused(self, reports: list[Report], refused: Refused) -> list[Report]:
        """A batch is refused whole: find the one that is to blame."""
        if len(reports) == 1:
            if not reports[0].answer.done():
                reports[0].answer.set_exception(refused)
            return []
        half = len(reports) // 2
        await self._report(reports[:half])
        await self._report(reports[half:])
        return []


def _answer(report: Report, verdict: Verdict) -> None:
    if not report.answer.done():
        report.answer.set_result(verdict)
