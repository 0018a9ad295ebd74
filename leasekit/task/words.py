"""Names, statuses and other words that the values of tasks are made of."""

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

# `$` would let a trailing newline pass in Python, and JSON Schema knows no `\Z`.
_NAME = Meta(min_length=1, max_length=128, pattern=r"^[ -.0-~]+\Z")

Name = Annotated[str, _NAME]
"""Ids, kinds, tokens, workers: 1-128 printable ASCII characters without `/`."""

NAME_PREFIX = "named:"  # of the kinds that stand for a name: such a task never ends, so a cancel only frees the name

NAME_PREFIXES = (NAME_PREFIX, "once:")  # of all kinds that stand for a name

MAX_TAGS = 20

Tag = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[ -~]+\Z")]
"""A word about a task: 1-64 printable ASCII characters."""

LabelName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._/-]+\Z")]

LabelValue = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._:/-]+\Z")]

Labels = Annotated[dict[LabelName, LabelValue], Meta(max_length=16)]
"""What a worker has, as `{"gpu": "a100"}`: names and values of 1-64 letters, digits and `._/-`, values also `:`."""

MAX_REQUIRED = 4

Requires = Annotated[dict[LabelName, LabelValue], Meta(max_length=MAX_REQUIRED)]

PreferFor = Annotated[float, Meta(ge=0.1, le=86400)]
"""Seconds for which a due task is kept for workers with the labels that it prefers: a tenth to a day."""

PREFER_FOR = 10.0
"""The seconds for which a task prefers labels if it does not say."""

Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
"""A duration, up to ten years."""

Expiry = Literal["crash", "retry"]

DedupeScope = Literal["kept", "live"]

Timeout = Annotated[float, Meta(ge=2, le=365 * 86400)]

ProgressSeq = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""The number of a checkpoint among those of one claim. Every JSON reader can represent integers up to the bound."""

Outcome = Literal["success", "retry", "fatal", "release", "cancelled", "crash"]
"""How a run ends."""

VerdictWord = Literal[
    "renewed", "settled", "cancelled", "cancel_requested", "redriven", "redrivable", "gone", "throttled", "failed"
]
"""What became of one item of a batch."""


class Status(enum.StrEnum):
    """A stage in the life of a task."""

    NEW = "new"
    """Scheduled, and not claimed yet."""
    ENQUEUED = "enqueued"
    """Ready to be claimed again: its lease was released or expired, or its holder crashed."""
    CLAIMED = "claimed"
    """Under a lease; the handler has not begun."""
    PROCESSING = "processing"
    """Under a lease; the handler runs."""
    RETRIABLE_FAILURE = "retriable_failure"
    """Failed, or timed out where that counts as an attempt (`expiry`), and waiting for its next attempt."""
    SUCCESS = "success"
    """Ended well."""
    FATAL_FAILURE = "fatal_failure"
    """Failed for good."""
    CANCELLED = "cancelled"
    """Ended by a cancel."""
    DROPPED = "dropped"
    """Ended without a run: a task that this one waited for did not succeed, or was never scheduled; or this one had
    not begun by its `start_deadline`."""
    DEAD = "dead"
    """Ended by a failure, a crash or an expiry past `max_attempts` or `max_crashes`."""

    @property
    def ended(self) -> bool:
        """Whether the task has ended and will not run again."""
        return self in _ENDED


_ENDED = frozenset({Status.SUCCESS, Status.FATAL_FAILURE, Status.CANCELLED, Status.DROPPED, Status.DEAD})

REDRIVABLE = frozenset({Status.DEAD, Status.FATAL_FAILURE, Status.DROPPED})  # only by an operator


class _Size:
    """A stand-in for a user's value, which may be private, in a repr: the number of bytes that it has as JSON."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        try:
            return f"<{len(msgspec.json.encode(self._value)):,} bytes>"
        except Exception:  # noqa: BLE001 - a repr must not fail
            return f"<{type(self._value).__name__}>"


class Discreet(Struct, frozen=True, kw_only=True):
    """A value whose repr is fit for logs: it leaves out the token, and shows only the sizes of users' values."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [
            (name, _Size(value) if name in _PRIVATE and value is not None else value)
            for name, value in super().__rich_repr__()
            if name != "token" and value is not UNSET
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


_PRIVATE = frozenset({"payload", "progress", "result", "error"})
