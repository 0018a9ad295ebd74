"""`leasekit gates`: list the closed gates; and what the commands that close and open gates have in common."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import BackendError, LeasekitError
from leasekit.task import GateInfo

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
In a pipe, a line for each: kind or collection, its name, pause or drop, when
the gate opens by itself, when it was closed, by whom, and why.
With --json, a JSON line for each.

\b
Examples:
  leasekit gates
  leasekit gates --json | jq -r 'select(.kind).kind'
"""

Kind = Annotated[str | None, typer.Argument(metavar="[KIND]", help="The kind; or name a --collection.")]
Collection = Annotated[str | None, typer.Option("--collection", "-c", metavar="NAME", help="A collection.")]
For = Annotated[
    float | None,
    typer.Option("--for", parser=options.age, metavar="TIME", help="Open again after this time: seconds, 30m or 2h."),
]
Until = Annotated[
    datetime | None, typer.Option(parser=options.instant, metavar="TIME", help="Open again at this time (RFC 3339).")
]
Reason = Annotated[str | None, typer.Option("--reason", "-r", metavar="TEXT", help="Why, for those who wonder.")]


class Gated(NamedTuple):
    """A kind or a collection, which a gate stops."""

    kind: str | None
    collection: str | None

    def __str__(self) -> str:
        return f"the collection {self.collection!r}" if self.kind is None else f"the kind {self.kind!r}"


@spoken
def gates(*, service: options.Service, as_json: options.Json = False) -> None:
    """List the kinds and collections that are paused or dropped."""
    with connected(service) as client:
        found = client.gates()
    if not as_json and output.on_terminal():
        output.console().print(gates_table(found) if found else "no gate is closed")
        return
    for gate in found:
        if as_json:
            output.print_json(gate)
        else:
            until = "" if gate.until is None else output.moment(gate.until)
            changed = output.moment(gate.changed_at), gate.changed_by or ""
            output.print_line([*_named(gate), gate.mode, until, *changed, gate.reason or ""])


def gates_table(found: Sequence[GateInfo]) -> "Table":
    shown = output.table("closed", "name", "mode", "opens", "since", "by", "reason")
    for gate in found:
        until = "-" if gate.until is None else output.ago(gate.until)
        cells = (
            *_named(gate),
            gate.mode,
            until,
            output.ago(gate.changed_at),
            gate.changed_by or "-",
            gate.reason or "",
        )
        shown.add_row(*map(output.styled, cells))
    return shown


def _named(gate: GateInfo) -> tuple[str, str]:
    return ("collection", gate.collection or "") if gate.kind is None else ("kind", gate.kind)


def gated(kind: str | None, collection: str | None) -> Gated:
    """Return what a command names. Raises `BadParameter` unless it is one thing."""
    if (kind is None) is (collection is None):
        raise typer.BadParameter("name a kind, or a --collection", param_hint="KIND")
    return Gated(kind, collection)


def until_of(after: float | None, until: datetime | None) -> float | datetime | None:
    """Return when a gate is to open by itself. Raises `BadParameter` if both options are given."""
    if after is not None and until is not None:
        raise typer.BadParameter("it contradicts --for", param_hint="--until")
    return after if until is None else until


def closed(client: Client) -> list[GateInfo]:
    """Return the closed gates; none if the service has no gates."""
    try:
        return client.gates()
    except BackendError:
        raise
    except LeasekitError:
        return []


def spoken_of(gate: GateInfo) -> str:
    """Return a closed gate in a sentence."""
    what = Gated(gate.kind, gate.collection)
    until = "" if gate.until is None else f" until {output.moment(gate.until)}"
    reason = f": {gate.reason}" if gate.reason else ""
    return output.plain(f"{what} is {'paused' if gate.mode == 'pause' else 'dropped'}{until}{reason}")
