"""A bound on what all callers have together, past which none of them keeps the others out.

Rule: below the bound every caller gets more. From there on, a caller gets more as long as it has less than its share:
the bound, divided by the number of callers that have something. So what callers have together may exceed the bound, by
about one request of each.
"""

import math
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar

CALLER: ContextVar[str] = ContextVar("leasekit-caller", default="")
"""The caller for whom the current code runs: the id of the access token of a request, else "".

The HTTP layer sets it once it has authenticated a request, whose code runs in a context of its own. A task that serves
several callers, and may be started by a request of any, is given an empty context.
"""


class FairBound:
    """Counts what each caller has: a caller is the id of an access token, or "" for all that need none (`CALLER`)."""

    def __init__(self) -> None:
        self.total = 0
        self._of: Counter[str] = Counter()

    def is_reached(self, caller: str, most: int) -> bool:
        """Return whether a caller must not get more: all callers together have `most`, and this one has its share."""
        if self.total < most:
            return False
        callers = len(self._of) + (caller not in self._of)
        return self._of[caller] * callers >= most

    def room(self, caller: str, most: int) -> float:
        """Return how much more a caller may get at once; without a bound, if it has nothing yet."""
        own = self._of[caller]
        return max(most - self.total, most / len(self._of) - own) if own else math.inf

    def add(self, caller: str, amount: int) -> None:
        """Note that a caller has so much more, or less if `amount` is negative."""
        self.total += amount
        self._of[caller] += amount
        if not self._of[caller]:
            del self._of[caller]

    def largest(self) -> str:
        """Return the caller that has most; there is one."""
        return max(self._of, key=self._of.__getitem__)


class FairNames:
    """Counts the different names that each caller has: one that it has several times, once."""

    def __init__(self) -> None:
        self._numbers = FairBound()
        self._of: dict[str, Counter[str]] = {}  # caller → name → how many times it has it

    def is_reached(self, caller: str, most: int, names: Iterable[str]) -> bool:
        """Return whether a caller must not get these: one is new to it, which has its share of `most`."""
        known = self._of.get(caller, ())
        return self._numbers.is_reached(caller, most) and any(name not in known for name in names)

    def add(self, caller: str, names: Iterable[str]) -> None:
        known = self._of.setdefault(caller, Counter())
        before = len(known)
        known.update(names)
        self._numbers.add(caller, len(known) - before)

    def remove(self, caller: str, names: Iterable[str]) -> None:
        """Note that a caller has each of these names one time less."""
        known = self._of[caller]
        before = len(known)
        for name in names:
            known[name] -= 1
            if not known[name]:
                del known[name]
        self._numbers.add(caller, len(known) - before)
        if not known:
            del self._of[caller]


def caller_of(claim_id: str) -> str:
    """Return the caller of a claim whose id begins with that of an access token and a slash; "": it does not."""
    return claim_id.rpartition("/")[0]
