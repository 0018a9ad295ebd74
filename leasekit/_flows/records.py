"""Records: what the tasks of a flow hold.

Rule: a task of the kind `flow:NAME` is one step. Its payload is a `Call`, its checkpoint a `Mark`, its result a
      `Record`.
"""

from typing import Any, Literal

from msgspec import Struct

KIND = "flow:"


class Failure(Struct, frozen=True, kw_only=True):
    """A step that failed for good, and why."""

    step: str
    """The name of the step."""
    error: Any
    """Its error; leasekit writes `{"type", "message", "traceback"}`."""


class Call(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The payload of a step's task: which step of which flow, and its state."""

    step: str
    state: Any = None
    flow: str | None = None
    """The id of the flow; None: this task is its first, and has its id."""
    failure: Failure | None = None
    """The failure that led to this step, and was not made good since."""
    item: int | None = None
    """Of a branch of a mapped step: its position in the list. The state is the item."""
    joins: str | None = None
    """Of a join: the mapped step whose branches it joins."""
    branches: list[str] = []
    """Of a join: the ids of their tasks."""
    is_meeting: bool = False
    """Of a task without code, after which a join runs, because it cannot run after so many branches."""
    options: dict[str, Any] = {}
    """Options of all tasks of the flow, as it was started with them."""


class Mark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoint of a step's task: what its next run must know."""

    waits: int = 0
    """How often the step has raised `NotYet`."""
    since: float | None = None
    """When the run began that raised it first, in seconds since the epoch."""
    spent: int = 0
    """Attempts of the lives before the flow was resumed."""
    value: Any = None
    """The step's own checkpoint."""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a step's task: which edge the flow took."""

    edge: Literal["success", "failure", "choice", "meeting"]
    to: str | None = None
    """The next step; None: the flow or the branch has ended."""
    state: Any = None
    """At the end of the flow: its state. Of a branch: what it returned."""
    failure: Failure | None = None
    """With the edge *failure*: why. At the end of the flow: the failure that led there."""
    is_skipped: bool = False
    """The last run did not call the function: a branch of its join had failed, or too many workers had vanished."""
