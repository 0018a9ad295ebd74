"""The ends of messages, by the outcome of their tasks.

    success, cancelled         deleted
    fatal                      copied to the dead-letter queue, if the queue has one; then deleted. If its attributes
                               are not known, visible again after the wait: the next receive asks for them
    retry, release, crash      visible again: after the wait, or at once
    crash of a whole process   visible again when the longest poll is over: before that, SQS may give the message to the
                               poll that the dead process has left open, and then hide it for its whole ttl

Rule 1: a give-back is sent only while no other receiver can have the message when the call arrives, because SQS lets an
        old handle hide or show a message that another receiver holds. So a give-back without delay whose answer was
        lost is not repeated.
Rule 2: a deletion or copy that was asked for in time leaves in time, or never: at its end, the block is told that the
        lease is lost. A report that comes late, which no block waits for, is sent all the same: the work is done.
Rule 3: a give-back waits for all heartbeats under way, because a heartbeat that arrived later would hide the message;
        and no heartbeat begins after it.
        So does the end of a block that settles nothing: after it, the user's own code may give the message back.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from leasekit.errors import BackendError
from leasekit.hooks import log_fields
from leasekit.task import Settlement
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Calls, Gone, is_unapplied
from leasekit_sqs.messages import plain_id, sent_on, size_of
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipt, beats_ended, give_back_until

logger = logging.getLogger("leasekit")


@dataclass(frozen=True, slots=True)
class Ending:
    """A message and the settlement that ends it."""

    receipt: Receipt
    settlement: Settlement


class Endings:
    """End the messages of one connection."""

    def __init__(self, calls: Calls, queues: Queues, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._queues = queues
        self._clock = clock

    async def end(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        """End messages; return None or the error for each, in order. Raises nothing."""
        returned = [one for one in endings if one.settlement.outcome in ("retry", "release", "crash")]
        in_dlq = [one for one in endings if one.settlement.outcome == "fatal"]
        deleted = [one for one in endings if one.settlement.outcome in ("success", "cancelled")]
        parts, now = (returned, in_dlq, deleted), self._clock()
        found = await asyncio.gather(
            self._give_back(returned), self._move_to_dlq(in_dlq, now), self._delete(deleted, now)
        )
        became = {
            id(one): error
            for part, errors in zip(parts, found, strict=True)
            for one, error in zip(part, errors, strict=True)
        }
        return [became[id(one)] for one in endings]

    async def _delete(self, endings: Sequence[Ending], asked_at: float) -> list[BackendError | None]:
        for one in endings:
            one.receipt.deleted_as = one.settlement.outcome
        items = [
            Item(one.receipt.url, {"ReceiptHandle": one.receipt.handle}, leaves_by=one.receipt.reports_until(asked_at))
            for one in endings
        ]
        return await in_batches(self._calls, "delete_message_batch", items)

    async def _give_back(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        for one in endings:
            one.receipt.is_returning = True
        await beats_ended(one.receipt for one in endings)
        now = self._clock()
        became: dict[int, BackendError | None] = {}
        items: list[tuple[int, Item, bool]] = []
        for n, one in enumerate(endings):
            receipt, settlement = one.receipt, one.settlement
            wait, leaves_by = receipt.wait(settlement.outcome, settlement.retry_after, now), receipt.returns_until
            if receipt.returned_until is not None:
                if now >= receipt.returned_until:  # the message becomes visible by itself
                    became[n] = None
                    continue
                wait, leaves_by = max(0, math.ceil(receipt.returned_for - now)), min(leaves_by, receipt.returned_until)
            if now >= receipt.returns_until:
                became[n] = Gone("the lease has ended, or ends before a call can reach SQS", reason="expired")
            else:
                entry = {"ReceiptHandle": receipt.handle, "VisibilityTimeout": wait}
                item = Item(receipt.url, entry, receipt=receipt, leaves_by=leaves_by)
                items.append((n, item, receipt.returned_until is None))
        changes = [item for _, item, _ in items]
        errors = await in_batches(
            self._calls, "change_message_visibility_batch", changes, started=self._note_give_back_call
        )
        for (n, _, is_first), error in zip(items, errors, strict=True):
            became[n] = _after_give_back(endings[n].receipt, error, is_first=is_first)
        return [became[n] for n in range(len(endings))]

    def _note_give_back_call(self, item: Item, _: object) -> None:
        """Record, before its answer, that a give-back may be applied."""
        receipt, wait = item.receipt, item.entry["VisibilityTimeout"]
        if receipt is not None and receipt.returned_until is None:
            # From then on SQS may show the message to others: because it was asked to, or at the end of its lease.
            now = self._clock()
            receipt.returned_for = now + wait
            receipt.returned_until = min(give_back_until(now, wait), receipt.until)

    async def _move_to_dlq(self, endings: Sequence[Ending], asked_at: float) -> list[BackendError | None]:
        became = dict(enumerate(await self._copy(endings, asked_at)))
        copied = [n for n, error in became.items() if error is None and endings[n].receipt.in_dlq]
        partial = [n for n, error in became.items() if error is None and not endings[n].receipt.in_dlq]
        became.update(zip(copied, await self._delete([endings[n] for n in copied], asked_at), strict=True))
        became.update(zip(partial, await self._give_back([endings[n] for n in partial]), strict=True))
        return [became[n] for n in range(len(endings))]

    async def _copy(self, endings: Sequence[Ending], asked_at: float) -> list[BackendError | None]:
        """Copy messages to the dead-letter queue, each once; warn if their queue has none. Return why copies failed.

        `in_dlq` of a receipt says then whether there is a copy. A message whose attributes are not known gets none.
        """
        urls = {one.receipt.url: None for one in endings if not one.receipt.in_dlq}
        queues = dict(zip(urls, await asyncio.gather(*map(self._dead_letter_queue, urls)), strict=True))
        became: dict[int, BackendError | None] = {}
        items: list[tuple[int, Item]] = []
        for n, one in enumerate(endings):
            receipt = one.receipt
            dead_letter_queue = None if receipt.in_dlq else queues[receipt.url]
            if isinstance(dead_letter_queue, BackendError):
                became[n] = dead_letter_queue
            elif dead_letter_queue is not None and not receipt.has_all_attributes:
                became[n] = None
                _warn_of_return(receipt)
            elif dead_letter_queue is not None and receipt.message is not None:
                items.append((n, _copy_of(one, dead_letter_queue, receipt.reports_until(asked_at))))
            else:
                became[n] = None
                self._warn_of_deletion(one)
        errors = await in_batches(self._calls, "send_message_batch", [item for _, item in items])
        for (n, _), error in zip(items, errors, strict=True):
            endings[n].receipt.in_dlq = error is None
            became[n] = error
        return [became[n] for n in range(len(endings))]

    async def _dead_letter_queue(self, url: str) -> str | BackendError | None:
        try:
            return await self._queues.dead_letter_queue(url)
        except BackendError as error:
            return error

    def _warn_of_deletion(self, ending: Ending) -> None:
        receipt = ending.receipt
        if not receipt.in_dlq:
            logger.warning(
                "task %s failed for good and is deleted: its queue has no RedrivePolicy that names a dead-letter queue",
                receipt.id,
                extra=log_fields(receipt.id, receipt.handle),
            )
            receipt.in_dlq = True


def _after_give_back(receipt: Receipt, error: BackendError | None, *, is_first: bool) -> BackendError | None:
    """Return the error of a give-back, None if an earlier try was applied. Forget a first one that was not applied."""
    if isinstance(error, Gone) and not is_first:
        return None
    if error is not None and is_first and is_unapplied(error):
        receipt.returned_until = None
    return error


def _warn_of_return(receipt: Receipt) -> None:
    logger.warning(
        "task %s failed for good, but comes again: leasekit has not seen its receive, so a copy for the dead-letter "
        "queue could lack attributes. Call leasekit_sqs.watch with the client before its first receive",
        receipt.id,
        extra=log_fields(receipt.id, receipt.handle),
    )


def _copy_of(ending: Ending, dead_letter_queue: str, leaves_by: float) -> Item:
    receipt = ending.receipt
    entry = sent_on(receipt.message or {}, receipt.id, ending.settlement.error)
    is_fifo = dead_letter_queue.endswith(".fifo")
    if group := receipt.group or (plain_id(receipt.id) if is_fifo else None):
        entry["MessageGroupId"] = group
    if is_fifo:
        entry["MessageDeduplicationId"] = sha256(receipt.handle.encode()).hexdigest()
    return Item(dead_letter_queue, entry, size=size_of(entry), leaves_by=leaves_by)
