"""Options of tasks, and where they come from: a submission, the settings of its kind, or the defaults."""

import random as _random
from operator import attrgetter
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from leasekit.task.words import (
    Discreet,
    Expiry,
    Seconds,
    Timeout,
)


class Exponential(Struct, frozen=True, kw_only=True, tag="exponential", tag_field="policy", forbid_unknown_fields=True):
    """Wait `first · factor^(n-1)` seconds after the n-th try, at most `max`, less a random part up to `jitter`."""

    first: Annotated[float, Meta(gt=0, le=365 * 86400)] = 1.0
    """Seconds before the second attempt."""
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    """How much longer each further wait is."""
    max: Annotated[float, Meta(gt=0, le=365 * 86400)] = 43_200.0
    """Seconds; the longest wait."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The largest part by which a wait is shortened at random."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        # min() before the power: factor ** 10_000 does not fit into a float.
        exponent = min(tries - 1, 64)
        return min(self.max, self.first * self.factor**exponent) * (1 - self.jitter * random.random())


class Polynomial(Struct, frozen=True, kw_only=True, tag="polynomial", tag_field="policy", forbid_unknown_fields=True):
    """Wait `n⁴ + 15 + random · 30 · (n + 1)` seconds after the n-th try."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return min(tries, 100) ** 4 + 15 + random.random() * 30 * (tries + 1)


class FixedDelays(Struct, frozen=True, kw_only=True, tag="list", tag_field="policy", forbid_unknown_fields=True):
    """Wait `waits[n-1]` seconds after the n-th try; the last entry serves for all further ones."""

    waits: Annotated[list[Seconds], Meta(min_length=1, max_length=100)]
    """Seconds, one entry for each attempt."""

    def wait(self, tries: int, random: _random.Random) -> float:
        """Seconds to wait after the `tries`-th try (1 is the first)."""
        return self.waits[min(tries, len(self.waits)) - 1]


RetryPolicy = Exponential | Polynomial | FixedDelays
"""How long to wait before a task's next attempt."""


class TaskSettings(Discreet, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The options of a task that its kind can set as well. What is not given (UNSET) comes from the kind's settings.

    What these do not set either has leasekit's default, which `CompleteSettings` has.
    """

    priority: Annotated[int, Meta(ge=0, le=4)] | UnsetType = UNSET
    """0 is the most urgent. Default: 2."""
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType | None = UNSET
    """The most attempts that may end in *retry* (or time out, see `expiry`); the last ends the task. None: no limit.
    Default: 25."""
    max_crashes: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType = UNSET
    """The most runs that may end because their holder vanished; one more ends the task. Default: 5."""
    max_runtime: Timeout | UnsetType | None = UNSET
    """Seconds that a run may take from its first heartbeat. Then its lease is lost, and `expiry` says how it counts.
    None, the default: no limit."""
    expiry: Expiry | UnsetType = UNSET
    """What a run counts as that times out, because its lease expires or its `max_runtime` is over. *crash*, the
    default: against `max_crashes`, and the task is ready again at once. *retry*: against `max_attempts`, after a wait
    by `retry`."""
    enqueue_timeout: Annotated[float, Meta(ge=1, le=365 * 86400)] | UnsetType = UNSET
    """Seconds after which a task that was moved to a queue and not claimed is due again; no effect without queues."""
    claim_timeout: Timeout | UnsetType | None = UNSET
    """The ttl that a claim grants, which no heartbeat shortens; None, the default: `heartbeat_timeout`."""
    heartbeat_timeout: Timeout | UnsetType = UNSET
    """The ttl that a heartbeat grants. Default: 300 s."""
    retry: RetryPolicy | UnsetType = UNSET
    """How long to wait before the next attempt: `Exponential`, the default, `Polynomial` or `FixedDelays`."""
    dedupe_window: Seconds | UnsetType | None = UNSET
    """Seconds for which a `dedupe_key` counts, as long as the first task is kept; None, the default: until that is
    deleted."""
    start_deadline: Annotated[float, Meta(ge=1, le=10 * 365 * 86400)] | UnsetType | None = UNSET
    """Seconds after the due time until which the task must have begun, whatever it waits for; else it is *dropped*.
    None, the default: it is never too late."""


class KindSettings(TaskSettings, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Options for the tasks of a kind whose submissions do not give them, and what holds for the kind as a whole.

    What is not set (UNSET) has leasekit's default.
    """

    retention: Annotated[float, Meta(ge=60, le=10 * 365 * 86400)] | UnsetType = UNSET
    """Seconds for which ended tasks of the kind are kept, in place of the store's `retention`."""
    fair: bool | UnsetType = UNSET
    """Whether a task without a `key` has its collection as key. Default: false."""
    concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """The most tasks of the kind that are under a lease at one time, in all workers together. Default: no limit."""
    key_concurrency: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """The most tasks of one `key` of the kind that are under a lease at one time, in all workers together. Tasks
    without a key have no such limit. Default: none."""
    ordered: bool | UnsetType = UNSET
    """Whether the tasks of one `key` run one after another, also under retry: until a task that has begun has ended, no
    other task of its key starts, even if it waits for its retry. Default: false."""
    rate: Annotated[float, Meta(ge=1e-6, le=100_000)] | UnsetType = UNSET
    """The most tasks of the kind that are started in a second, on average. Default: no limit."""
    burst: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """With `rate`: the most tasks that are started at once after a quiet time. Default: those of a second, at least
    one."""
    key_rate: Annotated[float, Meta(ge=1e-6, le=100_000)] | UnsetType = UNSET
    """The most tasks of one `key` of the kind that are started in a second, on average. Tasks without a key have no
    such limit. Default: none."""
    key_burst: Annotated[int, Meta(ge=1, le=1_000_000)] | UnsetType = UNSET
    """With `key_rate`: as `burst`, for each key."""
    weight: Annotated[float, Meta(ge=0.01, le=100)] | UnsetType = UNSET
    """The share of the kind where a claim finds due tasks of several kinds and of one priority. Default: 1."""
    aging: Annotated[float, Meta(ge=1, le=365 * 86400)] | UnsetType = UNSET
    """Seconds after which a due task of the kind counts as one of priority 0. Default: never."""

    def __post_init__(self) -> None:
        if self.burst is not UNSET and self.rate is UNSET:
            raise ValueError("`burst` says how many tasks a `rate` lets start at once: give `rate` too")
        if self.key_burst is not UNSET and self.key_rate is UNSET:
            raise ValueError("`key_burst` says how many tasks of a key a `key_rate` lets start at once: give it too")
        if self.ordered is True and not (self.key_concurrency is UNSET and self.key_rate is UNSET):
            detail = "leave out `key_concurrency` and `key_rate`"
            raise ValueError(
                f"`ordered` runs one task of a key after the other, and its retries at their times: {detail}"
            )


class CompleteSettings(Struct, frozen=True, kw_only=True, gc=False):
    """A value for each of `TaskSettings`. The defaults are those of leasekit."""

    priority: int = 2
    """As in `TaskSettings`, like all that follow."""
    max_attempts: int | None = 25
    """As in `TaskSettings`."""
    max_crashes: int = 5
    """As in `TaskSettings`."""
    max_runtime: float | None = None
    """As in `TaskSettings`."""
    expiry: Expiry = "crash"
    """As in `TaskSettings`."""
    enqueue_timeout: float = 60.0
    """As in `TaskSettings`."""
    claim_timeout: float | None = None
    """As in `TaskSettings`."""
    heartbeat_timeout: float = 300.0
    """As in `TaskSettings`."""
    retry: RetryPolicy = Exponential()
    """As in `TaskSettings`."""
    dedupe_window: float | None = None
    """As in `TaskSettings`."""
    start_deadline: float | None = None
    """As in `TaskSettings`."""

    @property
    def claim_ttl(self) -> float:
        """The ttl that a claim grants: `claim_timeout`, or `heartbeat_timeout` if that is None."""
        return self.heartbeat_timeout if self.claim_timeout is None else self.claim_timeout


DEFAULTS = CompleteSettings()
"""What holds for a task where neither its submission nor its kind says anything else."""


def effective(given: TaskSettings, base: CompleteSettings = DEFAULTS) -> CompleteSettings:
    """Return `base` with what is given in its place: the settings of a kind, or of a task over those of its kind."""
    values = _values_of(given)
    if values == _NOTHING:  # most tasks: tens of thousands come each second
        return base
    return replace(base, **{name: value for name, value in zip(_SETTINGS, values, strict=True) if value is not UNSET})


_SETTINGS = CompleteSettings.__struct_fields__

_NOTHING = (UNSET,) * len(_SETTINGS)

_values_of = attrgetter(*_SETTINGS)
