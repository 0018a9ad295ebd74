"""`leasekit workers`: list the workers that hold tasks, and drain some."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected, looks
from leasekit.client import Client
from leasekit.config import Heartbeats
from leasekit.errors import BackendError, LeasekitError
from leasekit.task import WorkerInfo

if TYPE_CHECKING:
    from rich.table import Table


_SHORTEST = 2.0  # seconds of a ttl for which there is a rhythm

EXAMPLES = """\b
  leasekit workers                  list them
  leasekit workers drain NAME...    have these finish what they hold, take
                                    nothing new, and stop
  leasekit workers undrain NAME...  take that back

\b
In a pipe, a line for each worker: name, tasks held, last seen, overdue if the
worker holds tasks and no heartbeat came for 130 s, in which one is due (26 s
if the shortest lease of its tasks is 60 s, and so on), and draining if it is.
A field is - where it does not apply; so is last seen for a worker that holds
tasks and has not called since the service started.
With --json, a JSON line for each.

\b
drain and undrain print a sentence for each worker to stderr. A worker that
drains has all the time that its tasks need, and ends with exit code 0: what
restarts whatever has ended starts a new one, which is not drained.

\b
Examples:
  leasekit workers --watch
  leasekit workers --json | jq -r 'select(.running > 0).name'
  leasekit workers drain host-1:4711:5e0c --wait
"""

_ACTIONS = ("list", "drain", "undrain")
What = Annotated[str, typer.Argument(metavar="[ACTION]", help="list, drain or undrain.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Of drain and undrain: the workers.")]
Wait = Annotated[bool, typer.Option("--wait", help="With drain: return once they hold no tasks.")]


@spoken
def workers(
    what: What = "list",
    names: Names = None,
    *,
    wait: Wait = False,
    service: options.Service,
    watch: options.Watch = False,
    interval: options.Interval = 1.0,
    as_json: options.Json = False,
) -> None:
    """List the workers, or have some finish what they hold, and stop.

    The list has those that hold tasks, or were lately heard of. Not every backend can list or drain workers; a leasekit
    server can.
    """
    chosen = list(dict.fromkeys(names or ()))
    _check(what, chosen, watch=watch, wait=wait)
    with connected(service) as client:
        if what == "drain":
            _drain(client, chosen, wait=wait, interval=interval, as_json=as_json)
        elif what == "undrain":
            for name in chosen:
                client.undrain_worker(name)
                typer.echo(f"leasekit workers: {output.plain(repr(name))} does not drain", err=True)
        elif not watch:
            print_workers(client.workers(), as_json=as_json)
        elif as_json or not output.on_terminal():
            before: list[WorkerInfo] = []
            for now in looks(client.workers, every=interval):
                print_workers([worker for worker in now if worker not in before], as_json=as_json)
                before = now
        else:
            with output.live() as view:
                for now in looks(client.workers, every=interval):
                    view.update(workers_table(now), refresh=True)


def _check(what: str, names: Sequence[str], *, watch: bool, wait: bool) -> None:
    """Raise for an action that does not exist, or that has not what it needs."""
    if what not in _ACTIONS:
        raise typer.BadParameter(f"{what!r} is no action: use list, drain or undrain", param_hint="ACTION")
    if (what == "list") is bool(names):
        usage = "list takes no names" if names else f"write: leasekit workers {what} NAME..."
        raise typer.BadParameter(usage, param_hint="NAME")
    if watch and what != "list":
        raise typer.BadParameter("it goes with list", param_hint="--watch")
    if wait and what != "drain":
        raise typer.BadParameter("it goes with drain", param_hint="--wait")


def _drain(client: Client, names: Sequence[str], *, wait: bool, interval: float, as_json: bool) -> None:
    for name in names:
        worker = client.drain_worker(name)
        if as_json:
            output.print_json(worker)
        holds = f"it holds {worker.running} task{'' if worker.running == 1 else 's'}"
        typer.echo(f"leasekit workers: {output.plain(repr(name))} drains: {holds}", err=True)
    for found in looks(client.workers, every=interval) if wait else ():
        if not any(worker.running for worker in found if worker.name in names):
            return


def print_workers(found: list[WorkerInfo], *, as_json: bool) -> None:
    """Print the workers in the format that was asked for, or that suits stdout."""
    if not as_json and output.on_terminal():
        output.console().print(workers_table(found) if found else "no workers")
        return
    for worker in found:
        if as_json:
            output.print_json(worker)
        else:
            seen = output.moment(worker.last_seen)
            overdue = "overdue" if is_overdue(worker) else ""
            draining = "draining" if worker.draining_since else ""
            output.print_line([worker.name, worker.running, seen, overdue, draining])


def workers_table(found: list[WorkerInfo]) -> "Table":
    shown = output.table("worker", "holds", "waiting", "window", "last seen")
    for worker in found:
        when = output.ago(worker.last_seen) if worker.last_seen else "not since the service started"
        late = is_overdue(worker)
        seen = output.styled(f"{when}, overdue" if late else when, "red" if late else "")
        window = ["" if number is None else str(number) for number in (worker.waiting, worker.window)]
        name = output.styled(worker.name)
        if worker.draining_since:
            name += output.styled(", draining", "yellow")
        shown.add_row(name, str(worker.running), *window, seen)
    return shown


def is_overdue(worker: WorkerInfo) -> bool:
    """Whether the worker holds leases, and has not called for longer than a cycle, in which it renews each of them."""
    if not worker.running or worker.last_seen is None:
        return False
    heartbeats = Heartbeats() if worker.ttl is None else Heartbeats().for_ttl(max(worker.ttl, _SHORTEST))
    silent = (datetime.now(UTC) - worker.last_seen).total_seconds()
    return silent > heartbeats.cycle + heartbeats.call_timeout


def listed(client: Client) -> list[WorkerInfo] | None:
    """Return the workers; None if the backend cannot list them."""
    try:
        return client.workers()
    except BackendError:
        raise
    except LeasekitError:
        return None


def unhandled(client: Client, kind: str, requires: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a sentence if no worker that handles the kind, with the labels, is known; empty: there may be one."""
    known = listed(client)
    if known is None or any(_may_run(worker, kind, requires) for worker in known):
        return ""
    return f"{no_worker(kind, requires)}: start one ('leasekit work MODULE:WORKER', or your loop)"


def no_worker(kind: str, requires: Mapping[str, str]) -> str:
    """Return a clause that says that no worker for such tasks is known."""
    labels = " and ".join(f"{name}={value}" for name, value in requires.items())
    with_these = f" with {output.plain(labels)}" if labels else ""
    return f"no worker{with_these} that handles {output.plain(repr(kind))} is known"


def _may_run(worker: WorkerInfo, kind: str, requires: Mapping[str, str]) -> bool:
    if worker.draining_since is not None:
        return False
    return (worker.kinds is None or kind in worker.kinds) and requires.items() <= worker.labels.items()
