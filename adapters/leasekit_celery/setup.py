"""Setup: an app's tasks get leases (`install`), and a worker that starts prepares them."""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import logging
import math
from typing import Any, Literal

from celery import Celery, Task, signals

import leasekit
from leasekit import Client, ConfigError, LeasekitError, Refused, UnknownScheme, Untrusted
from leasekit.registry import open_backend
from leasekit_celery import children, refusals
from leasekit_celery.children import end_process
from leasekit_celery.copies import visibility_timeout
from leasekit_celery.leased import LeasedTask, settle
from leasekit_celery.outage import Outage

logger = logging.getLogger("leasekit.celery")

_INSTALLED = "leasekit_installed"  # attribute of an app
_PATIENCE = 5.0  # seconds for which calls are repeated while the service of the leases is away


def install(
    app: Celery, url: str, *, ttl: float = 300.0, on_lost: Literal["kill", "continue"] = "kill", leased: bool = True
) -> None:
    """Run the tasks of this app under leases of the service at `url`, which must keep names (SQS, for one, does not).

    Call this right after the app was made, before its tasks are declared. The app's `task_cls`, or its `Task`, is kept.
    A task with a `base` of its own has leases if that base derives from `LeasedTask`; a worker that starts warns of the
    others.

    Raises `ConfigError` if tasks are in use already, or the service cannot keep names, `UnknownScheme`,
    `MissingDependency`.

    Args:
        app: The app.
        url: The service of the leases.
        ttl: Seconds without a heartbeat after which a run counts as dead. A longer ttl survives a longer outage of the
            service (300: 139 s, 60: 24 s); after the death of a whole machine, its tasks wait for so long.
        on_lost: What happens to code that goes on after its lease is lost. "kill": its pool process is ended before
            another run may begin, and the message is delivered again (`-P prefork` only). "continue": nothing.
        leased: Whether tasks have leases that do not say so themselves: `@app.task(leased=…)`.
    """
    if app.finalized:
        raise ConfigError(
            f"app {app.main!r} already has tasks: call leasekit_celery.install() before tasks are declared"
        )
    if on_lost not in ("kill", "continue"):
        raise ConfigError(f"on_lost={on_lost!r} is not known: use 'kill' or 'continue'")
    theirs: Any = app.Task  # of its `task_cls`, or set by hand
    bases: tuple[Any, ...] = (theirs,) if issubclass(theirs, LeasedTask) else (LeasedTask, theirs)
    try:
        client = _client(url, ttl)
        client.require_names()
    except (ConfigError, UnknownScheme) as error:
        # All before an @ may be a password, and so may options.
        shown = f"{url.partition('://')[0]}://***" if "@" in url else url.partition("?")[0]
        example = "redis://localhost:6379/1?retention=1d"
        raise type(error)(f"{error} (install was given {shown!r}; a Redis is {example})") from error
    options = {"leases": client, "outage": Outage(), "kills_lost": on_lost == "kill", "leased": leased}
    app.task_cls = type("Leased", bases, {"abstract": True, **options})
    vars(app).pop("Task", None)  # cached from the former class
    setattr(app, _INSTALLED, True)


def _client(url: str, ttl: float, **options: Any) -> Client:
    # Shorter patience than a client's own: a message whose lease cannot be obtained is put off, and its slot is free.
    return Client(url, heartbeats=leasekit.Heartbeats().for_ttl(ttl), retry_for=_PATIENCE, **options)


def _prepare_worker(sender: Any, **_: Any) -> None:
    """Check the process of a worker that starts, and prepare the leases of its pool processes."""
    task_class = sender.app.Task
    if not hasattr(task_class, "leases"):
        if hasattr(sender.app, _INSTALLED):
            refusals.refuse_task_class(sender.app)
        return
    signals.task_postrun.disconnect(settle)  # the last one again: handlers of the app's modules are before it
    signals.task_postrun.connect(settle)
    leases = task_class.leases
    refusals.check_pool(sender, leases)
    if leases.url is not None and refusals.is_prefork(sender):
        notes = children.share_notes()
        options = {"watchdog": "auto", "last_resort": end_process} if task_class.kills_lost else {}
        task_class.leases = _client(leases.url, leases.heartbeats.ttl, hooks=[notes.hear], **options)


def _look_at_service(instance: Any, **_: Any) -> None:
    """Log where the leases are. A worker also starts while their service is away, but not if that refuses it."""
    if not hasattr(instance.app.Task, "leases"):
        return
    refusals.check_tasks(instance.app)
    without = _name_tasks_without_leases(instance.app)
    leases = instance.app.Task.leases
    _compare_retention(instance.app, leases)
    where = f"{leases!r}, ttl {leases.heartbeats.ttl:g} s"
    try:
        # A client of its own: it leaves no thread in a process that will fork.
        with leasekit.connect(leases.url, retry_for=1) as client:
            client.get("leasekit")  # any id does
    except (Refused, Untrusted) as error:
        refusals.refuse(error)
    except LeasekitError as error:
        instance.app.Task.outage.begins(before_tasks=True)
        logger.warning("no task runs before the service of the leases answers (%s): %s", where, error)
    else:
        but = f", but not {', '.join(without)}" if without else ""
        logger.info("tasks run under leases (%s)%s", where, but)


def _compare_retention(app: Celery, leases: Client) -> None:
    """Log that ended tasks may be forgotten before the last copies of their messages have come."""
    backend = open_backend(leases.url, worker=leases.worker) if leases.url else None  # it opens no connection
    retention, visibility = getattr(backend, "retention", math.inf), visibility_timeout(app)
    if retention <= visibility:
        logger.warning(
            "an ended task is remembered for %g s, and the broker may deliver it again after %g s (visibility_timeout)"
            ": such a copy runs: choose retention=… in the URL of the leases longer than that, plus your longest ETA",
            retention,
            visibility,
        )


def _name_tasks_without_leases(app: Celery) -> list[str]:
    """Log, and return, the tasks that should have leases, and have none because of their class."""
    without: list[str] = []
    for name, task in sorted(app.tasks.items()):
        is_left_out = name.startswith("celery.") or not getattr(task, "leased", app.Task.leased)
        if not (is_left_out or isinstance(task, LeasedTask)):
            own, base = type(task).__mro__[:2]  # the decorator makes a class for each task
            logger.warning(
                "not under leases: %s (its class %s does not derive from leasekit_celery.LeasedTask)",
                name,
                (own if base is Task else base).__name__,
            )
            without.append(name)
    return without


signals.worker_init.connect(_prepare_worker)
signals.celeryd_after_setup.connect(_look_at_service)  # of the log; no process was forked yet
