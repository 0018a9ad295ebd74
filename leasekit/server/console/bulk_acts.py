"""Acts on all tasks that match: each counts first, and then goes in steps of bounded time.

Rule 1: what is counted is what is acted on: a count is a dry run of the same steps, with the same filters. Of a kind,
        or of a status, the store keeps the counts: these take no steps.
Rule 2: a count that would take too long is cut, and says so.
"""

import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import asdict

from leasekit._lifecycle.states import WAITING
from leasekit._lifecycle.validation import checked
from leasekit.errors import Refused
from leasekit.named import PREFIXES
from leasekit.server.console.acts import Act, Done, Plan, Unfinished
from leasekit.server.console.rendering import number, query
from leasekit.server.console.visit import Visit
from leasekit.task import Matched, Name, Status, TaskSelection
from leasekit.wire import CancelMatchingRequest, PurgeRequest, RedriveRequest, RescheduleMatchingRequest, selected

_LONGEST = 2.0  # seconds that one part of an act, or of a count, may take
_LISTED = 12  # kinds that a count names

_Kinds = Mapping[str, Mapping[str, int]]
_R = TypeVar("_R", bound=TaskSelection)


class Bulk(TaskSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tasks of an act, and how far it has come."""

    cursor: Name | None = None
    token: Name | None = None
    """Of the dry run that has counted the tasks."""
    act_id: Name | None = None
    done: int = 0
    """How many tasks the parts before have changed."""

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that select the tasks. Raises `Refused` if nothing does."""
        if not (filters := dict(selected(self))):
            raise Refused("an act on many tasks needs a filter: give a kind, a status or another one")
        return filters

    @property
    def page(self) -> str:
        """The page that lists these tasks."""
        return f"tasks{query(**_form(self.filters))}"


class Step(NamedTuple):
    """The tasks that one step has changed, or would change."""

    tasks: int
    cursor: str | None
    kinds: _Kinds = {}
    refused: int = 0
    token: str | None = None


class Many(NamedTuple):
    """An act on many tasks: its words, and one step of it."""

    verb: str
    doing: str
    said: str
    will: Sequence[str]
    step: Callable[[Visit, Bulk, bool], Awaitable[Step]]
    """Takes the request with the cursor and the token of this step, and whether it is a dry run."""
    is_danger: bool = False
    statuses: frozenset[Status] = frozenset()
    """Of the tasks that it changes; empty: a status does not say whether it changes a task."""
    has_steps: bool = True
    """Whether its dry run goes in steps, the first of which may make a token, and leaves out the tasks of names."""


class Count(NamedTuple):
    """The number of tasks that match, and, where that is known, how many are of each kind."""

    total: int
    kinds: Mapping[str, int]
    refused: int = 0
    token: str | None = None
    is_cut: bool = False
    """Whether there may be more."""


async def plan(many: Many, visit: Visit, wanted: Bulk) -> Plan:
    """Count the tasks, and say what will become of them."""
    count = await _kept(many, visit, wanted) or await _counted(many, visit, wanted)
    what = f"{number(count.total)}{' or more' if count.is_cut else ''} {'task' if count.total == 1 else 'tasks'}"
    hidden = {"act_id": uuid.uuid4().hex} | ({"token": count.token} if count.token else {})
    return Plan(
        f"{many.verb} {what}?", [*_told(count), *many.will], f"{many.verb} {what}", wanted.page, hidden=hidden,
        is_possible=bool(count.total), is_danger=many.is_danger,
    )  # fmt: skip


async def _kept(many: Many, visit: Visit, wanted: Bulk) -> Count | None:
    """Take the count from those that the store keeps; None: these do not tell it."""
    filters, statuses = wanted.filters, many.statuses
    if "status" in filters:
        statuses = statuses.intersection([filters["status"]])
    if not statuses or not filters.keys() <= {"kind", "status"}:
        return None
    first = await many.step(visit, wanted, True) if many.has_steps else Step(0, "")  # noqa: FBT003 - a dry run
    if first.cursor is None:  # it has counted all
        return Count(
            first.tasks, {kind: sum(of.values()) for kind, of in first.kinds.items()}, first.refused, first.token
        )
    counts = await visit.engine.queries.counts()
    own = [kind for kind in counts if filters.get("kind", kind) == kind]
    chosen = [kind for kind in own if not (many.has_steps and kind.startswith(PREFIXES))]
    kinds = {kind: sum(counts[kind].get(status, 0) for status in statuses) for kind in chosen}
    return Count(sum(kinds.values()), {kind: tasks for kind, tasks in kinds.items() if tasks}, token=first.token)


async def _counted(many: Many, visit: Visit, wanted: Bulk) -> Count:
    """Count the tasks one by one, in the steps of a dry run, until that takes too long."""
    kinds: dict[str, int] = {}
    total, refused, token, until = 0, 0, None, time.monotonic() + _LONGEST
    step = Step(0, "")
    while step.cursor is not None and time.monotonic() < until:
        at = _replaced(wanted, cursor=step.cursor or None, token=token)
        step = await many.step(visit, at, True)  # noqa: FBT003 - a dry run
        total, refused, token = total + step.tasks, refused + step.refused, token or step.token
        for kind, of in step.kinds.items():
            kinds[kind] = kinds.get(kind, 0) + sum(of.values())
    return Count(total, kinds, refused, token, is_cut=step.cursor is not None)


def _told(count: Count) -> list[str]:
    """Return sentences: how many tasks match, of which kinds."""
    sums = sorted(count.kinds.items(), key=lambda item: (-item[1], item[0]))
    more = " or more" if count.is_cut else ""
    lines = [f"{number(count.total)}{more} {'task matches' if count.total == 1 else 'tasks match'}."]
    if len(sums) > 1:
        named = ", ".join(f"{number(tasks)} of {kind}" for kind, tasks in sums[:_LISTED])
        lines.append(named + (f", and {len(sums) - _LISTED} more kinds." if len(sums) > _LISTED else "."))
    if count.refused:
        lines.append(f"{number(count.refused)} more match and cannot be changed now: they are left as they are.")
    return lines


async def run(many: Many, visit: Visit, wanted: Bulk) -> Done | Unfinished:
    """Take steps until none is left, or the time of this part is over."""
    until, done = time.monotonic() + _LONGEST, wanted.done
    while True:
        step = await many.step(visit, wanted, False)  # noqa: FBT003 - no dry run
        done += step.tasks
        if step.cursor is None:
            return Done(wanted.page, many.said, done)
        wanted = _replaced(wanted, cursor=step.cursor, token=wanted.token, done=done)
        if time.monotonic() >= until:
            return Unfinished(many.doing, done, _form(asdict(wanted)))


def _request(type_: type[_R], wanted: Bulk, **options: Any) -> _R:
    """Make the request of a step. Raises `Refused` for filters that the act does not take."""
    return checked(type_, {**wanted.filters, "cursor": wanted.cursor, **options})


async def _redrive(visit: Visit, wanted: Bulk, is_dry: bool) -> Step:  # noqa: FBT001 - see `Many.step`
    limit, by = (1000 if is_dry else 200), None if is_dry else visit.by
    options = {"limit": limit, "dry_run": is_dry, "redrive_id": wanted.act_id, "worker": by}
    request = _request(RedriveRequest, wanted, **options)
    note = None if is_dry else visit.note("tasks.redrive", target=wanted.kind, fields=request)
    answer = await visit.engine.operations.redrive(request, note=note)
    count = sum(verdict.verdict in ("redrivable", "redriven") for verdict in answer.tasks)
    return Step(count, answer.cursor, refused=len(answer.tasks) - count)


async def _purge(visit: Visit, wanted: Bulk, is_dry: bool) -> Step:  # noqa: FBT001
    request = _request(PurgeRequest, wanted, dry_run=is_dry)
    note = None if is_dry else visit.note("tasks.purge", target=wanted.kind, fields=request)
    answer = await visit.engine.operations.purge(request, note=note)
    return Step(_sum(answer.kinds), answer.cursor, answer.kinds)


async def _cancel(visit: Visit, wanted: Bulk, is_dry: bool) -> Step:  # noqa: FBT001
    request = _request(CancelMatchingRequest, wanted, token=wanted.token, dry_run=is_dry)
    note = None if is_dry else visit.note("tasks.cancel-matching", target=wanted.kind, fields=request)
    return _matched(await visit.engine.operations.cancel_matching(request, note=note))


async def _run_now(visit: Visit, wanted: Bulk, is_dry: bool) -> Step:  # noqa: FBT001
    request = _request(RescheduleMatchingRequest, wanted, token=wanted.token, dry_run=is_dry, delay=0.0)
    note = None if is_dry else visit.note("tasks.reschedule-matching", target=wanted.kind, fields=request)
    return _matched(await visit.engine.operations.reschedule_matching(request, by=visit.by, note=note))


def _matched(answer: Matched) -> Step:
    return Step(_sum(answer.kinds), answer.cursor, answer.kinds, token=answer.token)


def _sum(kinds: _Kinds) -> int:
    return sum(sum(of.values()) for of in kinds.values())


def _replaced(wanted: Bulk, **changes: Any) -> Bulk:
    return Bulk(**asdict(wanted) | changes)


def _form(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a form or a link that say this; there is room for one tag."""
    given = {name: value for name, value in values.items() if value is not None}
    return {
        "tag" if name == "tags" else name: value[0] if name == "tags" else _text(value) for name, value in given.items()
    }


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


async def _kind(visit: Visit, wanted: Bulk) -> str | None:
    return wanted.kind


def _act(many: Many) -> Act:
    return Act(Bulk, functools.partial(plan, many), functools.partial(run, many), _kind)


_ENDED = frozenset(status for status in Status if status.ended)
_ONLY_COUNTED = "Tasks that are scheduled after this count are left alone."

BULK_ACTS: Mapping[str, Act] = {
    "redrive-matching": _act(Many(
        "Redrive", "Redriving", "many-redriven",
        ["Their attempts and crashes begin anew, and they are due at once. Their history stays.",
         "One that cannot be redriven is left as it is."], _redrive, statuses=frozenset({Status.DEAD}),
    )),
    "purge-matching": _act(Many(
        "Purge", "Purging", "many-purged",
        ["They are removed with their results and their history. This cannot be undone."], _purge, is_danger=True,
        statuses=_ENDED, has_steps=False,
    )),
    "cancel-matching": _act(Many(
        "Cancel", "Cancelling", "many-cancelled",
        ["Those that wait end at once, and those that run are asked to stop.", _ONLY_COUNTED], _cancel, is_danger=True,
        statuses=frozenset(Status) - _ENDED,
    )),
    "run-matching": _act(Many(
        "Make due", "Making due", "many-due-now",
        ["They are due at once. Gates, limits and other tasks for which they wait hold as before.", _ONLY_COUNTED],
        _run_now, statuses=frozenset(WAITING),
    )),
}  # fmt: skip
"""The acts on all tasks that match, by their names in addresses."""
