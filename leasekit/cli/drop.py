"""`leasekit drop`: end the due tasks of a kind or a collection instead of starting them."""

import sys
from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.gates import Collection, For, Gated, Kind, Reason, Until, gated, spoken_of, until_of
from leasekit.cli.service import connected
from leasekit.cli.tasks import WAITING
from leasekit.client import Client

_PAGES = 10  # of tasks of a collection that are counted, at most
_PAGE = 1000

EXAMPLES = """\b
On a terminal the command asks; elsewhere --yes is needed, and without it, or
with --dry-run, the tasks that wait are only counted. Those that become due
until 'leasekit open' are dropped too. Prints a sentence to stderr; with
--json, the gate as a JSON line.

\b
Examples:
  leasekit drop report --dry-run
  leasekit drop report --for 1h --reason "a bad release" --yes
"""

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count the tasks that wait.")]


@spoken
def drop(
    kind: Kind = None,
    *,
    collection: Collection = None,
    after: For = None,
    until: Until = None,
    reason: Reason = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Cancel the due tasks of a kind or a collection.

    They end when they would start. Tasks that run are left alone. A dropped task has ended for good: 'leasekit pause'
    keeps tasks.
    """
    if yes and dry_run:
        raise typer.BadParameter("it contradicts --yes", param_hint="--dry-run")
    what, opens = gated(kind, collection), until_of(after, until)
    with connected(service) as client:
        if not yes and not _is_confirmed(client, what, may_ask=not dry_run):
            return
        gate = client.drop(kind=what.kind, collection=what.collection, until=opens, reason=reason)
    if as_json:
        output.print_json(gate)
    typer.echo(f"leasekit drop: {spoken_of(gate)}", err=True)


def _is_confirmed(client: Client, what: Gated, *, may_ask: bool) -> bool:
    """Say how many tasks wait, ask on a terminal whether to drop them, and return the answer."""
    asks = may_ask and sys.stdin.isatty() and output.on_terminal()
    waiting = output.plain(f"leasekit drop: {_waiting(client, what)}")
    typer.echo(f"{waiting}{'' if asks else ': --yes drops them when they are due'}", err=True)
    return asks and typer.confirm("Drop them when they are due?", err=True)


def _waiting(client: Client, what: Gated) -> str:
    """Return in words how many tasks wait; those of a collection are counted up to a bound."""
    if what.kind is not None:
        counts = client.stats().kinds.get(what.kind, {})
        return _tasks_wait(sum(counts.get(status, 0) for status in WAITING), what)
    found, cursor = 0, None
    for _ in range(_PAGES):
        page = client.list_tasks(collection=what.collection, cursor=cursor, limit=_PAGE)
        found, cursor = found + sum(task.status in WAITING for task in page.tasks), page.cursor
        if cursor is None:
            return _tasks_wait(found, what)
    return _tasks_wait(found, what, more=" or more")


def _tasks_wait(count: int, what: Gated, *, more: str = "") -> str:
    return f"1 task of {what} waits" if count == 1 and not more else f"{count:,}{more} tasks of {what} wait"
