"""Receipts: until when this process holds each message that it received, and how that ended.

If the invisibility of a message of a standard queue has ended, SQS answers success to a call that extends it, and does
nothing: after the end of a lease, a success means nothing. So the end is kept here, and a heartbeat or a give-back that
would arrive after the end is never sent.
"""

import asyncio
import math
from asyncio import Future
from collections.abc import Callable, Iterable, Mapping
from random import SystemRandom
from typing import Any

from leasekit.config import DRIFT, Heartbeats
from leasekit.task import Outcome, RetryPolicy
from leasekit_sqs.address import LONGEST_TTL

SHORTEST = 2  # seconds: a lease cannot be kept for less

# By how much two clocks may differ after twelve hours: SQS refuses a call that asks for more than is left.
_SPARE = 1.5 * DRIFT * LONGEST_TTL
_REMEMBERED = 10_000  # settled receipts, for reports that are repeated
_SWEEP_EVERY = 1_000
_chance = SystemRandom()
_TRAVEL = 1 / 20  # part of the lease before whose end a give-back must leave, so that it arrives in time; at most …
_LONGEST_TRAVEL = 5.0  # … seconds
_OVER_FOR = 3600.0  # seconds after its end for which the receipt of a lost lease is kept


def give_back_until(asked_at: float, seconds: float) -> float:
    """Return until when a give-back may be sent of a message that SQS, asked at `asked_at`, hides for `seconds`."""
    return asked_at + seconds * (1 - 2 * DRIFT) - min(_TRAVEL * seconds, _LONGEST_TRAVEL)


class Receipt:
    """A received message: `handle` is the token of its lease."""

    __slots__ = (
        "attempt", "deleted_as", "group", "handle", "has_all_attributes", "has_queues_timeout", "id", "in_dlq",
        "is_kept", "is_returning", "message", "outcome", "polled_for", "received_at", "retry", "returned_for",
        "returned_until", "returns_until", "settles", "under_way", "until", "url", "warned",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: str,  # noqa: A002 - the task's
        handle: str,
        url: str,
        message: Mapping[str, Any],
        attempt: int,
        group: str | None,
        retry: RetryPolicy,
        polled_for: int = 0,
    ) -> None:
        self.id = id
        self.handle = handle
        self.url = url  # of its queue
        self.received_at: float | None = None  # at the earliest; SQS lets it be held for twelve hours from its receive
        self.until = 0.0  # until when the message is invisible to other receivers
        self.returns_until = 0.0  # until when a give-back may be sent
        self.message: Mapping[str, Any] | None = message  # None once it is settled
        self.attempt = attempt
        self.group = group  # the message group, within which a FIFO queue keeps order
        self.retry = retry
        self.polled_for = polled_for  # seconds for which a holder that died may have left a long poll open
        self.settles = True  # False: the user's code deletes the message
        self.is_kept = False  # a heartbeat was acknowledged
        self.has_all_attributes = True  # False: its receive was not observed, and may not have asked for all
        # Whether its receive did not say for how long to hide it. None: the receive was not observed.
        self.has_queues_timeout: bool | None = False
        self.outcome: Outcome | None = None  # set once it is settled
        self.deleted_as: Outcome | None = None  # set once its deletion may have been applied
        self.in_dlq = False  # a copy of it is in the dead-letter queue
        self.is_returning = False  # it is being given back: a heartbeat would take it from the next receiver
        # Set if a give-back may have been applied: no other receiver can have the message before this instant.
        self.returned_until: float | None = None
        self.returned_for = 0.0  # … but it was asked to stay hidden until this instant
        self.under_way: set[Future[Any]] = set()  # the calls of heartbeats that have not ended
        self.warned = False

    def hidden(self, asked_at: float, seconds: float) -> None:
        """Record that SQS, asked at `asked_at`, hides the message for `seconds` by its clock, which may be faster."""
        if self.received_at is None:
            self.received_at = asked_at
        self.until = asked_at + seconds * (1 - 2 * DRIFT)
        self.returns_until = give_back_until(asked_at, seconds)

    def assume_holder_ended(self, seen_at: float, ttl: int) -> None:
        """Assume that the lease ends `margin` after its holder was seen to have ended: holders stop that early.

        Half of the margin is for the delay until the end was noticed, and for the way to SQS.
        """
        margin = Heartbeats().for_ttl(ttl).margin
        self.until = seen_at + margin
        self.returns_until = seen_at + margin / 2

    def reports_until(self, asked_at: float) -> float:
        """Return until when a deletion that is asked for at `asked_at` may leave: without end if the lease was over."""
        return self.until if asked_at < self.until else math.inf

    def left(self, now: float) -> float:
        """Return the seconds that are left of the twelve hours for which SQS lets a message be held."""
        return max(0.0, (self.received_at or 0.0) + LONGEST_TTL - _SPARE - now)

    def grant(self, ttl: int, now: float) -> int:
        """Return the seconds that a heartbeat may ask for: `ttl`, or the rest of the twelve hours; 0 if too short."""
        most = min(ttl, math.floor(self.left(now)))
        return most if most >= SHORTEST else 0

    def wait(self, outcome: Outcome, retry_after: float | None, now: float) -> int:
        """Return the seconds for which the message stays invisible after a give-back, within the twelve hours."""
        if outcome == "crash":
            return self.polled_for
        if outcome == "release" and retry_after is None:
            return 0
        seconds = self.retry.wait(self.attempt, _chance) if retry_after is None else retry_after
        return min(math.ceil(seconds), math.floor(self.left(now)))


async def beats_ended(receipts: Iterable[Receipt]) -> None:
    """Wait for all heartbeats of these messages that are under way: one that arrived later would hide its message."""
    await asyncio.sleep(0)  # until then, a heartbeat that was decided on in this turn of the loop has no call
    if beats := {beat for receipt in receipts for beat in receipt.under_way}:
        await asyncio.wait(beats)


class Receipts:
    """The receipts of one backend."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: dict[str, Receipt] = {}
        self._settled: dict[str, None] = {}  # handles of settled receipts, oldest first
        self._added = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, token: str) -> bool:
        return token in self._all

    def add(self, receipt: Receipt) -> None:
        """Add a receipt. Any thread may call this."""
        self._all[receipt.handle] = receipt
        self._added += 1
        if self._added % _SWEEP_EVERY == 0:
            long_ago = self._clock() - _OVER_FOR
            for handle, known in list(self._all.items()):
                if known.until < long_ago and known.outcome is None:
                    self._all.pop(handle, None)

    def adopt(self, receipt: Receipt, *, settles: bool) -> Receipt:
        """Add the receipt of a message from a user's own loop, or return the known one. Any thread may call this.

        The time of a known receipt goes on, and a message that was deleted or given back stays settled: another
        receiver may have it by now. What a block without settlement has kept may be kept by another block. The handle
        alone decides: a message that is passed again without its attributes has another id.
        """
        known = self.get(receipt.handle)
        if known is None:
            self.add(receipt)
            known = receipt
        elif not known.settles:
            self._settled.pop(known.handle, None)
            known.outcome, known.message = None, receipt.message
            known.has_all_attributes = receipt.has_all_attributes
        if known.outcome is None:
            known.settles = settles
        return known

    def get(self, token: str) -> Receipt | None:
        return self._all.get(token)

    def find(self, task_id: str, token: str) -> Receipt | None:
        """Return the receipt with this token if it belongs to the task, else None."""
        receipt = self.get(token)
        return receipt if receipt is not None and receipt.id == task_id else None

    def settled(self, receipt: Receipt, outcome: Outcome) -> None:
        """Record how a task was settled; the receipt is kept for a while, for repeated reports."""
        receipt.outcome, receipt.message = outcome, None
        self._settled[receipt.handle] = None
        while len(self._settled) > _REMEMBERED:
            oldest = next(iter(self._settled))
            self._settled.pop(oldest, None)
            self._all.pop(oldest, None)
