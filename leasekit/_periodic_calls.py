"""The calls of operators on `Client` for periodic tasks."""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from leasekit._driver.reporting import encoding
from leasekit._driver.retrying import repeat_until_answered
from leasekit._session import Session
from leasekit.backend import PeriodicDirectory
from leasekit.errors import LeasekitError
from leasekit.periodic import PeriodicInfo, PeriodicTask
from leasekit.task import Scheduled

T = TypeVar("T")


class PeriodicCalls:
    """The part of `Operating` for periodic tasks."""

    _session: Session
    _retry_for: float | None

    def list_periodic(self) -> list[PeriodicInfo]:
        """List the periodic tasks, sorted by name, each with its next firing. Raises `LeasekitError` without any."""
        return self._ask(self._periodic_directory.list_periodic)

    async def alist_periodic(self) -> list[PeriodicInfo]:
        """Do what `list_periodic` does, from an event loop."""
        return await self._aask(self._periodic_directory.list_periodic)

    def get_periodic(self, name: str) -> PeriodicInfo | None:
        """Return a periodic task, with its next and its latest firings; None: there is none of this name."""
        _check(name)
        return self._ask(partial(self._periodic_directory.get_periodic, name))

    async def aget_periodic(self, name: str) -> PeriodicInfo | None:
        """Do what `get_periodic` does, from an event loop."""
        _check(name)
        return await self._aask(partial(self._periodic_directory.get_periodic, name))

    def set_periodic(self, name: str, task: PeriodicTask) -> PeriodicInfo:
        """Add a periodic task, or replace when it fires and what is scheduled. A pause stays.

        Raises `Refused` if it would never fire, or is out of bounds.
        """
        _check(name, task)
        sent = encoding.periodic(name, task, self._session.coding)
        return self._ask(partial(self._periodic_directory.set_periodic, name, sent))

    async def aset_periodic(self, name: str, task: PeriodicTask) -> PeriodicInfo:
        """Do what `set_periodic` does, from an event loop."""
        _check(name, task)
        sent = encoding.periodic(name, task, self._session.coding)
        return await self._aask(partial(self._periodic_directory.set_periodic, name, sent))

    def pause_periodic(self, name: str) -> PeriodicInfo:
        """Pause a periodic task: it fires only on request, until it is resumed. Raises `Refused` if there is none."""
        _check(name)
        return self._ask(partial(self._periodic_directory.pause_periodic, name))

    async def apause_periodic(self, name: str) -> PeriodicInfo:
        """Do what `pause_periodic` does, from an event loop."""
        _check(name)
        return await self._aask(partial(self._periodic_directory.pause_periodic, name))

    def resume_periodic(self, name: str) -> PeriodicInfo:
        """Resume a periodic task; what fell into the pause is not made up for. Raises `Refused` if there is none."""
        _check(name)
        return self._ask(partial(self._periodic_directory.pause_periodic, name, is_paused=False))

    async def aresume_periodic(self, name: str) -> PeriodicInfo:
        """Do what `resume_periodic` does, from an event loop."""
        _check(name)
        return await self._aask(partial(self._periodic_directory.pause_periodic, name, is_paused=False))

    def trigger_periodic(self, name: str, *, at: datetime | None = None) -> Scheduled:
        """Let a periodic task fire once, whatever its overlap policy says, and also if it is paused.

        The instant `at` is in the id of the task: a repeat makes no second task. None: now, by the local clock.
        Raises `Refused` if there is no such periodic task.
        """
        _check(name)
        return self._ask(partial(self._periodic_directory.trigger_periodic, name, at=at or datetime.now(UTC)))

    async def atrigger_periodic(self, name: str, *, at: datetime | None = None) -> Scheduled:
        """Do what `trigger_periodic` does, from an event loop."""
        _check(name)
        return await self._aask(partial(self._periodic_directory.trigger_periodic, name, at=at or datetime.now(UTC)))

    def delete_periodic(self, name: str) -> None:
        """Remove a periodic task, if there is one; the tasks that it has scheduled stay."""
        _check(name)
        self._ask(partial(self._periodic_directory.delete_periodic, name))

    async def adelete_periodic(self, name: str) -> None:
        """Do what `delete_periodic` does, from an event loop."""
        _check(name)
        await self._aask(partial(self._periodic_directory.delete_periodic, name))

    @property
    def _periodic_directory(self) -> PeriodicDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, PeriodicDirectory):
            raise LeasekitError(f"{type(backend).__name__} has no periodic tasks: schedule each task when it is due")
        return backend

    def _ask(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        session = self._session
        return session.coding.shown(session.connection().run(repeat_until_answered(call, self._retry_for)))

    async def _aask(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        session = self._session
        return session.coding.shown(await session.connection().arun(repeat_until_answered(call, self._retry_for)))


def _check(name: object, *tasks: object) -> None:
    """Raise TypeError if this is no name, or these are no periodic tasks."""
    if not isinstance(name, str):
        raise TypeError(f"names of periodic tasks are strings, got {type(name).__name__}: give a string")
    for task in tasks:
        if not isinstance(task, PeriodicTask):
            raise TypeError(f"the task must be leasekit.periodic.PeriodicTask(…), got {type(task).__name__}")
