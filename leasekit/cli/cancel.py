"""`leasekit cancel`: cancel tasks that are no longer wanted."""

from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.bulk import DryRun, Token, is_bulk, print_matched
from leasekit.cli.errors import fail, spoken
from leasekit.cli.selection import Wanted
from leasekit.cli.service import connected
from leasekit.named import kind_of
from leasekit.task import Verdict

_BATCH = 1000  # the largest batch of a backend

EXAMPLES = """\b
  leasekit cancel ID...              cancel these
  leasekit cancel FILTERS --dry-run  count those that match, print a token
  leasekit cancel FILTERS --token T  cancel those that were counted

\b
Prints a line for each task: id, verdict, reason. Verdicts: cancelled;
cancel_requested, if it runs and was told to stop; gone, if it has ended or is
unknown.
Exit code 1 if a task could not be cancelled.

\b
Examples:
  leasekit cancel 0199c1f0-…
  leasekit tasks --kind report --status new | cut -f1 | xargs leasekit cancel
  leasekit cancel --named reports/nightly
  leasekit cancel --chain order-7
  leasekit cancel --kind report --status new --dry-run
"""


@spoken
def cancel(
    task_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="The tasks.")] = None,
    named: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--named", help="These are names of leases: ask their holders to give them back.")
    ] = False,
    chain: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--chain", help="Cancel all tasks that came from the same first task as these.")
    ] = False,
    *,
    wanted: Wanted,
    dry_run: DryRun = False,
    token: Token = None,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Cancel tasks, whether they wait or run.

    A task that waits is cancelled at once. A task that runs is cancelled when its handler has ended, or its lease has.
    The lease of a name is not lost for good by this: the name can be granted again.
    """
    ids = task_ids or []
    if is_bulk("cancel", ids, wanted, dry_run=dry_run, token=token):
        if named or chain:
            raise typer.BadParameter("it goes with ids", param_hint="--named, --chain")
        with connected(service) as client:
            matched = client.cancel_matching(token=token, **wanted.filters)
        print_matched(matched, "cancel", wanted, as_json=as_json, is_dry=dry_run)
        return
    _cancel(ids, named=named, chain=chain, service=service, as_json=as_json)


def _cancel(task_ids: list[str], *, named: bool, chain: bool, service: options.Service, as_json: bool) -> None:
    if named and chain:
        raise typer.BadParameter("names are in no chain", param_hint="--chain")
    if named:
        task_ids = [kind_of(name) for name in task_ids]
    verdicts: list[Verdict] = []
    with connected(service) as client:
        for task_id in task_ids if chain else ():
            verdicts += client.cancel_chain(task_id)
        for start in range(0, 0 if chain else len(task_ids), _BATCH):
            verdicts += client.cancel(*task_ids[start : start + _BATCH])
    for verdict in verdicts:
        if as_json:
            output.print_json(verdict)
        else:
            output.print_line([verdict.id, verdict.verdict, *([verdict.reason] if verdict.reason else [])])
    if gone := [verdict.id for verdict in verdicts if verdict.verdict not in {"cancelled", "cancel_requested"}]:
        shown = output.plain(gone[0]) + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
        fail("cancel", f"{shown} cannot be cancelled: ended before, or unknown")
