"""`SqsBackend`: the messages of a queue as tasks under leases. A lease is a message's invisibility.

`capabilities` says what SQS cannot do: no fences, no checkpoints, no cancel requests. A standard queue also accepts
writes with the handle of an earlier receive, so this backend writes to no lease that may have ended (`receipts`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from leasekit.backend import Capabilities, check_kinds, check_limit, dead_ones
from leasekit.config import Heartbeats
from leasekit.errors import BackendError, Refused, Throttled, Unavailable
from leasekit.hooks import log_fields
from leasekit.ids import uuid7s
from leasekit.task import (
    Beat,
    Claimed,
    Exponential,
    NewTask,
    Page,
    Purged,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    Status,
    Task,
    Verdict,
)
from leasekit_aws.boto_clients import BotoClients
from leasekit_aws.errors import verdict_of
from leasekit_sqs.address import LONGEST_TTL, Address, address
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Answer, Calls, Gone, is_no_queue, refusing
from leasekit_sqs.comparison import Comparison
from leasekit_sqs.dead_letters import DeadLetterQueues
from leasekit_sqs.endings import Ending, Endings
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipt, Receipts, beats_ended
from leasekit_sqs.receiving import Receiver
from leasekit_sqs.sending import message, refuse_what_cannot_be

logger = logging.getLogger("leasekit")

_SOON = 900.0  # seconds before the end of the twelve hours at which a warning is logged
_MOST_SENT = 10_000  # sent messages that are remembered …
_REMEMBERED = 300.0  # … and for how many seconds, as by a FIFO queue
# Part of the keeper's time for heartbeats: when that is over, the answers to all other messages would be lost, too.
_IN_TIME = 0.8
_UNKNOWN = (
    "SQS keeps no such message for this receive: was it deleted inside the block, or has another worker done it? Is "
    "queue_url the queue that it came from?"
)
_TWELVE_HOURS = "SQS lets a message be held for 12 h in all, and they are over: split the work, or release it in time"


_Sent = tuple[str, str, bytes]
"""A message that was sent: the id of its task, the kind, and the digest of its body."""


def boot_time() -> float:
    """Return the seconds of a clock that also runs while the machine is suspended, as the clock of SQS does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def connect(url: str, *, worker: str) -> "SqsBackend":
    """Return the backend for the queue or queues at this URL (see `Address`). Nothing is opened yet.

    boto3 finds the credentials, and the region if the URL has none. Raises `ConfigError`; its message never contains
    the URL.
    """
    return SqsBackend(address(url))


class SqsBackend:
    """Tasks as the messages of one queue, or of one queue for each kind.

    With `receives=False` messages come from a receive loop of the user's own.
    """

    capabilities = Capabilities(
        max_batch=100,  # ten to a call; more than ten are calls at the same time
        max_claim=100,
        fences=False,
        refuses_stale=False,
        remembers_claims=False,
        keeps_claims=True,
        cancel_requests=False,
        progress=False,
        max_result=None,
        unique_ids=False,  # FIFO queues forget an id after five minutes, standard queues never know it
    )

    def __init__(
        self,
        address: Address,
        *,
        clients: BotoClients | None = None,
        clock: Callable[[], float] = boot_time,
        receives: bool = True,
    ) -> None:
        self.address = address
        self.receipts = Receipts(clock)
        self._calls = Calls(clients or BotoClients("sqs", region=address.region, endpoint=address.endpoint), clock)
        self._clock = clock
        self._queues = Queues(self._calls, address)
        self._dead_letters = DeadLetterQueues(self._calls, self._queues)
        self._receiver = Receiver(self._calls, self._queues, self.receipts, address, clock)
        self._endings = Endings(self._calls, self._queues, clock)
        self._comparison = None if receives else Comparison(self._queues, address.ttl)
        self._sent: dict[_Sent, float] = {}  # messages of calls that failed in part → until when
        self._crashed_since: dict[str, float] = {}  # tokens of crashed holders → when each crash was first reported

    def hear_of(self, kinds: Collection[str]) -> None:
        """Note that a message that names no kind may be of any of these, whichever are claimed at present."""
        self._receiver.hear_of(kinds)

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take up to `limit` messages of these kinds; wait up to `wait` seconds for the first, and at most `?wait=`.

        Several queues are read in turn. SQS does not know claims by id, but a FIFO queue recognises a repeated receive.
        Messages that arrive for a cancelled claim go to the next claim, or are released.
        """
        check_kinds(kinds)
        began_at = self._clock()
        async with refusing():
            tasks = await self._receiver.take(kinds, limit, wait, claim_id)
        return Claimed(tasks=tasks, waited=self._waited(tasks, began_at))

    def _waited(self, tasks: Sequence[Task], began_at: float) -> float | None:
        """Return for how long, at least, the claim had waited at the first grant; None if the grant came earlier.

        SQS does not say when it granted a message, but it cannot have been before the receive was sent.
        """
        receipts = (self.receipts.find(task.id, task.token) for task in tasks)
        earliest = min((receipt.received_at or 0.0 for receipt in receipts if receipt is not None), default=began_at)
        return earliest - began_at if earliest >= began_at else None

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Extend the invisibility: `renewed`, `gone`, `throttled` or `failed` for each, in order.

        SQS lets a message be held for twelve hours. In the last `ttl` seconds of these, the rest is granted.
        """
        now, ttl = self._clock(), self.address.ttl
        verdicts: dict[int, Verdict] = {}
        items: list[Item] = []
        kept: list[tuple[int, Receipt, int]] = []
        for position, beat in enumerate(beats):
            receipt = self.receipts.find(beat.id, beat.token)
            reason = _why_gone(receipt, now)
            grant = receipt.grant(ttl, now) if receipt is not None and reason is None else 0
            if receipt is None or reason is not None or not grant:
                verdicts[position] = _gone(beat.id, reason or _TWELVE_HOURS)
                continue
            self._warn_of_twelve_hours(receipt, now)
            entry = {"ReceiptHandle": receipt.handle, "VisibilityTimeout": grant}
            items.append(Item(receipt.url, entry, receipt=receipt, leaves_by=receipt.until))
            kept.append((position, receipt, grant))
        errors = await in_batches(
            self._calls,
            "change_message_visibility_batch",
            items,
            started=_note_beat_call,
            within=_IN_TIME * Heartbeats().for_ttl(ttl).call_timeout,
        )
        for (position, receipt, grant), error in zip(kept, errors, strict=True):
            verdicts[position] = self._beat_verdict(receipt, grant, now, error)
        return [verdicts[position] for position in range(len(beats))]

    def _beat_verdict(self, receipt: Receipt, grant: int, asked_at: float, error: BackendError | None) -> Verdict:
        if isinstance(error, Gone) and error.reason == "unknown" and receipt.deleted_as is not None:
            # The deletion was applied, and its answer lost: while this lease lasted, no other worker had the message.
            self.receipts.settled(receipt, receipt.deleted_as)
            return _gone(receipt.id, "settled")
        # SQS answers success too if the message had become visible before the request came, and hides nothing.
        if self._clock() >= receipt.until:
            return _gone(receipt.id, "expired")
        if error is not None:
            return self._failure_of_beat(receipt, error)
        receipt.hidden(asked_at, grant)
        receipt.is_kept = True
        if self._comparison is not None and receipt.has_queues_timeout is not False:
            self._comparison.start(receipt.url, is_seen=receipt.has_queues_timeout is not None)
        return Verdict(id=receipt.id, verdict="renewed", ttl=float(grant))

    def _failure_of_beat(self, receipt: Receipt, error: BackendError) -> Verdict:
        """Return the verdict on a heartbeat that SQS has answered with an error."""
        verdict = _error_verdict(receipt.id, error)
        if self._comparison is None:  # a message that this backend has received itself
            return verdict
        if verdict.verdict == "gone" and verdict.reason == "unknown":
            return _gone(receipt.id, _UNKNOWN)
        if is_no_queue(error) and not receipt.is_kept:
            return _gone(receipt.id, f"ConfigError: {error}: is queue_url the queue that the message came from?")
        return verdict

    def _warn_of_twelve_hours(self, receipt: Receipt, now: float) -> None:
        left = receipt.left(now)
        if left <= max(_SOON, min(3 * self.address.ttl, LONGEST_TTL / 4)) and not receipt.warned:
            receipt.warned = True
            logger.warning(
                "task %s (token %s…) can be held for 12 h in all; %.0f min are left: split the work, or save what is "
                "done and release the task",
                receipt.id,
                receipt.handle[:6],
                left / 60,
                extra=log_fields(receipt.id, receipt.handle),
            )

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone`, `throttled` or `failed` for each. SQS keeps no results and no progress."""
        verdicts: dict[int, Verdict] = {}
        endings: list[Ending] = []
        positions: list[int] = []
        only_kept: list[Receipt] = []
        for position, settlement in enumerate(settlements):
            if settlement.then:
                detail = "SQS cannot send a message and delete another in one transaction: call schedule() instead"
                raise Refused(detail, errors=[{"item": position, "field": "then", "detail": detail}])
            receipt = self.receipts.find(settlement.id, settlement.token) or await self._add_crashed(settlement)
            if receipt is not None and not receipt.settles:
                only_kept.append(receipt)
            if receipt is None:
                verdicts[position] = _gone(settlement.id, "unknown")
            elif receipt.outcome is not None:
                is_repeat = receipt.outcome == settlement.outcome
                verdicts[position] = _settled(settlement.id) if is_repeat else _gone(settlement.id, "settled")
            elif not receipt.settles:
                self.receipts.settled(receipt, settlement.outcome)  # now: no further heartbeat leaves
                verdicts[position] = _settled(settlement.id)
            else:
                endings.append(Ending(receipt, settlement))
                positions.append(position)
        errors, _ = await asyncio.gather(self._endings.end(endings), beats_ended(only_kept))
        for position, ending, error in zip(positions, endings, errors, strict=True):
            if error is None:
                self.receipts.settled(ending.receipt, ending.settlement.outcome)
            verdicts[position] = _end_verdict(ending.settlement, error)
        return [verdicts[position] for position in range(len(settlements))]

    async def _add_crashed(self, settlement: Settlement) -> Receipt | None:
        """Add a receipt for a crash that a supervisor reports, which knows id and token; None for any other end."""
        if settlement.outcome != "crash" or self.address.is_template or settlement.token in self.receipts:
            return None
        # Before the queue is looked up: a repeat after a failed look-up keeps the instant of the first report.
        seen_at = self._crashed_since.setdefault(settlement.token, self._clock())
        url = await self._queues.of("")
        receipt = Receipt(
            id=settlement.id,
            handle=settlement.token,
            url=url,
            message={},
            attempt=1,
            group=None,
            retry=Exponential(),
            polled_for=self.address.longest_poll + 1 if self.address.longest_poll else 0,
        )
        receipt.assume_holder_ended(seen_at, self.address.ttl)
        self.receipts.add(receipt)
        self._crashed_since.pop(settlement.token, None)
        return receipt

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Send messages: when this returns they are durable.

        A queue does not know its tasks by id: a message that is sent again after a lost answer may be there twice.
        Raises `Refused`, which names item and field, before anything is sent. If SQS takes only a part of a call, that
        part is remembered for five minutes: a repeat within that time sends only the missing messages.
        """
        now = datetime.now(UTC)
        is_fifo = self.address.is_fifo
        refuse_what_cannot_be(tasks, is_fifo=is_fifo, now=now)
        ids = [task.id or made_up for task, made_up in zip(tasks, uuid7s(len(tasks), now.timestamp()), strict=True)]
        messages = [
            message(task, task_id, item=n, is_fifo=is_fifo, now=now)
            for n, (task, task_id) in enumerate(zip(tasks, ids, strict=True))
        ]
        keys = [(task_id, task.kind, one.digest) for task_id, task, one in zip(ids, tasks, messages, strict=True)]
        first = {key: n for n, key in reversed(list(enumerate(keys)))}
        async with refusing():
            items = {
                n: Item(await self._queues.of(tasks[n].kind), messages[n].entry, messages[n].size)
                for n in sorted(first.values())
                if self._sent.get(keys[n], 0.0) <= self._clock()
            }
            errors = await in_batches(self._calls, "send_message_batch", list(items.values()), in_turn=is_fifo)
            failed = {n: error for n, error in zip(items, errors, strict=True) if error is not None}
            self._remember(first, {keys[n] for n in failed})
            if failed:
                raise _unsent_error(failed)
        return [Scheduled(id=ids[n], created=first[key] == n, status=Status.NEW) for n, key in enumerate(keys)]

    def _remember(self, asked: Collection[_Sent], failed: Collection[_Sent]) -> None:
        """Remember what SQS has taken of a call until the rest is sent, too: from then on, a repeat is a new task."""
        for key in asked:
            self._sent.pop(key, None)
        if failed:
            until = self._clock() + _REMEMBERED
            self._sent.update(dict.fromkeys((key for key in asked if key not in failed), until))
        while len(self._sent) > _MOST_SENT:
            del self._sent[next(iter(self._sent))]

    async def stats(self) -> Stats:
        """Count the messages of each kind, roughly: `new` (delayed), `enqueued` and `processing` (in flight).

        A queue without `?kind=` counts as a kind with the queue's name. For a template, the kinds that this backend has
        used are counted.
        """
        async with refusing():
            kinds = await self._queues.known()
            return Stats(kinds={kind: await self._queues.counts(url) for kind, url in kinds.items()})

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Any) -> Page:
        """Return some dead letters of a kind: a sample, which has no further pages. Raises `Refused` for a filter."""
        check_limit("limit", limit)
        return await self._dead_letters.sample(cursor=cursor, limit=limit, **dead_ones(wanted))

    async def redrive(self, task_ids: Sequence[str] = (), *, rate: int | None = None, **wanted: Any) -> Redriven:
        """Have SQS move all dead letters back into the queue of this kind, at most `rate` a second.

        The answer names the move (`moving`), by which SQS can be asked to cancel it, and says about how many go. Raises
        `Refused` if tasks are to be selected, and if the queue has no dead-letter queue.
        """
        return await self._dead_letters.redrive(task_ids, rate=rate, **wanted)

    async def purge(self, task_ids: Sequence[str] = (), **wanted: Any) -> Purged:
        """Have SQS remove all dead letters of this kind, within a minute; messages of the queue itself stay."""
        return await self._dead_letters.purge(task_ids, **wanted)

    async def aclose(self) -> None:
        """Release the messages that no claim has taken, and close the connections. Leases are not touched."""
        await self._receiver.aclose()
        if self._comparison is not None:
            await self._comparison.aclose()
        self._calls.close()


def _why_gone(receipt: Receipt | None, now: float) -> str | None:
    if receipt is None:
        return "unknown"
    if receipt.outcome is not None or receipt.is_returning:
        return "settled"
    return "expired" if now >= receipt.until else None


def _note_beat_call(item: Item, call: "asyncio.Future[Answer]") -> None:
    if item.receipt is not None:
        under_way = item.receipt.under_way
        under_way.add(call)
        call.add_done_callback(under_way.discard)


def _gone(task_id: str, reason: str) -> Verdict:
    return Verdict(id=task_id, verdict="gone", reason=reason)


def _settled(task_id: str) -> Verdict:
    return Verdict(id=task_id, verdict="settled")


def _error_verdict(task_id: str, error: BackendError) -> Verdict:
    return _gone(task_id, error.reason) if isinstance(error, Gone) else verdict_of(task_id, error)


def _end_verdict(settlement: Settlement, error: BackendError | None) -> Verdict:
    if error is None:
        return _settled(settlement.id)
    verdict = _error_verdict(settlement.id, error)
    if verdict.verdict != "failed":
        return verdict
    what = {"success": "deleted", "cancelled": "deleted", "fatal": "moved to the dead-letter queue"}
    not_done = f"the message could not be {what.get(settlement.outcome, 'given back')} yet"
    return structs.replace(verdict, reason=f"{not_done}: {verdict.reason}")


def _unsent_error(failed: dict[int, BackendError]) -> BackendError:
    """Return the error of a batch whose messages `failed` were not sent; an error worth a repeat takes precedence."""
    refused = [
        {"item": n, "field": "payload", "detail": str(error)}
        for n, error in failed.items()
        if isinstance(error, Refused)
    ]
    for error in failed.values():
        if isinstance(error, (Throttled, Unavailable)):
            return error
    return Refused(f"SQS refused {len(refused)} messages; the others are sent: {refused[0]['detail']}", errors=refused)
