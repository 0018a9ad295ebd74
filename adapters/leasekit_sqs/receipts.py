"""What this process knows of each message that it was given: until when it is ours, and how that ended.

SQS answers *renewed* to who extends a message of a standard queue that has become visible again, and does nothing: a
success says nothing after the end. So the end is kept here, and a beat or a give-back that would come after it never
leaves.
"""

import math
from asyncio import Future
from collections.abc import Callable, Mapping
from random import SystemRandom
from typing import Any

from leasekit.config import DRIFT, Beats
from leasekit.task import Outcome, RetryPolicy
from leasekit_sqs.address import LONGEST_TTL

__all__ = ["SHORTEST", "Receipt", "Receipts"]

SHORTEST = 2  # seconds: a lease cannot be kept for less

# What two clocks may disagree about in twelve hours: to ask for more than is left would be refused altogether.
_SPARE = 1.5 * DRIFT * LONGEST_TTL
_REMEMBERED = 10_000  # settled receipts, for reports that are repeated
_SWEEP_EVERY = 1_000
_chance = SystemRandom()
_TRAVEL = 1 / 20  # of the time that it is hidden; up to …
_LONGEST_TRAVEL = 5.0  # … seconds: a call that leaves later may arrive when another has it
_OVER_FOR = 3600.0  # seconds after its end, nobody asks for a lost receipt any more


class Receipt:
    """One message, as it was received: `handle` is the token of its lease."""

    __slots__ = (
        "attempt", "buried", "group", "handle", "id", "message", "outcome", "received_at", "retry", "returned_until",
        "returns_until", "settles", "under_way", "until", "url", "warned",
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
    ) -> None:
        self.id = id
        self.handle = handle
        self.url = url  # of its queue
        self.received_at: float | None = None  # or earlier: it may be held for twelve hours from here
        self.until = 0.0  # it is invisible to others
        self.returns_until = 0.0  # it may be given back
        self.message: Mapping[str, Any] | None = message  # until it is settled
        self.attempt = attempt
        self.group = group  # of a FIFO queue, whose order it keeps
        self.retry = retry
        self.settles = True  # False: its holder ends it himself
        self.outcome: Outcome | None = None  # once it is settled
        self.buried = False  # there is a copy of it in the dead-letter queue
        self.returned_until: float | None = None  # it may have been given back: nobody else can have it before
        self.under_way: Future[Any] | None = None  # the last beat
        self.warned = False

    def hidden(self, asked_at: float, seconds: float) -> None:
        """SQS was asked at this moment, or later, to hide it for so long: by its clock, which may be the faster one."""
        if self.received_at is None:
            self.received_at = asked_at
        self.until = asked_at + seconds * (1 - 2 * DRIFT)
        self.returns_until = self.until - min(_TRAVEL * seconds, _LONGEST_TRAVEL)

    def left_by_the_dead(self, seen_at: float, ttl: int) -> None:
        """Its holder was seen to have ended: it ended `margin` before the message came back, or earlier.

        Half of that is for having noticed it, and for the way to SQS.
        """
        margin = Beats().for_ttl(ttl).margin
        self.until = seen_at + margin
        self.returns_until = seen_at + margin / 2

    def left(self, now: float) -> float:
        """Seconds for which SQS lets it be held in all."""
        return max(0.0, (self.received_at or 0.0) + LONGEST_TTL - _SPARE - now)

    def grant(self, ttl: int, now: float) -> int:
        """Seconds that a beat may ask for: `ttl`, or what is left of the twelve hours; 0 where that is too little."""
        most = min(ttl, math.floor(self.left(now)))
        return most if most >= SHORTEST else 0

    def wait(self, outcome: Outcome, retry_after: float | None, now: float) -> int:
        """Seconds that it stays invisible after it was given back, as far as the twelve hours reach."""
        if outcome == "crash" or (outcome == "release" and retry_after is None):
            return 0
        seconds = self.retry.wait(self.attempt, _chance) if retry_after is None else retry_after
        return min(math.ceil(seconds), math.floor(self.left(now)))


class Receipts:
    """The receipts of one backend."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: dict[str, Receipt] = {}
        self._settled: dict[str, None] = {}  # their handles, oldest first
        self._added = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, token: str) -> bool:
        return token in self._all

    def add(self, receipt: Receipt) -> None:
        """From now on it is known. Any thread."""
        self._all[receipt.handle] = receipt
        self._added += 1
        if self._added % _SWEEP_EVERY == 0:
            long_ago = self._clock() - _OVER_FOR
            for handle, known in list(self._all.items()):
                if known.until < long_ago and known.outcome is None:
                    self._all.pop(handle, None)

    def find(self, task_id: str, token: str) -> Receipt | None:
        """The receipt of this token, where it is that task's."""
        receipt = self._all.get(token)
        return receipt if receipt is not None and receipt.id == task_id else None

    def settled(self, receipt: Receipt, outcome: Outcome) -> None:
        """It is over, in this way; remembered for a while, for reports that are repeated."""
        receipt.outcome, receipt.message = outcome, None
        self._settled[receipt.handle] = None
        while len(self._settled) > _REMEMBERED:
            oldest = next(iter(self._settled))
            del self._settled[oldest]
            self._all.pop(oldest, None)
