"""Refusals: what a worker cannot run under leases, so that it does not start and says why, what and what to do."""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

from typing import Any, NoReturn, cast

from billiard import get_start_method  # pyright: ignore[reportAttributeAccessIssue]  # it is made at run time
from celery import Celery, Task
from celery.concurrency import get_implementation
from celery.concurrency.prefork import TaskPool

from leasekit import Client, ConfigError
from leasekit_celery.leased import LeasedTask

_POOLS = ("prefork", "threads", "solo")


def refuse(why: object) -> NoReturn:
    """End the worker that starts: Celery logs any other exception and goes on."""
    raise SystemExit(f"leasekit: {why}") from None


def is_prefork(worker: Any) -> bool:
    """Return whether the tasks of a worker run in pool processes."""
    return issubclass(cast("type", get_implementation(worker.pool_cls)), TaskPool)


def refuse_task_class(app: Celery) -> NoReturn:
    """Refuse an app whose task class was replaced since `install`: its tasks would have no leases."""
    refuse(
        f"app {app.main!r} was given another task class after leasekit_celery.install(), so its tasks have no leases: "
        "set app.task_cls, or app.Task, before install()"
    )


def check_pool(worker: Any, leases: Client) -> None:
    """Refuse pools in which leases do not work, and leases in memory that pool processes do not share."""
    try:
        leases.check_process()
    except ConfigError as error:
        refuse(error)
    pool = get_implementation(worker.pool_cls)
    if pool not in map(get_implementation, _POOLS):
        refuse(f"{pool.__module__}.{pool.__qualname__} is not a pool that leases work in: use -P {', '.join(_POOLS)}")
    if not is_prefork(worker):
        return
    if (leases.url or "").startswith("memory:"):
        refuse(
            "each process of a prefork pool has leases of its own with memory://, and tasks would overlap: "
            "use redis://, http:// or sqlite://, or -P threads"
        )
    for method in (getattr(worker, "pool_start_method", "fork"), get_start_method()):
        if method != "fork":
            refuse(
                f"the pool's start method {method!r} shares no memory with its processes: set worker_pool_start_method "
                "to 'fork' (on macOS call billiard.set_start_method('fork', force=True), too), or use -P threads"
            )


def check_tasks(app: Celery) -> None:
    """Refuse leased tasks that Celery does not run one message at a time, in the way that leases know."""
    for name, task in sorted(app.tasks.items()):
        if isinstance(task, LeasedTask) and task.leased and type(task).Strategy != Task.Strategy:
            refuse(
                f"the class of {name} has a Strategy of its own, as celery-batches has, so its messages do not run one "
                "by one: declare that task with leased=False"
            )
