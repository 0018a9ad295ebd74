"""`leasekit redrive`: make dead tasks ready again."""

import enum
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import fail, spoken
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import ConfigError
from leasekit.task import Redriven, Status, Verdict

_BATCH = 200  # tasks of one call, whose verdicts are printed together

EXAMPLES = """\b
Prints a line for each task: id, verdict, reason. Verdicts: redriven;
redrivable, with --dry-run; gone, if it is unknown; failed, if it cannot be
redriven, and why.
Exit code 1 if a task could not be redriven. The others are redriven.

\b
Examples:
  leasekit tasks --status dead --json | jq -r '[.id, .reason] | @tsv'
  leasekit redrive --kind report --dry-run
  leasekit redrive --kind report --limit 0 --rate 50
  leasekit redrive 0199c1f0-…
"""


class _Ended(enum.Enum):
    """The statuses after which a task can be redriven."""

    DEAD = "dead"
    FATAL_FAILURE = "fatal_failure"
    DROPPED = "dropped"


@spoken
def redrive(
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The tasks.")] = None,
    *,
    kind: Annotated[str | None, typer.Option("--kind", "-k", help="Only tasks of this kind.")] = None,
    ended_as: Annotated[
        _Ended | None, typer.Option("--status", "-s", help="Only tasks in this status; without it, dead ones.")
    ] = None,
    collection: Annotated[str | None, typer.Option(help="Only tasks of this collection.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="At most this number; 0: all.")] = 1000,
    rate: Annotated[int | None, typer.Option(min=1, help="Tasks a second, at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing: show what would go.")] = False,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Make dead tasks ready again.

    Name them, or select those that match all filters. Each begins a new life, without the failures and crashes of the
    one before. Without --rate, batches of 200 follow one another, and heartbeats go in between. Of SQS, all dead
    letters of a kind are moved back in the background.
    """
    status = None if ended_as is None else Status(ended_as.value)
    if bool(task_ids) is bool(kind or status or collection):
        raise ConfigError("name tasks, or select them by --kind, --status or --collection")
    counts, cursor, is_moving = Counter[str](), None, False
    with connected(service) as client:
        left = limit or max(1, _dead(client, kind, status))
        answers = (
            _redriven(client, task_ids, rate=rate, dry_run=dry_run)
            if task_ids
            else _matching(client, left, kind=kind, status=status, collection=collection, rate=rate, dry_run=dry_run)
        )
        for answer in answers:
            cursor, is_moving = answer.cursor, answer.moving is not None
            for verdict in answer.tasks:
                counts[verdict.verdict] += 1
                _print(verdict, as_json=as_json)
            if is_moving:
                output.print_line(["moving", answer.moving])
        if cursor is not None and limit:
            typer.echo("leasekit redrive: there are more: raise --limit; 0 takes all", err=True)
        if not (task_ids or counts or is_moving):
            typer.echo(f"leasekit redrive: {_no_match(client, kind, status or Status.DEAD, collection)}", err=True)
    if bad := counts["failed"] + counts["gone"]:
        fail("redrive", f"{bad} of {counts.total()} tasks cannot be redriven: the reasons are above")


def _redriven(client: Client, task_ids: list[str], **how: Any) -> Iterator[Redriven]:
    for start in range(0, len(task_ids), _BATCH):
        yield client.redrive(*task_ids[start : start + _BATCH], **how)


def _matching(client: Client, left: int, **how: Any) -> Iterator[Redriven]:
    """Redrive at most `left` tasks that match, and yield the answer of each batch."""
    cursor: str | None = None
    while left > 0:
        answer = client.redrive(cursor=cursor, limit=min(left, _BATCH), **how)
        yield answer
        left, cursor = left - len(answer.tasks), answer.cursor
        if cursor is None:
            return


def _no_match(client: Client, kind: str | None, status: Status, collection: str | None) -> str:
    """Return the filters that no task matches, and how many tasks have another status that can be redriven."""
    asked = {"status": status, "kind": kind, "collection": collection}
    filters = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    others = [Status(ended.value) for ended in _Ended if ended.value != status]
    found = {} if collection is not None else {other: _dead(client, kind, other) for other in others}
    more = "".join(f"; --status {other}: {count:,}" for other, count in found.items() if count)
    return output.plain(f"no task matches ({filters}){more}")


def _dead(client: Client, kind: str | None, status: Status | None) -> int:
    """Count the tasks that may match now: no more are redriven, so that tasks that fail again are not taken twice."""
    kinds = client.stats().kinds
    return sum(counts.get(status or Status.DEAD, 0) for name, counts in kinds.items() if kind in (None, name))


def _print(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        output.print_json(verdict)
    else:
        output.print_line([verdict.id, verdict.verdict, *([verdict.reason] if verdict.reason else [])])
