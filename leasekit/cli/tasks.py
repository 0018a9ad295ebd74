"""`leasekit tasks`: list tasks, and follow their changes."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from leasekit.cli import options, output, selection
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected, looks
from leasekit.cli.tail import Tail
from leasekit.client import Client
from leasekit.task import Page, Status, TaskInfo

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_PAGE = 500
_COLUMNS = {"id": 0, "kind": 0, "status": 0, "try": 0, "due": 0, "running for": 0} | {
    "last progress": 100, "worker": 130, "progress": 150,
}  # the columns of the table, each from this width of the terminal on  # fmt: skip
_ENDED = {"id": 0, "kind": 0, "status": 0, "try": 0, "ended": 0, "reason": 100}
"""The columns of a table in which all tasks have ended."""
_WHOLE = 10_000  # the width of a table with all columns in which nothing is cut

EXAMPLES = """\b
In a pipe, a line for each task: id, kind, status, attempt, when due, worker;
- for an empty field. With --json, a JSON line for each, with payload,
progress, result and error, and the times of its run.

\b
Examples:
  leasekit tasks --kind thumbnail --status processing
  leasekit tasks --status failed --since 24h
  leasekit tasks --tag customer:42 --tag import
  leasekit tasks --newest --limit 20 --wide
  leasekit tasks --follow
  leasekit tasks --status dead --limit 0 --json | jq -r .reason
"""

LEASED = frozenset({Status.CLAIMED, Status.PROCESSING})
WAITING = frozenset(status for status in Status if not status.ended) - LEASED
_FAILED = (Status.FATAL_FAILURE, Status.DROPPED, Status.DEAD)


def _names(incomplete: str) -> list[str]:
    """Return what --status takes, for the shell too."""
    return [name for name in (*Status, "failed") if name.startswith(incomplete)]


Pages = Callable[[str | None, int], Page]

Kind = Annotated[str | None, typer.Option("--kind", "-k", help="Only tasks of this kind.")]
Statuses = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        "-s",
        metavar="STATUS",
        autocompletion=_names,
        help="Only tasks in this status, or failed: dead, fatal_failure, dropped. May be given several times.",
    ),
]
Since = Annotated[
    float | None,
    typer.Option(
        parser=options.age,
        metavar="AGE",
        help="Only tasks that ended within this time, or were scheduled if they have not: seconds, 12h or 7d.",
    ),
]
Collection = Annotated[str | None, typer.Option(help="Only tasks of this collection.")]
Tags = selection.Tags
Worker = Annotated[str | None, typer.Option(help="Only tasks that this worker holds, or held last.")]
Root = Annotated[str | None, typer.Option("--root", metavar="ID", help="Only this task, and those that came from it.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="At most this number; 0: all.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Show the newest, then each task that is new or changes its status.")
]
Newest = Annotated[bool, typer.Option("--newest", help="Newest first.")]
Wide = Annotated[
    bool, typer.Option("--wide", "-w", help="All columns, and nothing cut, however narrow the terminal is.")
]


class Filters(NamedTuple):
    """Which tasks are listed: the command has the options that say it."""

    kind: str | None
    statuses: Sequence[Status]
    begin: datetime | None
    collection: str | None
    tags: Sequence[str]
    worker: str | None
    root: str | None

    @staticmethod
    def named_by(
        *,
        kind: Kind = None,
        status: Statuses = None,
        since: Since = None,
        collection: Collection = None,
        tags: Tags = None,
        worker: Worker = None,
        root: Root = None,
    ) -> "Filters":
        begin = None if since is None else datetime.now(UTC) - timedelta(seconds=since)
        return Filters(kind, _statuses(status or []), begin, collection, tags or (), worker, root)

    def is_recent(self, task: TaskInfo) -> bool:
        """Return whether the last change of a task is not too long ago."""
        return self.begin is None or _last_change(task) >= self.begin

    def match_changed(self, task: TaskInfo) -> bool:
        """Return whether a followed task is shown: the service lists others too, so that each change is seen."""
        is_in_status = not self.statuses or task.status in self.statuses
        return is_in_status and self.worker in (None, task.worker) and self.is_recent(task)


@spoken
def tasks(
    *,
    service: options.Service,
    filters: Filters,
    limit: Limit = 100,
    follow: Follow = False,
    newest: Newest = False,
    wide: Wide = False,
    interval: options.Interval = 1.0,
    as_json: options.Json = False,
) -> None:
    """List tasks, or follow them as they change.

    Oldest first, unless --newest says otherwise. With --follow the command goes on until Ctrl-C, and the limit is for
    the tasks that exist already.
    """
    with connected(service) as client:
        if follow:
            _follow(client, filters, limit=limit, every=interval, as_json=as_json)
            return
        found = _listed(client, filters, newest=newest)
        ended = bool(filters.statuses) and all(status.ended for status in filters.statuses)
        print_tasks(found if limit == 0 else islice(found, limit), ended=ended, as_json=as_json, wide=wide)
        if next(found, None) is not None:
            typer.echo("leasekit tasks: there are more: raise --limit; 0 shows all", err=True)


def _listed(client: Client, filters: Filters, *, newest: bool) -> Iterator[TaskInfo]:
    """Yield the tasks that match, in order: the service lists those of one status at a time."""
    kind, statuses, _, collection, tags, worker, root = filters
    chosen = partial(
        client.list_tasks, kind=kind, collection=collection, tags=tags, worker=worker, root=root, newest=newest
    )
    listings = [all_tasks(partial(_page, partial(chosen, status=status))) for status in statuses or (None,)]
    return filter(filters.is_recent, heapq.merge(*listings, key=_scheduled_at, reverse=newest))


def _page(listed: Callable[..., Page], cursor: str | None, size: int) -> Page:
    return listed(cursor=cursor, limit=size)


def _statuses(names: Sequence[str]) -> list[Status]:
    """Return the statuses that are asked for, each once. Raises `BadParameter` for a name that is none."""
    if unknown := next((name for name in names if name not in _names("")), None):
        raise typer.BadParameter(f"{unknown!r} is not one of {', '.join(_names(''))}", param_hint="--status")
    chosen = [status for name in names for status in (_FAILED if name == "failed" else (Status(name),))]
    return list(dict.fromkeys(chosen))


def _scheduled_at(task: TaskInfo) -> datetime:
    return task.scheduled_at or task.at


def _last_change(task: TaskInfo) -> datetime:
    return task.ended_at or _scheduled_at(task)


def all_tasks(pages: Pages) -> Iterator[TaskInfo]:
    """Yield the tasks of all pages; `pages(cursor, size)` reads one."""
    page = pages(None, _PAGE)
    yield from page.tasks
    while page.cursor is not None:
        page = pages(page.cursor, _PAGE)
        yield from page.tasks


def print_tasks(found: Iterator[TaskInfo], *, ended: bool, as_json: bool, wide: bool) -> None:
    """Print tasks as they are found: a table on a terminal, else a line for each."""
    if as_json or not output.on_terminal():
        for task in found:
            _print_one(task, as_json=as_json)
        return
    console = output.console(width=_WHOLE if wide else None)
    table = tasks_table(found, width=console.width, ended=ended)
    console.print(table if table.row_count else "no tasks")


def tasks_table(found: Iterable[TaskInfo], *, width: int, ended: bool = False) -> "Table":
    """Return the tasks as a table, `ended` if all of them have ended.

    Where it is too wide, worker and progress are cut, or the reason, or the id if there is none of these.
    """
    names = [name for name, least in (_ENDED if ended else _COLUMNS).items() if width >= least]
    shown = output.table(*names)
    cut = [column for column, name in enumerate(names) if name in {"worker", "progress", "reason"}] or [0]
    for column in cut:
        shown.columns[column].no_wrap = False  # rich makes this column narrower before others; its cells do not wrap
    for task in found:
        cells = _cells(task, ended=ended)[: len(names)]
        for column in cut:
            cells[column].no_wrap, cells[column].overflow = True, "ellipsis"
        shown.add_row(*cells)
    return shown


def _print_one(task: TaskInfo, *, as_json: bool) -> None:
    if as_json:
        output.print_json(task)
    else:
        output.print_line(output.task_fields(task))


def _cells(task: TaskInfo, *, ended: bool) -> "list[Text]":
    texts = [task.id, task.kind, "", str(task.attempt)]
    if ended:
        why = task.reason or (output.error_text(task.error) if task.error else "")
        texts += [output.ago(task.ended_at) if task.ended_at else "", why]
    else:
        due = output.ago(task.at) if task.status in WAITING else ""
        texts += [due, running_for(task), progress_age(task), task.worker or "", output.compact(task.progress)]
    cells = [output.styled(text) for text in texts]
    cells[2] = output.styled(task.status, output.STYLES.get(task.status, ""))
    return cells


def running_for(task: TaskInfo) -> str:
    """Return how long the run of a leased task has lasted since its claim; empty where there is none."""
    return output.span(task.claimed_at) if task.status in LEASED and task.claimed_at else ""


def progress_age(task: TaskInfo) -> str:
    """Return how old the last progress of a run that goes on is; empty if the run has not reported any."""
    if task.status not in LEASED or task.progress_at is None or task.claimed_at is None:
        return ""
    return output.ago(task.progress_at) if task.progress_at >= task.claimed_at else ""


def _follow(client: Client, filters: Filters, *, limit: int, every: float, as_json: bool) -> None:
    """Print tasks as they change, until Ctrl-C."""
    if filters.root is not None:
        raise typer.BadParameter("goes without --follow", param_hint="--root")
    listed = partial(client.list_tasks, kind=filters.kind, collection=filters.collection, tags=filters.tags)
    tail = Tail(lambda cursor: listed(cursor=cursor, limit=_PAGE))
    show, shown = _printer(as_json=as_json), False
    for changed in looks(tail.look, every=every):
        matching = [task for task in changed if filters.match_changed(task)]
        for task in matching if shown or limit == 0 else matching[-limit:]:
            show(task)
        shown = True


def _printer(*, as_json: bool) -> Callable[[TaskInfo], None]:
    """Return what prints a task that is followed; on a terminal, print a header first."""
    if as_json or not output.on_terminal():
        return partial(_print_one, as_json=as_json)
    console = output.console()

    def show(fields: Sequence[object], style: str) -> None:
        console.print(output.styled(_followed_line(fields, width=console.width), style), soft_wrap=True)

    show(list(_FOLLOWED), "bold")
    return lambda task: show(output.task_fields(task), output.STYLES.get(task.status, ""))


_FOLLOWED = {"id": 36, "kind": 16, "status": 17, "try": 3, "due": 25, "worker": 40}
"""The columns of a task that is followed, with their widths; those that fit into the terminal are shown."""


def _followed_line(fields: Sequence[object], *, width: int) -> str:
    columns: list[str] = []
    for field, size in zip(map(output.plain, fields), _FOLLOWED.values(), strict=True):
        if columns and len("  ".join(columns)) + 2 + size > max(width, 80):
            break
        columns.append((field if len(field) <= size or not columns else f"{field[: size - 1]}…").ljust(size))
    return "  ".join(columns).rstrip()
