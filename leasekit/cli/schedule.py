"""`leasekit schedule`: schedule one task, and wait for it if asked to."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import typer

from leasekit.cli import options, output
from leasekit.cli.errors import fail, spoken
from leasekit.cli.service import connected, looks, missing_file
from leasekit.cli.status import last_error
from leasekit.cli.workers import unhandled
from leasekit.client import Client
from leasekit.errors import ConfigError, LeasekitError
from leasekit.task import FixedDelays, Scheduled, Status, TaskInfo

EXAMPLES = """\b
Prints the task's id; with --wait its result as JSON, and the id on stderr.
With --json, the whole answer. Exit code 1 if the task was refused, or, with
--wait, did not end as a success.

\b
Examples:
  leasekit schedule thumbnail '{"pages": 3}'
  leasekit schedule report --at 2026-12-24T18:00:00Z --dedupe-key december
  leasekit schedule index --dedupe-key doc-7 --in 30 --debounce 300
  jq .order order.json | leasekit schedule invoice - --wait --timeout 600
"""

_NO_LIMIT = 0  # attempts


def _attempts(text: str) -> int:
    if text == "none":
        return _NO_LIMIT
    with suppress(ValueError):
        if 1 <= (attempts := int(text)) <= 1_000_000:
            return attempts
    raise typer.BadParameter(f"{text!r} is not a number of attempts: write 1 to 1000000, or none for no limit")


Kind = Annotated[str, typer.Argument(metavar="KIND", help="Kind of the task.", show_default=False)]
Payload = Annotated[str, typer.Argument(metavar="PAYLOAD", help="JSON for the handler; - reads it from stdin.")]
TaskId = Annotated[str | None, typer.Option("--id", help="Your own id: the same id is scheduled once.")]
Priority = Annotated[int | None, typer.Option(min=0, max=4, help="0 is the most urgent. Default: 2.")]
At = Annotated[
    datetime | None, typer.Option(parser=options.instant, metavar="TIME", help="Not before this time (RFC 3339).")
]
Delay = Annotated[
    float | None, typer.Option("--in", min=0, max=3650 * 86400, help="Not before so many seconds have passed.")
]
After = Annotated[
    list[str] | None,
    typer.Option(metavar="ID", help="Not before the task with this id has succeeded; may be given several times."),
]
DedupeKey = Annotated[str | None, typer.Option(help="One task for each kind and key.")]
DedupeScope = Annotated[
    Literal["kept", "live"], typer.Option(help="How long the key counts: until that task is deleted, or has ended.")
]
Debounce = Annotated[
    float | None,
    typer.Option(min=0, help="Replace what waits under the dedupe key; due so many seconds after the first at most."),
]
Key = Annotated[str | None, typer.Option(help="Whose task it is: claims take one task of each key in turn.")]
Collection = Annotated[str | None, typer.Option(help="A name under which the task can be listed.")]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="A word by which the task can be found; may be given several times."),
]
Requires = Annotated[
    list[str] | None,
    typer.Option("--requires", metavar="NAME=VALUE", help="Only for workers with this label; several: with all."),
]
Prefers = Annotated[
    list[str] | None,
    typer.Option("--prefers", metavar="NAME=VALUE", help="Sooner for workers with this label; several: with all."),
]
PreferFor = Annotated[
    float | None,
    typer.Option(min=0.1, help="Seconds for which it is kept for workers with the labels of --prefers. Default: 10."),
]
MaxAttempts = Annotated[
    int | None, typer.Option(parser=_attempts, metavar="N", help="Attempts that may fail; none: no limit. Default: 25.")
]
StartDeadline = Annotated[
    float | None,
    typer.Option(parser=options.age, metavar="TIME", help="Drop it if it has not begun so long after its due time."),
]
RetryWait = Annotated[
    list[float] | None,
    typer.Option(min=0, help="Seconds before the next attempt; given again for later ones, the last for all others."),
]
MaxCrashes = Annotated[int | None, typer.Option(min=0, help="Runs whose worker may vanish. Default: 5.")]
MaxRuntime = Annotated[float | None, typer.Option(min=2, help="Seconds that a run may take.")]
ClaimTimeout = Annotated[
    float | None, typer.Option(min=2, help="Ttl that a claim grants. Default: --heartbeat-timeout.")
]
HeartbeatTimeout = Annotated[float | None, typer.Option(min=2, help="Ttl that a heartbeat grants. Default: 300.")]
Expiry = Annotated[
    Literal["crash", "retry"] | None,
    typer.Option(help="How a run that times out counts: as a crash (default), or as an attempt."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it has ended, and print its result.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most; the task goes on.")]
RetryFor = Annotated[float, typer.Option(min=0, help="Seconds to go on trying while the service is away.")]


class TaskOptions(dict[str, Any]):
    """The options of the task, as `Client.schedule` takes them: the command has the options that say them."""

    @staticmethod
    def named_by(
        *,
        task_id: TaskId = None,
        priority: Priority = None,
        at: At = None,
        delay: Delay = None,
        start_deadline: StartDeadline = None,
        after: After = None,
        dedupe_key: DedupeKey = None,
        dedupe_scope: DedupeScope = "kept",
        debounce: Debounce = None,
        collection: Collection = None,
        tags: Tags = None,
        requires: Requires = None,
        prefers: Prefers = None,
        prefer_for: PreferFor = None,
        key: Key = None,
        max_attempts: MaxAttempts = None,
        retry_wait: RetryWait = None,
        max_crashes: MaxCrashes = None,
        max_runtime: MaxRuntime = None,
        claim_timeout: ClaimTimeout = None,
        heartbeat_timeout: HeartbeatTimeout = None,
        expiry: Expiry = None,
    ) -> "TaskOptions":
        return TaskOptions(_for_client({name: value for name, value in locals().items() if value not in (None, [])}))


def _for_client(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are given, by the names and with the values of `Client.schedule`."""
    if "at" in given and "delay" in given:
        raise typer.BadParameter("--at and --in both say when: give one of them", param_hint="--in")
    if given["dedupe_scope"] == "kept":
        del given["dedupe_scope"]
    if "task_id" in given:
        given["id"] = given.pop("task_id")
    for name in {"requires", "prefers"} & given.keys():
        given[name] = options.labels(given[name])
    if "retry_wait" in given:
        given["retry"] = FixedDelays(waits=given.pop("retry_wait"))
    if given.get("max_attempts") == _NO_LIMIT:
        given["max_attempts"] = None
    return given


@spoken
def schedule(
    kind: Kind,
    payload: Payload = "null",
    *,
    service: options.Service,
    task: TaskOptions,
    wait: Wait = False,
    timeout: Timeout = None,
    retry_for: RetryFor = 0,
    as_json: options.Json = False,
) -> None:
    """Schedule a task and print its id.

    When the command returns, the task is durable. Scheduling the same id or dedupe key again makes no second task.
    """
    if timeout is not None and not wait:
        raise typer.BadParameter("it limits --wait, which is not given", param_hint="--timeout")
    value = json_value(payload)
    with connected(service, retry_for=retry_for, may_create=True) as client:
        created = missing_file(client.url)
        scheduled = _scheduled(client, kind, value, task)
        if created:
            typer.echo(f"leasekit schedule: created a new store: {created}", err=True)
        _print_scheduled(scheduled, wait=wait, as_json=as_json)
        if wait:
            _print_end(_ended(client, kind, scheduled, within=timeout), as_json=as_json)


def _scheduled(client: Client, kind: str, payload: Any, task: TaskOptions) -> Scheduled:
    """Schedule a task. Raises `BadParameter` if its options contradict one another."""
    try:
        return client.schedule(kind, payload, **task)
    except ConfigError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _ended(client: Client, kind: str, scheduled: Scheduled, *, within: float | None) -> TaskInfo:
    """Return the task once it has ended; say so if no worker has its kind, or if the user stops waiting."""
    if not scheduled.status.ended and (note := unhandled(client, kind)):
        typer.echo(f"leasekit schedule: {note}", err=True)
    try:
        return _wait_until_ended(client, scheduled.id, within=within)
    except KeyboardInterrupt:
        task = scheduled.id
        look = f"leasekit status {task} shows it, leasekit cancel {task} ends it"
        typer.echo(f"leasekit schedule: the task goes on: {look}", err=True)
        raise


def json_value(payload: str) -> Any:
    """Decode the argument PAYLOAD, or stdin if the argument is `-`."""
    # Bytes: JSON is UTF-8, whatever the locale says.
    text: str | bytes = typer.get_binary_stream("stdin").read() if payload == "-" else payload
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        hint = "; a text is written with quotes, '\"text\"'" if payload != "-" else ""
        raise typer.BadParameter(f"the payload is not JSON: {error}{hint}", param_hint="PAYLOAD") from error


def _print_scheduled(scheduled: Scheduled, *, wait: bool, as_json: bool) -> None:
    if scheduled.conflict:
        fail("schedule", f"{scheduled.id} is the id of another task: choose another id, or leave it out")
    if scheduled.replaced:
        typer.echo(f"the task that waits is replaced: {scheduled.status}", err=True)
    elif not scheduled.created:
        typer.echo(f"the task exists already: {scheduled.status}", err=True)
    if wait:
        typer.echo(scheduled.id, err=True)
    elif as_json:
        output.print_json(scheduled)
    else:
        output.print_line([scheduled.id])


def _wait_until_ended(client: Client, task_id: str, *, within: float | None) -> TaskInfo:
    """Return the task once it has ended; until then show its state on the terminal. Raises after `within` seconds."""
    until = None if within is None else time.monotonic() + within

    def look() -> TaskInfo:
        if (task := client.get(task_id)) is None:
            raise LeasekitError(f"task {task_id!r} no longer exists: it was not kept after its end")
        return task

    with ExitStack() as stack:
        say = _line(stack) if sys.stderr.isatty() else None
        for task in looks(look, every=0.2):
            if task.status.ended:
                return task
            if until is not None and time.monotonic() >= until:
                break
            if say is not None:
                say(f"{task.kind} {task.status}, attempt {task.attempt} {output.compact(task.progress)}")
    raise LeasekitError(f"{task_id} has not ended within {within:g} s, and goes on: leasekit status {task_id} --watch")


def _line(stack: ExitStack) -> Callable[[str], None]:
    from rich.console import Console

    spinner = stack.enter_context(Console(stderr=True, highlight=False).status("scheduled"))

    def say(text: str) -> None:
        spinner.update(output.styled(text))

    return say


def _print_end(task: TaskInfo, *, as_json: bool) -> None:
    if as_json:
        output.print_json(task)
    elif task.status is Status.SUCCESS:
        output.print_json(task.result)
    if task.status is not Status.SUCCESS:
        why = [output.plain(task.reason or ""), output.error_text(last_error(task))]
        fail("schedule", ": ".join([f"{task.id} ended as {task.status}", *filter(None, why)]))
