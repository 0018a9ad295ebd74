"""`leasekit dead`: look at dead tasks, make them ready again, or remove them."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import fail, spoken
from leasekit.cli.purge import print_purged
from leasekit.cli.selection import Wanted
from leasekit.cli.service import connected
from leasekit.cli.status import show_task
from leasekit.cli.tasks import print_tasks
from leasekit.client import Client
from leasekit.errors import ConfigError
from leasekit.task import Redriven, Status, TaskInfo, Verdict
from leasekit.task.words import REDRIVABLE

_BATCH = 200  # tasks of one call, whose verdicts are printed together
_PAGE = 500

EXAMPLES = """\b
  leasekit dead                list the dead tasks that match
  leasekit dead show ID...     each with its reason, its runs and their errors
  leasekit dead redrive        make those that match ready again
  leasekit dead redrive ID...  make these ready again
  leasekit dead purge          remove those that match
  leasekit dead purge ID...    remove these

\b
Tasks are selected by all options that are given. --status is dead, unless
it is fatal_failure or dropped: what can be redriven.
redrive prints a line for each task: id, verdict, reason. Verdicts: redriven;
redrivable, with --dry-run; gone, if it is unknown; failed, if it cannot be
redriven, and why. Exit code 1 if there is one of these; the others are
redriven. If the command is cut off, run it again: it goes on.
purge removes nothing without --yes: it prints how many would be.

\b
Examples:
  leasekit dead --kind report --since 24h
  leasekit dead --error-type ConnectionError --json | jq -r .reason
  leasekit dead redrive --error "timed out" --until 10m --dry-run
  leasekit dead redrive --kind report --limit 0 --rate 50
  leasekit dead purge --reason "no such month" --yes
"""

What = Annotated[str, typer.Argument(metavar="[ACTION]", help="list, show, redrive or purge.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Of show, redrive and purge: the tasks.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="List or redrive at most this number; 0: all.")]
Rate = Annotated[int | None, typer.Option(min=1, help="Redrive so many tasks a second, at most.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing: show what would go.")]
Yes = Annotated[bool, typer.Option("--yes", help="With purge: remove them. Without it they are counted.")]


@spoken
def dead(
    what: What = "list",
    task_ids: Ids = None,
    *,
    wanted: Wanted,
    limit: Limit = 1000,
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """List, show, redrive and purge dead tasks.

    A redrive begins a new life of a task, without the failures and crashes of the one before. Without --rate, batches
    of 200 follow one another, and heartbeats go in between.
    """
    ids = task_ids or []
    _check(what, ids, wanted, dry_run=dry_run, yes=yes)
    with connected(service) as client:
        match what:
            case "list":
                _list(client, wanted, limit, as_json=as_json)
            case "show":
                _show(client, ids, as_json=as_json)
            case "redrive":
                _redrive(client, ids, wanted, limit, rate=rate, dry_run=dry_run, as_json=as_json)
            case _:
                _purge(client, ids, wanted, removes=yes, as_json=as_json)


def _check(what: str, ids: list[str], wanted: Wanted, *, dry_run: bool, yes: bool) -> None:
    """Raise for an action that does not exist, or that has not what it needs."""
    if what not in ("list", "show", "redrive", "purge"):
        raise typer.BadParameter(f"{what!r} is no action: use list, show, redrive or purge", param_hint="ACTION")
    if what in ("list", "show") and (dry_run or yes):
        raise typer.BadParameter("it goes with redrive and purge", param_hint="--dry-run, --yes")
    if yes and (dry_run or what == "redrive"):
        raise typer.BadParameter("it goes with purge, and contradicts --dry-run", param_hint="--yes")
    if what == "list" and ids:
        raise typer.BadParameter("a list takes filters; write: leasekit dead show ID", param_hint="ID")
    if what == "show" and (wanted or not ids):
        raise typer.BadParameter("write: leasekit dead show ID...", param_hint="ID")
    if what in ("redrive", "purge") and bool(ids) is bool(wanted):
        raise ConfigError("name tasks, or select them by --kind, --status or another filter")
    if wanted.get("status", Status.DEAD) not in REDRIVABLE:
        ended = ", ".join(sorted(REDRIVABLE))
        raise typer.BadParameter(
            f"a task that is {wanted['status']} is no dead one: name {ended}", param_hint="--status"
        )


def _list(client: Client, wanted: Wanted, limit: int, *, as_json: bool) -> None:
    found = _dead_tasks(client, wanted)
    print_tasks(found if limit == 0 else islice(found, limit), ended=True, as_json=as_json, wide=False)
    if next(found, None) is not None:
        typer.echo("leasekit dead: there are more: raise --limit; 0 shows all", err=True)


def _show(client: Client, ids: list[str], *, as_json: bool) -> None:
    for task_id in ids:
        show_task(client, task_id, as_json=as_json)


def _dead_tasks(client: Client, wanted: Wanted) -> Iterator[TaskInfo]:
    """Yield the dead tasks that match, a page at a time."""
    cursor: str | None = None
    while True:
        page = client.list_dead(cursor=cursor, limit=_PAGE, **wanted.filters)
        yield from page.tasks
        cursor = page.cursor
        if cursor is None:
            return


def _purge(client: Client, ids: list[str], wanted: Wanted, *, removes: bool, as_json: bool) -> None:
    filters = Wanted() if ids else Wanted({"status": Status.DEAD} | wanted)
    purged = client.purge(*ids, dry_run=not removes, **filters.filters)
    print_purged(purged, as_json=as_json, removed=removes, command="dead")


def _redrive(
    client: Client,
    ids: list[str],
    wanted: Wanted,
    limit: int,
    *,
    rate: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Redrive, print a verdict for each task, and say what is left to do. Fails if a task cannot be redriven."""
    counts, last = Counter[str](), Redriven()
    some = partial(client.redrive, rate=rate, dry_run=dry_run)
    left = limit or max(1, _count(client, wanted))
    for answer in _named(some, ids) if ids else _matching(some, left, wanted):
        last = answer
        for verdict in answer.tasks:
            counts[verdict.verdict] += 1
            _print(verdict, as_json=as_json)
    if last.about is not None:
        output.print_line(["about", last.about, *([] if last.moving is None else ["moving", last.moving])])
    elif last.cursor is not None and limit:
        typer.echo("leasekit dead: there are more: raise --limit; 0 takes all", err=True)
    elif not (ids or counts):
        typer.echo(f"leasekit dead: {_no_match(client, wanted)}", err=True)
    if dry_run and counts:
        typer.echo(f"leasekit dead: {_tasks(counts['redrivable'])} would be redriven", err=True)
    if bad := counts["failed"] + counts["gone"]:
        fail("dead", f"{bad} of {counts.total()} tasks cannot be redriven: the reasons are above")


def _named(some: Callable[..., Redriven], ids: list[str]) -> Iterator[Redriven]:
    for start in range(0, len(ids), _BATCH):
        yield some(*ids[start : start + _BATCH])


def _matching(some: Callable[..., Redriven], left: int, wanted: Wanted) -> Iterator[Redriven]:
    """Redrive at most `left` tasks that match, and yield the answer of each batch."""
    cursor: str | None = None
    while left > 0:
        answer = some(cursor=cursor, limit=min(left, _BATCH), **wanted.filters)
        yield answer
        left, cursor = left - len(answer.tasks), answer.cursor
        if cursor is None:
            return


def _no_match(client: Client, wanted: Wanted) -> str:
    """Return the filters that no task matches, and how many tasks have another status that can be redriven."""
    status = wanted.get("status", Status.DEAD)
    asked = Wanted({"status": status} | wanted)
    others = sorted(REDRIVABLE - {status}) if wanted.keys() <= {"kind", "status"} else []
    found = {other: _count(client, Wanted({**wanted, "status": other})) for other in others}
    return f"no task matches ({asked}){''.join(f'; --status {it}: {count:,}' for it, count in found.items() if count)}"


def _count(client: Client, wanted: Wanted) -> int:
    """Count the tasks that may match now: no more are redriven, so that tasks that fail again are not taken twice."""
    kind, status = wanted.get("kind"), wanted.get("status", Status.DEAD)
    return sum(counts.get(status, 0) for name, counts in client.stats().kinds.items() if kind in (None, name))


def _tasks(count: int) -> str:
    return f"{count:,} task{'s' * (count != 1)}"


def _print(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        output.print_json(verdict)
    else:
        output.print_line([verdict.id, verdict.verdict, *([verdict.reason] if verdict.reason else [])])
