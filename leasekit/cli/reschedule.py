"""`leasekit reschedule`: change when waiting tasks are due, or how urgent they are."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from leasekit.cli import options, output
from leasekit.cli.bulk import DryRun, Token, is_bulk, print_matched
from leasekit.cli.errors import fail, sentence, spoken
from leasekit.cli.selection import Wanted
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import Refused

EXAMPLES = """\b
  leasekit reschedule ID...              change these
  leasekit reschedule FILTERS --dry-run  count those that match, print a token
  leasekit reschedule FILTERS --token T  change those that were counted

\b
Prints a line for each task: id, when it is due, priority.
Exit code 1 if a task could not be rescheduled, because it runs, has ended or
is unknown; stderr says why, and the others are rescheduled.

\b
Examples:
  leasekit reschedule 0199c1f0-… --now
  leasekit reschedule report-7 --at 2026-12-24T18:00:00Z
  leasekit reschedule report-7 report-8 --in 3600 --priority 0
  leasekit reschedule --kind report --until 1h --priority 4 --dry-run
"""

At = Annotated[
    datetime | None, typer.Option(parser=options.instant, metavar="TIME", help="Not before this time (RFC 3339).")
]
Delay = Annotated[
    float | None, typer.Option("--in", min=0, max=3650 * 86400, help="Not before so many seconds have passed.")
]
Now = Annotated[bool, typer.Option("--now", help="They are due now.")]
Priority = Annotated[int | None, typer.Option(min=0, max=4, help="0 is the most urgent.")]


class Change(dict[str, Any]):
    """A change of tasks, as `Client.reschedule` takes it: the command has the options that say it."""

    @staticmethod
    def named_by(*, at: At = None, delay: Delay = None, now: Now = False, priority: Priority = None) -> "Change":
        if [at is not None, delay is not None, now].count(True) > 1:
            raise typer.BadParameter("--at, --in and --now say when: give one of them", param_hint="--at, --in, --now")
        if at is None and delay is None and not now and priority is None:
            raise typer.BadParameter("say what changes: --at, --in, --now or --priority", param_hint="--now")
        return Change({"at": at, "delay": 0 if now else delay, "priority": priority})


@spoken
def reschedule(
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="The tasks.")] = None,
    *,
    wanted: Wanted,
    dry_run: DryRun = False,
    token: Token = None,
    change: Change,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Change when waiting tasks are due, or how urgent they are.

    A task that is due still waits for its turn: behind a closed gate, for the tasks that it runs after, at a limit.
    """
    ids = task_ids or []
    with connected(service) as client:
        if is_bulk("reschedule", ids, wanted, dry_run=dry_run, token=token):
            matched = client.reschedule_matching(token=token, **change, **wanted.filters)
            print_matched(matched, "reschedule", wanted, as_json=as_json, is_dry=dry_run)
        refused = _reschedule(client, ids, change, as_json=as_json)
    for why in refused[:-1]:
        typer.echo(f"leasekit reschedule: {why}", err=True)
    if refused:
        fail("reschedule", refused[-1])


def _reschedule(client: Client, ids: Sequence[str], change: Change, *, as_json: bool) -> list[str]:
    """Reschedule these tasks one by one, print what has changed, and return why the others were refused."""
    refused = list[str]()
    for task_id in ids:
        try:
            changed = client.reschedule(task_id, **change)
        except Refused as error:
            refused.append(sentence(error))
            continue
        if as_json:
            output.print_json(changed)
        else:
            output.print_line([changed.id, output.moment(changed.at), str(changed.priority)])
    return refused
