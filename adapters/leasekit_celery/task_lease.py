"""The lease of a running task, as the task's code may use it."""

from contextvars import ContextVar
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from leasekit import Lease

__all__ = ["TaskLease", "attempt_number", "current", "current_lease", "lease_name", "takes_lease"]

_LONGEST = 100  # characters of an id that fit into the name of a lease

current: ContextVar["TaskLease | None"] = ContextVar("leasekit_celery_lease", default=None)


def current_lease() -> "TaskLease | None":
    """Return the lease of the Celery task that this code runs in; None if there is none.

    A task that is called like a function, or eagerly, runs in its caller: it has the caller's lease, or none.

    Also in the coroutines that the task runs; in a thread that it starts, where the context was copied.
    """
    return current.get()


class TaskLease:
    """The lease of a running Celery task. Celery decides how the run ends, and leasekit settles the lease with that.

    The checkpoint at the service keeps two things, by their names:

        {"ended": {"shop.charge": [0, 2]}, "progress": …}

    `ended` has the numbers of the last run that has ended and sent another one in its own place, by the task's name.
    """

    def __init__(self, held: Lease, saved: Any = None) -> None:
        self._held = held
        self._saved: dict[str, Any] = saved or held.checkpoint or {}
        self._checkpoint = self._saved.get("progress")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._held!r}>"

    def check(self) -> None:
        """Return at once while all is well. Call it before each side effect that must not happen twice.

        Raises `LeaseLost` (another run may have begun by now; Celery delivers the message again) and `Cancelled`.
        """
        self._held.check()

    @property
    def lost(self) -> bool:
        """True once the lease is lost."""
        return self._held.lost

    @property
    def fence(self) -> int:
        """A number that grows with every run of the task: systems downstream refuse writes with a smaller one."""
        return self._held.fence

    def remaining(self) -> float:
        """Return the seconds until the lease is lost if no further heartbeat gets through; never below zero."""
        return self._held.remaining()

    @property
    def checkpoint(self) -> Any:
        """The value that an earlier run of this task reported with `progress`; None if there is none."""
        return self._checkpoint

    def progress(self, value: Any) -> None:
        """Record how far the code is: the next run's `checkpoint`. Raises what `check` and `Lease.progress` raise."""
        saved = {**self._saved, "progress": value}
        self._held.progress(saved)
        self._saved = saved

    def last_ended(self, name: str) -> list[int]:
        """Return the number of the last run of this task that has ended and has a successor."""
        ended: list[int] = self._saved.get("ended", {}).get(name, [])
        return ended

    def note_end(self, name: str, number: list[int]) -> None:
        """Record that the run of this number has ended, and that another follows it."""
        self._saved = {**self._saved, "ended": {**self._saved.get("ended", {}), name: number}}
        self._held.progress(self._saved)

    def forget_ends(self) -> None:
        """Remove what `note_end` has recorded."""
        if "ended" in self._saved:
            self._saved = {name: value for name, value in self._saved.items() if name != "ended"}
            self._held.progress(self._saved)


def lease_name(task_id: object) -> str:
    """Return the name of a task's lease: an id of more than a hundred plain characters is replaced by its digest.

    An id may be a `UUID`, which Kombu's JSON keeps.
    """
    task_id = str(task_id)
    is_short = len(quote(task_id, safe="")) <= _LONGEST
    return f"celery:{task_id if is_short else sha256(task_id.encode()).hexdigest()}"


def attempt_number(request: Any) -> list[int]:
    """Return the number of the attempt that a message asks for; the numbers of one task grow."""
    return [request.replaced_task_nesting or 0, request.retries or 0]


def takes_lease(task: Any, delivery_info: Any) -> bool:
    """Return whether a worker runs this message of a `LeasedTask` under a lease.

    It does not if the task's app has not called `install` (a library may define leased tasks, and be used without), or
    if the message came by a fanout exchange: then several workers have messages of one id, and each runs its own.
    """
    if not task.leased or not hasattr(task.app.Task, "leases"):
        return False
    name: Any = delivery_info and delivery_info.get("exchange")
    queues: list[Any] = list(task.app.amqp.queues.values()) if name else []
    return not any(queue.exchange.name == name and queue.exchange.type == "fanout" for queue in queues)
