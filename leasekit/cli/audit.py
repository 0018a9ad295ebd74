"""`leasekit audit`: what operators did."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.tokens import AuditEntry

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
The latest entry comes first. In a pipe, a line for each: when, by which
access token (local: without one), what was done, to what, to how many, the
names of what was given, and the name of the client; - for an empty field.
With --json, a JSON line for each.

\b
Examples:
  leasekit audit
  leasekit audit -n 999 --json | jq -r 'select(.act == "tasks.purge").by'
"""

_PAGE = 1000

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Entries, at most.")]


@spoken
def audit(*, limit: Limit = 50, service: options.Service, as_json: options.Json = False) -> None:
    """List what operators did."""
    with connected(service) as client:
        entries = list(_entries(client, limit))
    if not as_json and output.on_terminal():
        output.console().print(_table(entries) if entries else "no operator has done anything yet")
        return
    for entry in entries:
        if as_json:
            output.print_json(entry)
        else:
            what = [entry.act, entry.target or "-", str(entry.count), ",".join(entry.fields) or "-"]
            output.print_line([output.moment(entry.at), entry.by, *what, entry.worker or "-"])


def _entries(client: Client, limit: int) -> Iterator[AuditEntry]:
    cursor: str | None = None
    while limit > 0:
        page = client.audit(cursor=cursor, limit=min(limit, _PAGE))
        yield from page.entries
        limit, cursor = limit - len(page.entries), page.cursor
        if cursor is None:
            return


def _table(entries: Sequence[AuditEntry]) -> "Table":
    shown = output.table("when", "by", "act", "of", "count", "given", "client")
    for entry in entries:
        what = (entry.act, entry.target or "-", str(entry.count), ", ".join(entry.fields) or "-")
        shown.add_row(*map(output.styled, (output.ago(entry.at), entry.by, *what, entry.worker or "-")))
    return shown
