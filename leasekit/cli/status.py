"""`leasekit status`: what is where."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import leasekit
from leasekit.cli import options

__all__ = ["status"]


def status(
    task_id: Annotated[str | None, typer.Argument(help="One task; without it, a count of all.")] = None,
    backend: options.Backend = "http://127.0.0.1:8077",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Show one task with its history, or how many tasks of each kind are in which status."""
    with leasekit.connect(backend) as client:
        found = client.stats() if task_id is None else client.get(task_id)
    if found is None:
        raise leasekit.LeasekitError(
            f"there is no task {task_id!r}: look for it with another id, or at another backend"
        )
    if as_json or task_id is not None:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=0 if as_json else 2).decode())
        return
    kinds: dict[str, dict[str, int]] = found["kinds"]  # type: ignore[index]
    statuses = [name for name in leasekit.Status if any(name in counts for counts in kinds.values())]
    table = Table("kind", *statuses)
    for kind, counts in sorted(kinds.items()):
        table.add_row(kind, *(str(counts.get(name, 0)) for name in statuses))
    Console().print(table if kinds else "no tasks")
