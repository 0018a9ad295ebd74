"""`leasekit schedule`: hand in one task."""

import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import typer

import leasekit
from leasekit.cli import options
from leasekit.client import TaskOptions

__all__ = ["schedule"]


def schedule(
    kind: Annotated[str, typer.Argument(help="What to run.")],
    payload: Annotated[str, typer.Argument(help="JSON for the handler; - reads it from standard input.")] = "null",
    backend: options.Backend = "http://127.0.0.1:8077",
    task_id: Annotated[str | None, typer.Option("--id", help="Your own id: the same id is scheduled once.")] = None,
    priority: Annotated[int, typer.Option(min=0, max=4, help="0 is the most urgent.")] = 2,
    delay: Annotated[float, typer.Option("--in", min=0, help="Seconds from now before which it does not start.")] = 0,
    dedupe_key: Annotated[str | None, typer.Option(help="One task for each kind and key.")] = None,
) -> None:
    """Schedule a task and print its id. When the command returns, the task is durable."""
    chosen: TaskOptions = {"priority": priority}
    if task_id is not None:
        chosen["id"] = task_id
    if dedupe_key is not None:
        chosen["dedupe_key"] = dedupe_key
    if delay:
        chosen["at"] = datetime.now(UTC) + timedelta(seconds=delay)
    with leasekit.connect(backend) as client:
        scheduled = client.schedule(kind, _parsed(payload), **chosen)
    if scheduled.conflict:
        sys.exit(f"leasekit: {scheduled.id} is another task already: choose another id, or leave it out")
    typer.echo(scheduled.id)
    if not scheduled.created:
        typer.echo(f"it was there already: {scheduled.status}", err=True)


def _parsed(payload: str) -> Any:
    text = sys.stdin.read() if payload == "-" else payload
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise typer.BadParameter(f"the payload is no JSON: {error}", param_hint="PAYLOAD") from error
