"""`leasekit kinds`: show and change the settings of kinds."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from leasekit.cli import kinds_file, options, output
from leasekit.cli.errors import WRONG_USAGE, fail, spoken
from leasekit.cli.gates import Gated
from leasekit.cli.kinds_file import KindsFile
from leasekit.cli.service import connected
from leasekit.cli.settings_text import (
    BY_DEFAULT,
    FORMS,
    UNSET_WORD,
    all_shown,
    contradictions,
    differences,
    parsed,
    shown,
)
from leasekit.client import Client
from leasekit.errors import ConfigError, LeasekitError, Refused
from leasekit.task import KindInfo, KindSettings
from leasekit.wire import given

if TYPE_CHECKING:
    from rich.table import Table

_FORMS = "\n".join(f"  {name:<19}{form}" for name, form in FORMS.items())

EXAMPLES = f"""\b
  leasekit kinds                    list the kinds that have settings
  leasekit kinds show KIND          each setting of one kind, and who sets it
  leasekit kinds set KIND NAME=…    change these, and leave the others
  leasekit kinds reset KIND…        remove all settings of these kinds
  leasekit kinds apply FILE         make kinds and gates as a TOML file says

\b
The list has, in a pipe, a line for each: kind, settings, when they were
changed, and by whom. With --json, a JSON line for each. A change prints a
line for each setting that changes. Settings, and how they are written:
{_FORMS}
Each can be {UNSET_WORD}: then leasekit's default holds. Times have s, m, h or d
behind, or are seconds.

\b
A file has a table for each kind, which replaces all settings of that kind;
other kinds stay, unless --prune. On a terminal, apply asks before it changes
anything; elsewhere --yes is needed, and without it, or with --dry-run, the
changes are only printed.
  [report]
  max_attempts = 3
  retry = ["10s", "1m", "10m"]
  retention = "7d"
A gate in it is open, pause or drop, or a table with the mode, a reason, and
until (a time with its offset). A gate that is not in the file stays as it is,
and so do the settings of a kind whose table has a gate alone.
  [report.gate]
  mode = "pause"
  reason = "the printer is on fire"
  [collections.tenant-7]
  gate = "open"

\b
Examples:
  leasekit kinds set report max_attempts=3 retention=7d
  leasekit kinds apply kinds.toml --dry-run
"""


_Kinds = Mapping[str, Mapping[str, Any] | None]
"""The settings of kinds; None: a kind is to have none."""

_TRIES = 10  # of a change that others forestall

What = Annotated[str, typer.Argument(metavar="ACTION", help="list, show, set, reset or apply.")]
Rest = Annotated[
    list[str] | None, typer.Argument(metavar="ARG...", help="Of show, set and reset: the kind; of apply: a file.")
]
Yes = Annotated[bool, typer.Option("--yes", help="With apply: do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="With apply: only print what would change.")]
Prune = Annotated[bool, typer.Option("--prune", help="With apply: reset kinds that are not in the file.")]


class ApplyFlags(NamedTuple):
    """How a file is applied: the command has the options that say it."""

    yes: bool
    dry_run: bool
    prune: bool

    @staticmethod
    def named_by(*, yes: Yes = False, dry_run: DryRun = False, prune: Prune = False) -> "ApplyFlags":
        return ApplyFlags(yes, dry_run, prune)


@spoken
def kinds(
    what: What = "list",
    rest: Rest = None,
    *,
    flags: ApplyFlags,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """List, show and change the settings of kinds.

    They hold for tasks that are scheduled from then on, and whose submission does not say otherwise; retention,
    concurrency, rate, burst, those of keys, weight and aging at once, for all tasks of the kind.
    """
    arguments = rest or []
    _check(what, arguments, flags)
    wanted = _read(arguments[0]) if what == "apply" else KindsFile({}, {})
    changes = _changes(arguments[1:]) if what == "set" else {}
    with connected(service) as client:
        match what:
            case "list":
                _print_list(client.kinds(), as_json=as_json)
            case "show":
                _print_one(arguments[0], client.kind(arguments[0]), as_json=as_json)
            case "set":
                _set(client, arguments[0], changes)
            case "reset":
                _change(client, lambda: (dict.fromkeys(arguments), _all(client)))
            case _:
                _apply(client, wanted, flags)


def _check(what: str, arguments: Sequence[str], flags: ApplyFlags) -> None:
    """Raise for an action that does not exist, or that has not the arguments that it needs."""
    needs = {"list": (0, 0), "show": (1, 1), "set": (2, 99), "reset": (1, 1000), "apply": (1, 1)}
    if what not in needs:
        raise typer.BadParameter(f"{what!r} is no action: use list, show, set, reset or apply", param_hint="ACTION")
    least, most = needs[what]
    if not least <= len(arguments) <= most:
        usage = {"list": "", "show": " KIND", "set": " KIND NAME=VALUE...", "reset": " KIND...", "apply": " FILE"}[what]
        raise typer.BadParameter(f"write: leasekit kinds {what}{usage}", param_hint="ARG")
    if any(flags) and what != "apply":
        raise typer.BadParameter("it goes with apply", param_hint="--yes, --dry-run, --prune")
    if flags.yes and flags.dry_run:
        raise typer.BadParameter("it contradicts --yes", param_hint="--dry-run")


def _changes(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings in words such as max_attempts=3; those to be removed are `UNSET_WORD`."""
    found: dict[str, Any] = {}
    errors: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        try:
            if not equals:
                raise ConfigError(f"{word!r} has no value: write {word}=VALUE")
            if name in found:
                raise ConfigError(f"{name} is given twice: give it once")
            found[name] = UNSET_WORD if text == UNSET_WORD and name in FORMS else parsed(name, text)
        except ConfigError as error:
            errors.append(str(error))
    _refuse(errors)
    return found


def _read(path: str) -> KindsFile:
    """Return what a file says; end with all errors of the file, if it has any."""
    wanted, errors = kinds_file.read(path)
    _refuse(errors)
    return wanted


def _refuse(errors: Sequence[str]) -> None:
    for error in errors[:-1]:
        typer.echo(f"leasekit kinds: {output.plain(error)}", err=True)
    if errors:
        fail("kinds", output.plain(errors[-1]), WRONG_USAGE)


def _settings(info: KindInfo | None) -> dict[str, Any]:
    return {} if info is None else given(info.settings)


def _all(client: Client) -> dict[str, dict[str, Any]]:
    return {info.kind: _settings(info) for info in client.kinds()}


def _set(client: Client, kind: str, changes: Mapping[str, Any]) -> None:
    """Change some settings of a kind. Fails if they contradict those that stay."""

    def changed() -> tuple[_Kinds, _Kinds]:
        old = _settings(client.kind(kind))
        new = {**old, **changes}
        _refuse(contradictions(_without_removed(new)))
        return {kind: new}, {kind: old}

    _change(client, changed)


def _apply(client: Client, wanted: KindsFile, flags: ApplyFlags) -> None:
    old = _all(client)
    new: dict[str, Mapping[str, Any] | None] = {**wanted.kinds}
    if flags.prune:
        new |= {kind: None for kind in old if kind not in wanted.kinds and Gated(kind, None) not in wanted.gates}
    gates = kinds_file.gate_changes(wanted.gates, client.gates()) if wanted.gates else []
    lines = [*_lines(new, old), *map(str, gates)]
    for line in lines:
        output.print_line([line])
    if not lines:
        typer.echo("leasekit kinds: nothing changes", err=True)
    elif flags.dry_run or (not flags.yes and not (sys.stdin.isatty() and output.on_terminal())):
        typer.echo(f"leasekit kinds: {len(lines)} would change: --yes changes them", err=True)
    elif flags.yes or typer.confirm("Change them?", err=True):
        for change in gates:  # a kind is closed before its settings change, and opened after that
            if change.new is not None:
                kinds_file.change_gate(client, change)
        _write(client, new, old)
        for change in gates:
            if change.new is None:
                kinds_file.change_gate(client, change)
        typer.echo(f"leasekit kinds: {len(lines)} changed", err=True)


def _change(client: Client, changed: Callable[[], tuple[_Kinds, _Kinds]]) -> None:
    """Write the new settings of kinds, and print what has changed.

    `changed` reads the old ones, and is called anew if others change them before the new ones are written.
    """
    count = 0
    for left in reversed(range(_TRIES)):
        new, old = changed()
        try:
            for kind, settings in new.items():
                lines = _lines({kind: settings}, old)
                _write(client, {kind: settings}, old)
                count += len(lines)
                for line in lines:
                    output.print_line([line])
            break
        except Refused as error:
            if not left or not any(fault.get("field") == "was" for fault in error.errors):
                raise
    if not count:
        typer.echo("leasekit kinds: nothing changes", err=True)


def _lines(new: _Kinds, old: _Kinds) -> list[str]:
    return [line for kind in new for line in differences(kind, old.get(kind) or {}, _without_removed(new[kind]))]


def _write(client: Client, new: _Kinds, old: _Kinds) -> None:
    """Replace the settings of kinds. Raises `Refused` for one that has not the `old` ones any longer."""
    for kind, settings in new.items():
        left, was = _without_removed(settings), KindSettings(**(old.get(kind) or {}))
        if left or (settings is not None and _is_declared(client.kind(kind))):
            client.set_kind(kind, KindSettings(**left), was=was)
        elif kind in old or settings is not None:
            client.delete_kind(kind, was=was)


def _is_declared(info: KindInfo | None) -> bool:
    """Return whether code declares a kind: to remove all its settings would only have them declared anew."""
    return info is not None and info.declared is not None


def _without_removed(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if value != UNSET_WORD}


def _print_list(found: list[KindInfo], *, as_json: bool) -> None:
    """Print a table to a terminal, else a line for each kind, in JSON if asked."""
    if not as_json and output.on_terminal():
        output.console().print(_table(found) if found else "no kind has settings")
        return
    for info in found:
        if as_json:
            output.print_json(info)
        else:
            changed = output.moment(info.changed_at)
            output.print_line([info.kind, all_shown(info.settings), changed, info.changed_by or ""])


def _table(found: list[KindInfo]) -> "Table":
    lines = output.table("kind", "settings", "changed", "by")
    for info in found:
        changed = output.ago(info.changed_at)
        lines.add_row(*map(output.styled, (info.kind, all_shown(info.settings), changed, info.changed_by or "-")))
    return lines


def _print_one(kind: str, info: KindInfo | None, *, as_json: bool) -> None:
    """Print each setting with its value and where that comes from."""
    if as_json:
        if info is None:
            raise LeasekitError(f"the kind {kind!r} has no settings")
        output.print_json(info)
        return
    settings = _settings(info)
    declared = {} if info is None or info.declared is None else given(info.declared)
    for name in FORMS:
        if name in settings:
            by_code = name in declared and declared[name] == settings[name]
            output.print_line([name, shown(name, settings[name]), "code" if by_code else "kind"])
        elif name in BY_DEFAULT:
            output.print_line([name, shown(name, BY_DEFAULT[name]), "default"])
        else:
            output.print_line([name, "", "service" if name == "retention" else "default"])
