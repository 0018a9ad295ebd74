"""Rules of kinds as a whole, complete: their limits, and their shares."""

import math
from typing import NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from leasekit.task import KindSettings

_T = TypeVar("_T")


class KindRules(NamedTuple):
    """The rules of one kind. `KindSettings` has the meanings."""

    concurrency: int | None = None
    rate: float | None = None
    burst: int = 1
    weight: float = 1.0
    aging: float = math.inf
    key_concurrency: int | None = None
    ordered: bool = False
    key_rate: float | None = None
    key_burst: int = 1

    @property
    def is_limited(self) -> bool:
        """Return whether there are moments at which no task of the kind may start, or none of some key."""
        return self.concurrency is not None or self.rate is not None or self.limits_keys

    @property
    def limits_keys(self) -> bool:
        """Return whether there are moments at which no task of some key may start."""
        return self.key_concurrency is not None or self.key_rate is not None


NO_RULES = KindRules()


def rules_of(settings: KindSettings) -> KindRules:
    """Return the rules in the settings of a kind; `NO_RULES` if it sets none."""
    rate, key_rate = _given(settings.rate), _given(settings.key_rate)
    return KindRules(
        concurrency=_given(settings.concurrency),
        rate=rate,
        burst=_burst(rate, settings.burst),
        weight=1.0 if settings.weight is UNSET else settings.weight,
        aging=math.inf if settings.aging is UNSET else settings.aging,
        key_concurrency=1 if settings.ordered is True else _given(settings.key_concurrency),
        ordered=settings.ordered is True,
        key_rate=key_rate,
        key_burst=_burst(key_rate, settings.key_burst),
    )


def _burst(rate: float | None, burst: int | UnsetType) -> int:
    return max(1, math.ceil(rate or 0)) if burst is UNSET else burst


def _given(value: _T | UnsetType) -> _T | None:
    return None if value is UNSET else value
