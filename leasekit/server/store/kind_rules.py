"""Rules of kinds as a whole, complete: their limits, and their shares."""

import math
from typing import NamedTuple

from msgspec import UNSET

from leasekit.task import KindSettings


class KindRules(NamedTuple):
    """The rules of one kind. `KindSettings` has the meanings."""

    concurrency: int | None = None
    rate: float | None = None
    burst: int = 1
    weight: float = 1.0
    aging: float = math.inf

    @property
    def is_limited(self) -> bool:
        """Return whether there are moments at which no task of the kind may start."""
        return self.concurrency is not None or self.rate is not None


NO_RULES = KindRules()


def rules_of(settings: KindSettings) -> KindRules:
    """Return the rules in the settings of a kind; `NO_RULES` if it sets none."""
    rate = None if settings.rate is UNSET else settings.rate
    return KindRules(
        concurrency=None if settings.concurrency is UNSET else settings.concurrency,
        rate=rate,
        burst=max(1, math.ceil(rate or 0)) if settings.burst is UNSET else settings.burst,
        weight=1.0 if settings.weight is UNSET else settings.weight,
        aging=math.inf if settings.aging is UNSET else settings.aging,
    )
