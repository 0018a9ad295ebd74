"""`SqsBackend`: the messages of a queue as tasks under leases. A lease is a message's invisibility.

What SQS does not do is said in `traits`: no fences, no checkpoints, no orders, and a standard queue takes what is
written with the handle of an earlier receive. So a lease that may have ended is not touched any more (`receipts`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from leasekit.backend import Traits
from leasekit.errors import BackendError, Refused, Throttled, Unavailable
from leasekit.hooks import about
from leasekit.ids import uuid7s
from leasekit.task import Beat, Claimed, Exponential, NewTask, Scheduled, Settlement, Status, Task, Verdict
from leasekit.wire import check_kinds
from leasekit_aws.clients import Clients
from leasekit_sqs.address import LONGEST_TTL, Address, address
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Answer, Calls, Gone, refusing
from leasekit_sqs.endings import Ending, Endings
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipt, Receipts
from leasekit_sqs.receiving import Receiver
from leasekit_sqs.sending import message, refuse_what_cannot_be

__all__ = ["SqsBackend", "boot_time", "connect"]

logger = logging.getLogger("leasekit")

_SOON = 900.0  # seconds before the end of the twelve hours: time to say so
_SENT = 10_000  # ids that are remembered as sent


def boot_time() -> float:
    """Seconds that also pass while the machine is suspended: SQS does not wait for it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def connect(url: str, *, worker: str) -> "SqsBackend":
    """The backend of the queue, or queues, at this URL (`Address` says what may be in it). Nothing is opened yet.

    Credentials, and the region where the URL has none, are found as boto3 does. Raises `ConfigError`; the message does
    not repeat the URL.
    """
    return SqsBackend(address(url))


class SqsBackend:
    """Messages of one queue, or of a queue for each kind."""

    traits = Traits(
        max_batch=100,  # ten to a call; more than ten are calls at the same time
        max_claim=100,
        fences=False,
        refuses_stale=False,
        remembers_claims=False,
        keeps_claims=True,
        orders=False,
        progress=False,
        max_result=None,
        unique_ids=False,  # FIFO queues forget an id after five minutes, others never know it
    )

    def __init__(
        self, address: Address, *, clients: Clients | None = None, clock: Callable[[], float] = boot_time
    ) -> None:
        self.address = address
        self.receipts = Receipts(clock)
        self._calls = Calls(clients or Clients("sqs", region=address.region, endpoint=address.endpoint))
        self._clock = clock
        self._queues = Queues(self._calls, address)
        self._receiver = Receiver(self._calls, self._queues, self.receipts, address, clock)
        self._endings = Endings(self._calls, self._queues, clock)
        self._sent: dict[str, None] = {}
        self._seen_dead: dict[str, float] = {}  # tokens of who ended, by when that was first heard of

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take up to `limit` messages of these kinds; wait up to `wait` seconds for the first, and at most `?wait=`.

        Several queues are looked at in turn. SQS does not know claims by id; a FIFO queue knows a receive that is tried
        again. What a cancelled claim gets goes to the next one, or back.
        """
        check_kinds(kinds)
        began_at = self._clock()
        async with refusing():
            tasks = await self._receiver.take(kinds, limit, wait, claim_id)
        return Claimed(tasks=tasks, waited=self._waited(tasks, began_at))

    def _waited(self, tasks: Sequence[Task], began_at: float) -> float | None:
        """How long the claim had waited when the first of these was granted, at least; None where that was before it.

        SQS does not say when it has granted them, but it cannot have been before the receive was asked for.
        """
        receipts = (self.receipts.find(task.id, task.token) for task in tasks)
        earliest = min((one.received_at or 0.0 for one in receipts if one is not None), default=began_at)
        return earliest - began_at if earliest >= began_at else None

    # Beating ------------------------------------------------------------------------------------------------------

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        """Extend the invisibility: `renewed`, `gone`, `throttled` or `failed` for each, in order.

        In the last `ttl` seconds of the twelve hours for which SQS lets a message be held, what is left is granted.
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
                verdicts[position] = _gone(beat.id, reason or "expired")
                continue
            self._warn_in_time(receipt, now)
            entry = {"ReceiptHandle": receipt.handle, "VisibilityTimeout": grant}
            items.append(Item(receipt.url, entry, receipt=receipt))
            kept.append((position, receipt, grant))
        errors = await in_batches(self._calls, "change_message_visibility_batch", items, started=_note)
        for (position, receipt, grant), error in zip(kept, errors, strict=True):
            verdicts[position] = self._beaten(receipt, grant, now, error)
        return [verdicts[position] for position in range(len(beats))]

    def _beaten(self, receipt: Receipt, grant: int, asked_at: float, error: BackendError | None) -> Verdict:
        if error is not None:
            return _no(receipt.id, error)
        # SQS says *done* also of what had become visible before the request came, and hides nothing.
        if self._clock() >= receipt.until:
            return _gone(receipt.id, "expired")
        receipt.hidden(asked_at, grant)
        return Verdict(id=receipt.id, verdict="renewed", ttl=float(grant))

    def _warn_in_time(self, receipt: Receipt, now: float) -> None:
        left = receipt.left(now)
        if left <= max(_SOON, min(3 * self.address.ttl, LONGEST_TTL / 4)) and not receipt.warned:
            receipt.warned = True
            logger.warning(
                "task %s (token %s…) can be held for 12 h in all; %.0f min are left: split the work, or save what is "
                "done and release it",
                receipt.id,
                receipt.handle[:6],
                left / 60,
                extra=about(receipt.id, receipt.handle),
            )

    # Settling -----------------------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone`, `throttled` or `failed` for each, in order.

        What is missing, results and progress, SQS does not keep.
        """
        verdicts: dict[int, Verdict] = {}
        endings: list[Ending] = []
        positions: list[int] = []
        for position, said in enumerate(settlements):
            if said.then:
                detail = "SQS cannot send a message and delete another in one transaction: schedule what follows"
                raise Refused(detail, errors=[{"item": position, "field": "then", "detail": detail}])
            receipt = self.receipts.find(said.id, said.token) or await self._of_the_dead(said)
            if receipt is None:
                verdicts[position] = _gone(said.id, "unknown")
            elif receipt.outcome is not None:
                is_repeat = receipt.outcome == said.outcome
                verdicts[position] = _settled(said.id) if is_repeat else _gone(said.id, "settled")
            elif not receipt.settles:
                self.receipts.settled(receipt, said.outcome)
                verdicts[position] = _settled(said.id)
            else:
                endings.append(Ending(receipt, said))
                positions.append(position)
        errors = await self._endings.end(endings)
        for position, ending, error in zip(positions, endings, errors, strict=True):
            if error is None:
                self.receipts.settled(ending.receipt, ending.said.outcome)
            verdicts[position] = _settled(ending.said.id) if error is None else _no(ending.said.id, error)
        return [verdicts[position] for position in range(len(settlements))]

    async def _of_the_dead(self, said: Settlement) -> Receipt | None:
        """What a process has held that was seen to end: its supervisor has nothing but id and token."""
        if said.outcome != "crash" or self.address.is_template or said.token in self.receipts:
            return None
        seen_at = self._seen_dead.setdefault(said.token, self._clock())  # also where the queue is not found at first
        url = await self._queues.of("")
        receipt = Receipt(
            id=said.id, handle=said.token, url=url, message={}, attempt=1, group=None, retry=Exponential()
        )
        receipt.left_by_the_dead(seen_at, self.address.ttl)
        self.receipts.add(receipt)
        self._seen_dead.pop(said.token, None)
        return receipt

    # Scheduling ---------------------------------------------------------------------------------------------------

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        """Send messages: when this returns they are durable.

        A standard queue knows no ids: what is sent again after an answer was lost may be there twice. Raises `Refused`,
        which names item and field, before anything is sent; what SQS itself refuses of a batch leaves the others sent,
        and sending that batch again sends only what is missing.
        """
        now = datetime.now(UTC)
        is_fifo = self.address.is_fifo
        refuse_what_cannot_be(tasks, is_fifo=is_fifo, now=now)
        ids = [task.id or made_up for task, made_up in zip(tasks, uuid7s(len(tasks), now.timestamp()), strict=True)]
        first = {task_id: n for n, task_id in reversed(list(enumerate(ids))) if task_id not in self._sent}
        sent = {n: message(tasks[n], task_id, item=n, is_fifo=is_fifo, now=now) for task_id, n in first.items()}
        async with refusing():
            items = {
                n: Item(await self._queues.of(tasks[n].kind), one.entry, one.size) for n, one in sorted(sent.items())
            }
            errors = await in_batches(self._calls, "send_message_batch", list(items.values()))
            failed = {n: error for n, error in zip(items, errors, strict=True) if error is not None}
            self._remember(ids[n] for n in items if n not in failed)
            if failed:
                raise _unsent(failed)
        return [Scheduled(id=task_id, created=n in items, status=Status.NEW) for n, task_id in enumerate(ids)]

    def _remember(self, ids: Iterable[str]) -> None:
        self._sent.update(dict.fromkeys(ids))
        while len(self._sent) > _SENT:
            del self._sent[next(iter(self._sent))]

    async def stats(self) -> dict[str, Any]:
        """About how many messages are in which status, by kind: `new` (delayed), `enqueued`, `processing` (in flight).

        A queue without `?kind=` counts as a kind of its own name; of a template, the kinds that were used from here.
        """
        async with refusing():
            return {
                "kinds": {kind: await self._queues.counts(url) for kind, url in (await self._queues.known()).items()}
            }

    async def redrive(self, kind: str | None = None, *, rate: int | None = None) -> str:
        """Have SQS move the dead letters back into the queue (of this kind), at most `rate` a second.

        Returns the handle of that move, by which SQS can be asked to cancel it. Raises `Refused` where the queue has no
        queue for its dead letters.
        """
        async with refusing():
            url = await self._queues.of(kind or "")
            source = await self._queues.grave_arn(url)
            if source is None:
                raise Refused("this queue has no RedrivePolicy, so there are no dead letters to be moved")
            # To where they are wanted: those that we have put there are not from any queue, for SQS.
            more = {} if rate is None else {"MaxNumberOfMessagesPerSecond": rate}
            arn = await self._queues.arn(url)
            answer = await self._calls("start_message_move_task", SourceArn=source, DestinationArn=arn, **more)
        return str(answer.get("TaskHandle", ""))

    async def aclose(self) -> None:
        """Give back what came for nobody, and let go of connections. Leases are not touched."""
        await self._receiver.aclose()
        self._calls.close()


def _why_gone(receipt: Receipt | None, now: float) -> str | None:
    if receipt is None:
        return "unknown"
    if receipt.outcome is not None:
        return "settled"
    return "expired" if now >= receipt.until else None


def _note(item: Item, call: "asyncio.Future[Answer]") -> None:
    if item.receipt is not None:
        item.receipt.under_way = call


def _gone(task_id: str, reason: str) -> Verdict:
    return Verdict(id=task_id, verdict="gone", reason=reason)


def _settled(task_id: str) -> Verdict:
    return Verdict(id=task_id, verdict="settled")


def _no(task_id: str, error: BackendError) -> Verdict:
    if isinstance(error, Gone):
        return _gone(task_id, error.reason)
    if isinstance(error, Throttled):
        return Verdict(id=task_id, verdict="throttled", retry_after=error.retry_after)
    return Verdict(id=task_id, verdict="failed", reason=f"{type(error).__name__}: {error}")


def _unsent(failed: dict[int, BackendError]) -> BackendError:
    """The error of a batch of which these were not sent. What may still work outweighs what never will."""
    refused = [
        {"item": n, "field": "payload", "detail": str(error)}
        for n, error in failed.items()
        if isinstance(error, Refused)
    ]
    for error in failed.values():
        if isinstance(error, (Throttled, Unavailable)):
            return error
    return Refused(f"SQS refused {len(refused)} messages; the others are sent: {refused[0]['detail']}", errors=refused)
