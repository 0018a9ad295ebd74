"""`leasekit periodic`: list, show and change periodic tasks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.schedule import json_value
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import ConfigError, LeasekitError
from leasekit.periodic import Overlap, PeriodicInfo, PeriodicTask

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
  leasekit periodic               list the periodic tasks
  leasekit periodic show NAME     when it fires next, and what became of it
  leasekit periodic set NAME      add it, or replace it, with the options
  leasekit periodic pause NAME    let it fire on request only
  leasekit periodic resume NAME   let it fire again
  leasekit periodic trigger NAME  let it fire now; prints the id of the task
  leasekit periodic delete NAME   remove it; its tasks stay

\b
The list has, in a pipe, a line for each: name, kind, rule, next firing, and
paused or active; - for an empty field. show prints next firings, and then the
latest ones with their outcome and task. With --json, JSON lines.

\b
Examples:
  leasekit periodic set nightly --kind report --cron "0 3 * * *"
  leasekit periodic set poll --kind poll --every 5m --overlap queue
  leasekit periodic set payroll --kind pay --cron "0 7 1 * *" \\
      --tz Europe/Berlin --payload '{"to": "all"}'
"""

_ACTIONS = ("list", "show", "set", "pause", "resume", "trigger", "delete")

What = Annotated[str, typer.Argument(metavar="[ACTION]", help="list, show, set, pause, resume, trigger or delete.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The periodic task; of all actions but list.")]
Kind = Annotated[str | None, typer.Option("--kind", "-k", help="With set: the kind of its tasks.")]
Payload = Annotated[str | None, typer.Option(metavar="JSON", help="With set: their payload; - reads it from stdin.")]
Cron = Annotated[
    str | None, typer.Option(metavar="'M H D M W'", help="With set: minute, hour, day, month and day of the week.")
]
Zone = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="With --cron: the time zone. Default: UTC.")]
Every = Annotated[
    float | None,
    typer.Option(parser=options.age, metavar="TIME", help="With set: seconds between two firings, or 5m, 12h."),
]
Overlaps = Annotated[
    Overlap | None,
    typer.Option(help="With set: what a firing makes while the task before has not ended. Default: skip."),
]
CatchUp = Annotated[
    int | None, typer.Option(min=0, max=100, help="With set: firings to make up for after an outage. Default: 1.")
]
Jitter = Annotated[
    float | None, typer.Option(parser=options.age, metavar="TIME", help="With set: fire up to this much later.")
]
Deadline = Annotated[
    float | None, typer.Option(parser=options.age, metavar="TIME", help="With set: after this time it is too late.")
]
Collection = Annotated[str | None, typer.Option(help="With set: the collection of its tasks.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="With set: a tag of its tasks.")]
Key = Annotated[str | None, typer.Option(help="With set: the key of its tasks.")]
Requires = Annotated[
    list[str] | None,
    typer.Option("--requires", metavar="NAME=VALUE", help="With set: a label of the workers that may run its tasks."),
]
Prefers = Annotated[
    list[str] | None,
    typer.Option("--prefers", metavar="NAME=VALUE", help="With set: a label of the workers that get its tasks sooner."),
]
PreferFor = Annotated[
    float | None, typer.Option(min=0.1, help="With set: seconds for which they are kept for these. Default: 10.")
]
Priority = Annotated[int | None, typer.Option(min=0, max=4, help="With set: 0 is the most urgent. Default: 2.")]


class Settings(dict[str, Any]):
    """Settings of a periodic task, for *set*: the command has an option for each."""

    @staticmethod
    def named_by(
        *,
        kind: Kind = None,
        payload: Payload = None,
        cron: Cron = None,
        tz: Zone = None,
        every: Every = None,
        overlap: Overlaps = None,
        catch_up: CatchUp = None,
        jitter: Jitter = None,
        start_deadline: Deadline = None,
        collection: Collection = None,
        tags: Tags = None,
        key: Key = None,
        requires: Requires = None,
        prefers: Prefers = None,
        prefer_for: PreferFor = None,
        priority: Priority = None,
    ) -> "Settings":
        given = Settings({name: value for name, value in locals().items() if value not in (None, [])})
        for name in {"requires", "prefers"} & given.keys():
            given[name] = options.labels(given[name])
        if payload is not None:
            given["payload"] = json_value(payload)
        return given


@spoken
def periodic(
    what: What = "list",
    name: Name = None,
    *,
    settings: Settings,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """List, show and change periodic tasks.

    Each firing makes one task, with the id NAME@INSTANT. A change holds from then on, and makes no firing of the past.
    """
    of = _checked(what, name, settings)
    with connected(service, may_create=what == "set") as client:
        match what:
            case "list":
                _print_list(client.list_periodic(), as_json=as_json)
            case "show":
                _print_one(of, client.get_periodic(of), as_json=as_json)
            case "set":
                _say(client.set_periodic(of, _task(settings)), as_json=as_json)
            case "pause":
                _say(client.pause_periodic(of), as_json=as_json)
            case "resume":
                _say(client.resume_periodic(of), as_json=as_json)
            case "trigger":
                _trigger(client, of, as_json=as_json)
            case _:
                _delete(client, of)


def _trigger(client: Client, name: str, *, as_json: bool) -> None:
    scheduled = client.trigger_periodic(name)
    output.print_json(scheduled) if as_json else output.print_line([scheduled.id])


def _delete(client: Client, name: str) -> None:
    client.delete_periodic(name)
    typer.echo(output.plain(f"leasekit periodic: there is no {name!r} any more; its tasks stay"), err=True)


def _checked(what: str, name: str | None, chosen: dict[str, Any]) -> str:
    """Return the name; raise `BadParameter` for an unknown action, or one with the wrong arguments."""
    if what not in _ACTIONS:
        raise typer.BadParameter(f"{what!r} is no action: use {', '.join(_ACTIONS)}", param_hint="ACTION")
    if (what == "list") is not (name is None):
        usage = "list" if what == "list" else f"{what} NAME"
        raise typer.BadParameter(f"write: leasekit periodic {usage}", param_hint="NAME")
    if chosen and what != "set":
        raise typer.BadParameter("it goes with set", param_hint=f"--{next(iter(chosen)).replace('_', '-')}")
    if what == "set" and "kind" not in chosen:
        raise typer.BadParameter("name the kind of its tasks", param_hint="--kind")
    return name or ""


def _task(chosen: dict[str, Any]) -> PeriodicTask:
    """Return the task that the options describe. Raises `ConfigError` if they contradict each other."""
    if "every" in chosen:
        if chosen["every"] != int(chosen["every"]):
            raise ConfigError(f"--every must be whole seconds, got {chosen['every']:g}")
        chosen["every"] = int(chosen["every"])
    try:
        return PeriodicTask(**chosen)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _rule(task: PeriodicTask) -> str:
    return f"every {task.every} s" if task.cron is None else f"{task.cron} {task.tz or 'UTC'}"


def _state(info: PeriodicInfo) -> str:
    return "paused" if info.is_paused else "active"


def _next(info: PeriodicInfo) -> str:
    return output.moment(info.next_at[0]) if info.next_at else ""


def _say(info: PeriodicInfo, *, as_json: bool) -> None:
    if as_json:
        output.print_json(info)
    when = "is paused" if info.is_paused else f"fires next at {_next(info)}" if info.next_at else "never fires again"
    typer.echo(output.plain(f"leasekit periodic: {info.name!r} {when}"), err=True)


def _print_list(found: Sequence[PeriodicInfo], *, as_json: bool) -> None:
    if not as_json and output.on_terminal():
        output.console().print(_table(found) if found else "no periodic tasks")
        return
    for info in found:
        if as_json:
            output.print_json(info)
        else:
            output.print_line([info.name, info.task.kind, _rule(info.task), _next(info), _state(info)])


def _table(found: Sequence[PeriodicInfo]) -> "Table":
    lines = output.table("name", "kind", "rule", "next", "state")
    for info in found:
        following = output.ago(info.next_at[0]) if info.next_at else "-"
        cells = info.name, info.task.kind, _rule(info.task), following, _state(info)
        lines.add_row(*map(output.styled, cells))
    return lines


def _print_one(name: str, info: PeriodicInfo | None, *, as_json: bool) -> None:
    if info is None:
        raise LeasekitError(f"there is no periodic task {name!r}: list them with 'leasekit periodic'")
    if as_json:
        output.print_json(info)
        return
    for at in info.next_at:
        output.print_line([output.moment(at), "next"])
    for firing in info.firings:
        count = f"{firing.outcome} x{firing.count}" if firing.count > 1 else firing.outcome
        output.print_line([output.moment(firing.at), count, firing.id or "", firing.reason or ""])
    _say(info, as_json=False)
