"""Messages that are done with.

    success, cancelled         deleted
    fatal                      copied to the queue of dead letters, where the queue has one; then deleted
    retry, release, crash      visible again: after the wait, or at once

Rule 1: a give-back leaves only while nobody else can have the message when it arrives. SQS lets an old handle hide or
        show a message that another holds; so after an answer that was lost, what was given back at once is left alone.
Rule 2: a give-back waits for the beat that is under way: one that arrived later would take the message back again.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from leasekit.config import DRIFT
from leasekit.errors import BackendError
from leasekit.hooks import about
from leasekit.task import Settlement
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Calls, Gone, is_certain
from leasekit_sqs.messages import plain_id, sent_on, size_of
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipt

__all__ = ["Ending", "Endings"]

logger = logging.getLogger("leasekit")


@dataclass(frozen=True, slots=True)
class Ending:
    """How one message is to end."""

    receipt: Receipt
    said: Settlement


class Endings:
    """How the messages of one connection end."""

    def __init__(self, calls: Calls, queues: Queues, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._queues = queues
        self._clock = clock

    async def end(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        """What became of each, in order: None where it has ended so. Raises nothing."""
        returned = [one for one in endings if one.said.outcome in ("retry", "release", "crash")]
        buried = [one for one in endings if one.said.outcome == "fatal"]
        deleted = [one for one in endings if one.said.outcome in ("success", "cancelled")]
        parts = (returned, buried, deleted)
        found = await asyncio.gather(self._give_back(returned), self._bury(buried), self._delete(deleted))
        became = {
            id(one): error
            for part, errors in zip(parts, found, strict=True)
            for one, error in zip(part, errors, strict=True)
        }
        return [became[id(one)] for one in endings]

    async def _delete(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        items = [Item(one.receipt.url, {"ReceiptHandle": one.receipt.handle}) for one in endings]
        return await in_batches(self._calls, "delete_message_batch", items)

    # Giving back --------------------------------------------------------------------------------------------------

    async def _give_back(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        beats = {beat for one in endings if (beat := one.receipt.under_way) is not None and not beat.done()}
        if beats:
            await asyncio.wait(beats)
        now = self._clock()
        became: dict[int, BackendError | None] = {}
        items: list[tuple[int, Item, int]] = []
        for n, one in enumerate(endings):
            receipt, said = one.receipt, one.said
            wait = receipt.wait(said.outcome, said.retry_after, now)
            if receipt.returned_until is not None:
                wait = math.ceil(receipt.returned_until - now)
                if wait <= 0:  # it comes again by itself, at the latest when its time has run out
                    became[n] = None
                    continue
            if now >= receipt.returns_until:
                became[n] = Gone("its time has run out, or does before SQS hears of it", reason="expired")
            else:
                entry = {"ReceiptHandle": receipt.handle, "VisibilityTimeout": wait}
                items.append((n, Item(receipt.url, entry), wait))
        errors = await in_batches(self._calls, "change_message_visibility_batch", [item for _, item, _ in items])
        for (n, _, wait), error in zip(items, errors, strict=True):
            became[n] = self._given_back(endings[n].receipt, now, wait, error)
        return [became[n] for n in range(len(endings))]

    def _given_back(self, receipt: Receipt, now: float, wait: int, error: BackendError | None) -> BackendError | None:
        if isinstance(error, Gone) and receipt.returned_until is not None:
            return None  # the first try got there
        if error is not None and not is_certain(error) and receipt.returned_until is None:
            # By then SQS may show it to others: as it was asked to, or because its time has run out.
            receipt.returned_until = min(now + wait * (1 - 2 * DRIFT), receipt.until)
        return error

    # Burying ------------------------------------------------------------------------------------------------------

    async def _bury(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        became = dict(enumerate(await self._copy(endings)))
        copied = [n for n, error in became.items() if error is None]
        became.update(zip(copied, await self._delete([endings[n] for n in copied]), strict=True))
        return [became[n] for n in range(len(endings))]

    async def _copy(self, endings: Sequence[Ending]) -> list[BackendError | None]:
        """Into the queue of dead letters, once each."""
        became: dict[int, BackendError | None] = {}
        items: list[tuple[int, Item]] = []
        for n, one in enumerate(endings):
            try:
                grave = None if one.receipt.buried else await self._queues.grave(one.receipt.url)
            except BackendError as failure:
                became[n] = failure
                continue
            if grave is not None and one.receipt.message is not None:
                items.append((n, _copy_of(one, grave)))
            else:
                became[n] = None
                self._say_that_it_is_thrown_away(one)
        errors = await in_batches(self._calls, "send_message_batch", [item for _, item in items])
        for (n, _), error in zip(items, errors, strict=True):
            endings[n].receipt.buried = error is None
            became[n] = error
        return [became[n] for n in range(len(endings))]

    def _say_that_it_is_thrown_away(self, ending: Ending) -> None:
        receipt = ending.receipt
        if not receipt.buried:
            logger.warning(
                "task %s failed for good and is deleted: no RedrivePolicy of its queue names one for dead letters",
                receipt.id,
                extra=about(receipt.id, receipt.handle),
            )
            receipt.buried = True


def _copy_of(ending: Ending, grave: str) -> Item:
    receipt = ending.receipt
    entry = sent_on(receipt.message or {}, receipt.id, ending.said.error)
    if grave.endswith(".fifo"):
        entry["MessageGroupId"] = receipt.group or plain_id(receipt.id)
        entry["MessageDeduplicationId"] = sha256(receipt.handle.encode()).hexdigest()
    return Item(grave, entry, size=size_of(entry))
