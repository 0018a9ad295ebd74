"""Outbox: gather settlements into batches, and report them until they are answered.

Rule 1: each settlement gets one answer: a verdict, or a `Refused` of its own.
Rule 2: a settlement that is refused, put off, or breaks each call that carries it, delays no other settlement.
Rule 3: no settlement is dropped because the service is away. Only `aclose` and `withdraw` end the tries; settlements
without an answer are then in the spool, if there is one, for the next process.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from leasekit._core.backoff import Backoff
from leasekit._driver.answer import Answer
from leasekit._driver.context import Context
from leasekit._driver.reporting.spool import Spool
from leasekit._driver.retrying import call_by_task
from leasekit._driver.thread import spawn
from leasekit.backend import cancel_all
from leasekit.errors import BackendError, ProtocolError, Refused, Throttled
from leasekit.hooks import ReportDelayed, log_fields
from leasekit.task import Settlement, Verdict

logger = logging.getLogger("leasekit")

_CALLS = 2  # at once: while one call is answered the next batch gathers
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_NAMED = 10  # tasks, in the log
_PROMPT = 1.0  # seconds for an answer; a settlement without one by then is kept on disk, whether or not it was tried


Heard = Callable[["Verdict | Refused | None"], None]


class Delivery:
    """A settlement that is reported until it is answered.

    `is_over` says whether trust has ended, for a service that obeys stale reports: from then on it is not sent.
    """

    __slots__ = ("heard", "is_over", "put_at", "put_off", "settlement", "spooled")

    def __init__(
        self, settlement: Settlement, *, spooled: bool = False, is_over: Callable[[], bool] | None = None
    ) -> None:
        self.settlement = settlement
        self.is_over = is_over
        self.put_at = 0.0
        self.put_off = 0  # the number of answers *throttled* or *failed*
        self.spooled = spooled
        self.heard: Heard | None = None  # called in the driver's thread, with the argument of `end`

    def end(self, answer: Verdict | Refused | None) -> None:
        """Deliver the final answer (None: the outbox was closed first)."""
        heard, self.heard, self.is_over = (
            self.heard,
            None,
            None,
        )  # or lease and report would refer to each other for ever
        if heard is not None:
            heard(answer)


class Report(Delivery):
    """A settlement whose answer any thread may wait for."""

    __slots__ = ("answer",)

    def __init__(self, settlement: Settlement, *, is_over: Callable[[], bool] | None = None) -> None:
        super().__init__(settlement, is_over=is_over)
        self.answer: Answer[Verdict] = Answer()

    def end(self, answer: Verdict | Refused | None) -> None:
        if answer is None:
            self.answer.cancel()
        elif isinstance(answer, Verdict):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)
        super().end(answer)


class Outbox:
    """The settlements of one connection: each is sent until a verdict, a `Refused` or `aclose` ends it."""

    def __init__(self, context: Context, *, call_timeout: float) -> None:
        self._context = context
        self._spool: Spool | None = None
        self._spool_fails = False
        self._call_timeout = call_timeout
        self._delayed = False  # a failure was logged, and its end was not
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=context.chance.random)
        self._most = context.backend.capabilities.max_batch  # settlements in one call: fewer after a call that failed
        self._pending: deque[Delivery] = deque()
        self._unanswered: set[Delivery] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._draining = 0  # calls that will look at `_pending` again
        self._put_off: set[asyncio.Task[None]] = set()
        self._answered: list[Settlement] = []  # answered settlements that are not yet marked in the spool
        self._marking: set[asyncio.Task[None]] = set()
        self._keeping = asyncio.Lock()
        self._looking: set[asyncio.Task[None]] = set()  # keeps settlements on disk that wait for too long
        self._never = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False

    def put(self, report: Delivery) -> None:
        """Report a settlement as soon as a call is free; after closing, end it with None."""
        if self._closed:
            report.end(None)
            return
        report.put_at = self._context.clock.now()
        self._unanswered.add(report)
        self._empty.clear()
        self._enqueue([report])
        if self._spool is not None and _have_ended(self._looking):
            spawn(self._keep_late(), self._looking)

    def withdraw(self, report: Delivery) -> None:
        """End a settlement without an answer as *gone*. A call with it that is under way may still be obeyed."""
        self._end_with_answer(report, Verdict(id=report.settlement.id, verdict="gone", reason="expired"))

    def _enqueue(self, reports: Sequence[Delivery]) -> None:
        self._pending.extend(reports)
        if self._draining < _CALLS:
            self._draining += 1
            spawn(self._report_pending(), self._calls)

    def __len__(self) -> int:
        """Return the number of settlements without an answer. Any thread."""
        return len(self._unanswered)

    @property
    def keeps(self) -> bool:
        """Whether settlements that cannot be reported survive this process."""
        return self._spool is not None and not self._spool_fails

    async def empty(self) -> None:
        await self._empty.wait()

    async def use(self, spool: Spool) -> list[Settlement]:
        """Use `spool` from now on. Begin to report the settlements of dead processes in it, and return them."""
        if not self._context.backend.capabilities.refuses_stale:
            # A service that accepts writes of a stale lease must not get them late: another process may run the task.
            logger.info("results are not kept on disk: this service does not refuse a result that comes too late")
            return []
        self._spool = spool
        try:
            left = await asyncio.to_thread(spool.adopt)
        except OSError as error:
            logger.warning("the results left in %s cannot be taken over: %s", spool.directory, error)
            return []
        if left:
            logger.info("reporting %d results that earlier processes could not report", len(left))
        for settlement in left:
            report = Delivery(settlement, spooled=True)
            report.heard = partial(_log_if_lost, settlement)
            self.put(report)
        return left

    async def aclose(self) -> None:
        """Stop reporting. Settlements without an answer stay in the spool if there is one."""
        self._closed = True
        await cancel_all([*self._calls, *self._put_off, *self._looking])
        await asyncio.gather(*self._marking, return_exceptions=True)
        await self._keep(list(self._unanswered))
        if self._spool is not None:
            await asyncio.to_thread(self._spool.close)
        unsaid = [report.settlement for report in self._unanswered if not report.spooled]
        if done := [settlement.id for settlement in unsaid if settlement.outcome == "success"]:
            logger.warning(
                "closed before the success of tasks could be reported, so they may run again: %s", _named(done)
            )
        while self._unanswered:
            self._unanswered.pop().end(None)
        self._empty.set()

    async def _report_pending(self) -> None:
        try:
            while self._pending:
                count = min(self._most, len(self._pending))
                await self._report([self._pending.popleft() for _ in range(count)])
        finally:
            # With the last check, not when the task has ended: a settlement put in between would wait for ever.
            self._draining -= 1

    async def _report(self, batch: Sequence[Delivery]) -> None:
        """Try to report a batch once; settlements without an answer are tried again later."""
        for report in batch:
            if report.is_over is not None and report.is_over():
                gone = Verdict(id=report.settlement.id, verdict="gone", reason="unreported")
                self._end_with_answer(report, gone)
        batch = [report for report in batch if report in self._unanswered]  # the others were withdrawn
        if not batch:
            return
        try:
            settlements = [report.settlement for report in batch]
            unique_ids = self._context.backend.capabilities.unique_ids
            sending = partial(call_by_task, self._settle_once, settlements, unique_ids=unique_ids)
            verdicts = await self._context.reachability.call("settle", sending, within=self._call_timeout)
        except Refused as refused:
            await self._report_halves(batch, refused)
        except BackendError as error:
            await self._put_back(batch, error)
        else:
            self._backoff.reset()
            self._most = min(self._most * 2, self._context.backend.capabilities.max_batch)
            self._apply_verdicts(batch, verdicts)

    async def _settle_once(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        verdicts = await self._context.backend.settle(settlements)
        if [verdict.id for verdict in verdicts] != [settlement.id for settlement in settlements]:
            raise ProtocolError("the verdicts do not match the settlements")
        return verdicts

    def _apply_verdicts(self, batch: Sequence[Delivery], verdicts: Sequence[Verdict]) -> None:
        later: list[Delivery] = []
        asked = 0.0
        for report, verdict in zip(batch, verdicts, strict=True):
            if verdict.verdict in ("settled", "gone"):
                if verdict.verdict == "settled" and verdict.reason == "dead":
                    extra = log_fields(verdict.id, report.settlement.token)
                    logger.warning("task %s is dead: it is not tried again", verdict.id, extra=extra)
                self._end_with_answer(report, verdict)
            else:
                report.put_off += 1
                asked = max(asked, verdict.retry_after or 0.0)
                later.append(report)
        if self._delayed and not later:
            self._delayed = False
            logger.warning("how tasks ended is reported again")
        if later:
            reasons = (verdict.reason for verdict in verdicts if verdict.verdict == "failed")
            self._tell_hooks_of_delay(later, next(filter(None, reasons), "the service answered: later"))
            tries = min(10, max(report.put_off for report in later))
            wait = _FIRST_WAIT * 2**tries * (1 - self._context.chance.random() / 2)
            spawn(self._enqueue_after(later, min(max(wait, asked), _LONGEST_WAIT)), self._put_off)

    async def _enqueue_after(self, reports: Sequence[Delivery], wait: float) -> None:
        await self._keep(reports)
        await self._context.clock.wait(self._never, self._context.clock.now() + wait)
        self._enqueue(reports)

    async def _report_halves(self, batch: Sequence[Delivery], refused: Refused) -> None:
        """Report a refused batch in halves, until a single settlement is refused: that one is answered."""
        if len(batch) == 1:
            self._end_with_answer(batch[0], refused)
            return
        half = len(batch) // 2
        await self._report(batch[:half])
        await self._report(batch[half:])

    async def _put_back(self, batch: Sequence[Delivery], error: BackendError) -> None:
        """Put a failed batch back, and wait. One settlement may break calls for others: the next batch is smaller."""
        await self._keep([*batch, *self._pending])
        self._pending.extend(batch)
        self._most = max(1, len(batch) // 2)
        self._tell_hooks_of_delay(batch, f"{type(error).__name__}: {error}")
        asked = error.retry_after if isinstance(error, Throttled) else None
        wait = max(self._backoff.wait(), min(asked or 0.0, _LONGEST_WAIT))
        await self._context.clock.wait(self._never, self._context.clock.now() + wait)

    def _tell_hooks_of_delay(self, reports: Sequence[Delivery], why: str) -> None:
        ids = [report.settlement.id for report in reports]
        if not self._delayed:  # once, not for each try
            self._delayed = True
            logger.warning("how tasks ended could not be reported, and is tried again (%s): %s", _named(ids), why)
        self._context.hooks(ReportDelayed(at=self._context.clock.now(), task_ids=ids, why=why))

    async def _keep_late(self) -> None:
        """Write each settlement to the spool that was not answered within `_PROMPT` seconds, until none is left.

        Settlements that have waited for half of that time are written with it, so that two writes a second are enough.
        """
        while waiting := [report for report in self._unanswered if not report.spooled]:
            late_at = min(report.put_at for report in waiting) + _PROMPT
            await self._context.clock.wait(self._never, max(late_at, self._context.clock.now() + _PROMPT / 2))
            put_by = self._context.clock.now() - _PROMPT / 2
            await self._keep([report for report in self._unanswered if report.put_at <= put_by])

    async def _keep(self, reports: Sequence[Delivery]) -> None:
        """Write settlements to the spool, if there is one, so that they survive this process. Only logs an OSError."""
        async with self._keeping:
            fresh = [report for report in reports if not report.spooled]
            if self._spool is None or not fresh:
                return
            if self._marking:  # perhaps of an earlier settlement of the same lease
                await asyncio.wait(list(self._marking))
            try:
                await asyncio.to_thread(self._spool.keep, [report.settlement for report in fresh])
            except OSError as error:
                if not self._spool_fails:
                    logger.warning("results cannot be kept in %s, only in memory: %s", self._spool.directory, error)
                self._spool_fails = True
            else:
                self._spool_fails = False
            for report in fresh:
                report.spooled = self._spool.has(report.settlement)
                if report.spooled and report not in self._unanswered:  # answered meanwhile
                    self._mark_answered(report)

    def _mark_answered(self, report: Delivery) -> None:
        self._answered.append(report.settlement)
        if _have_ended(self._marking):
            spawn(self._mark_all_answered(), self._marking)

    async def _mark_all_answered(self) -> None:
        """Mark answered settlements in the spool, so that no other process reports them."""
        assert self._spool is not None  # noqa: S101 - the settlements are in it
        while answered := self._answered:
            self._answered = []
            try:
                await asyncio.to_thread(self._spool.answered, answered)
            except OSError as error:  # they will be reported twice, which does no harm
                logger.debug("the answered settlements cannot be marked in the spool: %s", error)

    def _end_with_answer(self, report: Delivery, answer: Verdict | Refused) -> None:
        if report not in self._unanswered:  # it was withdrawn
            return
        report.end(answer)
        if report.spooled:
            self._mark_answered(report)
        # After the answer: the code that receives the answer may put in another settlement instead.
        self._unanswered.discard(report)
        if not self._unanswered:
            self._empty.set()


def _have_ended(tasks: set[asyncio.Task[None]]) -> bool:
    """Return whether no task will look again; one that has ended stays in its set until the loop's next turn."""
    return all(task.done() for task in tasks)


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")


def _log_if_lost(settlement: Settlement, answer: Verdict | Refused | None) -> None:
    """Log the loss of a settlement that was adopted from the spool: no other code receives its answer."""
    if isinstance(answer, Refused) or (answer is not None and answer.verdict == "gone"):
        why = str(answer) if isinstance(answer, Refused) else answer.reason
        extra = log_fields(settlement.id, settlement.token)
        logger.warning("the result of %s from the spool is dropped: %s", settlement.id, why, extra=extra)
