"""The act that changes the settings of a kind: a form, then what will change, then the change."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from leasekit.errors import Refused
from leasekit.server.console.acts import Act, Done, Field, Plan
from leasekit.server.console.kind_rows import KindRow, kind_rows
from leasekit.server.console.rendering import number, query
from leasekit.server.console.visit import Visit
from leasekit.server.roles.kinds import check_kind, settings_in, text_of
from leasekit.task import KindSettings, Name

_FIELDS = {
    "concurrency": "tasks that run at one time",
    "key_concurrency": "tasks of one key that run at one time",
    "ordered": "whether the tasks of one key run in order, also under retry",
    "rate": "starts in a second",
    "burst": "starts at once, with a rate",
    "key_rate": "starts of one key in a second",
    "key_burst": "starts of one key at once, with a key rate",
    "weight": "its share among kinds of one priority",
    "priority": "0, the most urgent, to 4",
    "aging": "seconds, then as urgent as priority 0",
    "max_attempts": "or null for no limit",
    "max_crashes": "runs whose holder vanished",
    "max_runtime": "seconds of a run, or null",
    "heartbeat_timeout": "seconds: the ttl that a heartbeat grants",
    "claim_timeout": "seconds: the ttl that a claim grants",
    "dedupe_window": "seconds, or null",
    "retention": "seconds for which ended tasks are kept",
    "expiry": "what a lost lease counts as",
    "fair": "whether the collection of a task is its key",
}
"""The settings that the form has, and their hints; `retry` and others stay as they are."""
_CHOICES: dict[str, Sequence[tuple[str, str]]] = {
    "expiry": (("", "default"), ("crash", "crash"), ("retry", "retry")),
    "fair": (("", "default"), ("true", "true"), ("false", "false")),
    "ordered": (("", "default"), ("true", "true"), ("false", "false")),
}


class NewSettings(KindSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that a form says, of which kind, whether the form was filled in, and what the kind had before."""

    kind: Name
    review: bool = False
    was: str | UnsetType = UNSET


async def _kind(visit: Visit, wanted: NewSettings) -> str | None:
    return wanted.kind


async def _old(visit: Visit, kind: str) -> KindSettings:
    check_kind(kind)
    found = (info.settings for info in await visit.engine.queries.kinds() if info.kind == kind)
    return next(found, KindSettings())


def _was(old: KindSettings, wanted: NewSettings) -> KindSettings:
    """Return the settings that the page before has shown: from these on, a form says what is to change."""
    return old if wanted.was is UNSET else settings_in(wanted.was)


def _new(old: KindSettings, wanted: NewSettings) -> KindSettings:
    """Change the settings in which a form differs from what its page has shown. Raises `Refused`."""
    was = _was(old, wanted)
    changed = {name: getattr(wanted, name) for name in _FIELDS if getattr(wanted, name) != getattr(was, name)}
    try:
        return replace(old, **changed)
    except ValueError as error:  # they contradict what others have changed meanwhile
        raise Refused(str(error)) from None


async def plan(visit: Visit, wanted: NewSettings) -> Plan:
    """Show the form; or, once it was filled in, what will change."""
    old, back = await _old(visit, wanted.kind), f"kind{query(kind=wanted.kind)}"
    if not wanted.review:
        fields = [
            Field(name, name.replace("_", " "), _text(getattr(old, name)), _CHOICES.get(name, ()), hint)
            for name, hint in _FIELDS.items()
        ]
        will = ["What is left empty has leasekit's default. The next page says what will change."]
        title = f"Settings of {wanted.kind}"
        return Plan(title, will, "Review", back, fields, {"review": "true", "was": text_of(old)}, is_form=True)
    new = _new(old, wanted)
    changed = [name for name in _FIELDS if getattr(old, name) != getattr(new, name)]
    (row,) = await kind_rows(visit.engine, only=wanted.kind)
    will = [
        f"{name.replace('_', ' ')}: {_text(getattr(old, name)) or 'default'} → {_text(getattr(new, name)) or 'default'}"
        for name in changed
    ]
    will += _consequences(row, changed, new) if changed else ["Nothing changes."]
    hidden = {name: _text(getattr(new, name)) for name in _FIELDS} | {"review": "true", "was": text_of(old)}
    title = f"Change the settings of {wanted.kind}?"
    return Plan(title, will, "Change", back, hidden=hidden, is_possible=bool(changed))


def _consequences(row: KindRow, changed: Sequence[str], new: KindSettings) -> list[str]:
    """Say when the change holds, and what a limit means for what runs now."""
    limits = {"concurrency", "key_concurrency", "ordered", "rate", "burst", "key_rate", "key_burst", "weight", "aging"}
    will = ["Limits and shares hold for the next task that starts."] if limits.intersection(changed) else []
    if limits.issuperset(changed) is False:
        will.append("The others hold for tasks that are scheduled from then on, and retention for all that have ended.")
    if "concurrency" in changed and new.concurrency is not UNSET and row.running > new.concurrency:
        will.append(
            f"{number(row.running)} run now: they go on, and none starts until fewer than {number(new.concurrency)} do."
        )
    return will


async def run(visit: Visit, wanted: NewSettings) -> Done:
    """Change what the page before has said. Raises `Refused` if others have changed settings of the kind since."""
    was = _was(await _old(visit, wanted.kind), wanted)
    note = visit.note("kind.set", target=wanted.kind)
    await visit.engine.operations.set_kind(wanted.kind, _new(was, wanted), by=visit.by, was=was, note=note)
    return Done(f"kind{query(kind=wanted.kind)}", "set")


def _text(value: Any) -> str:
    if value is UNSET:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


SET_KIND = Act(NewSettings, plan, run, _kind)
