"""`leasekit nodes`: list the servers of a service."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected, looks
from leasekit.task import NodeInfo

if TYPE_CHECKING:
    from rich.table import Table


_SILENT = 10.0  # seconds without a sign, of which each node gives one a second

EXAMPLES = """\b
Several servers can have a PostgreSQL database open, and other processes can
open it themselves; any other store has one node.
In a pipe, a line for each: name (machine and process), version of leasekit,
role, address, start, last sign, and alive, silent (no sign for 10 s) or left.
The role is server, or process: one that has opened the store itself, and so
has - for an address.
With --json, a JSON line for each.

\b
Examples:
  leasekit nodes
  leasekit nodes --json | jq -r 'select(.has_left | not).address'
"""


@spoken
def nodes(
    *,
    service: options.Service,
    watch: options.Watch = False,
    interval: options.Interval = 1.0,
    as_json: options.Json = False,
) -> None:
    """List the servers, and other processes that have the store open.

    Those that have left, or died, stay in the list for ten minutes.
    """
    with connected(service) as client:
        if not watch:
            print_nodes(client.nodes(), as_json=as_json)
        elif as_json or not output.on_terminal():
            before: set[tuple[str, str]] = set()
            for now in looks(client.nodes, every=interval):  # a line when a node comes, leaves or falls silent
                print_nodes([node for node in now if (node.id, state(node)) not in before], as_json=as_json)
                before = {(node.id, state(node)) for node in now}
        else:
            with output.live() as view:
                for now in looks(client.nodes, every=interval):
                    view.update(nodes_table(now), refresh=True)


def print_nodes(found: list[NodeInfo], *, as_json: bool) -> None:
    """Print the nodes in the format that was asked for, or that suits stdout."""
    if not as_json and output.on_terminal():
        output.console().print(nodes_table(found))
        return
    for node in found:
        if as_json:
            output.print_json(node)
        else:
            times = output.moment(node.started_at), output.moment(node.last_seen)
            output.print_line([node.name, node.version, node.role, node.address or "", *times, state(node)])


def nodes_table(found: list[NodeInfo]) -> "Table":
    shown = output.table("node", "version", "role", "address", "up", "last sign", "state")
    for node in found:
        shown.add_row(
            output.styled(node.name),
            output.styled(node.version),
            output.styled(node.role),
            output.styled(node.address or "-"),
            output.span(node.started_at, node.last_seen),
            output.ago(node.last_seen),
            output.styled(state(node), "red" if state(node) == "silent" else ""),
        )
    return shown


def state(node: NodeInfo) -> str:
    if node.has_left:
        return "left"
    return "silent" if (datetime.now(UTC) - node.last_seen).total_seconds() > _SILENT else "alive"
