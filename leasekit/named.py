"""Named leases: one holder of a name at a time, for leader election, singletons and locks.

A name is a task of a kind of its own that nobody ever settles: whoever leaves the block gives it back, and whoever
waits for it is granted it next. So it needs nothing of a service that tasks do not need, and whatever keeps their
leases keeps it: trust, beats, the fence, the watchdog, the checkpoint that one holder leaves to the next.
"""

import math
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack
from urllib.parse import quote

from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit.errors import LeasekitError, NotGranted
from leasekit.lease import Lease
from leasekit.task import NewTask, Outcome, Scheduled, Task, TaskOptions

if TYPE_CHECKING:
    from leasekit.client import Client

__all__ = ["Named", "NamedLease"]

_PREFIX = "named:"
_LONGEST = 128 - len(_PREFIX)  # what a kind may have
_MANY = 1_000_000  # deaths of holders; a name survives all of them
_POLL = 20.0  # seconds of one long poll


class Named:
    """A name to be leased; `Client.named` makes it. `lease(…)` of it may be asked for as often as wanted."""

    def __init__(self, client: "Client", name: str, *, wait: float | None, ttl: float) -> None:
        said = quote(name, safe=" !#$&'()*+,:;=?@[]")
        if not name or len(said) > _LONGEST:
            raise ValueError(
                f"{name[:200]!r} cannot be the name of a lease: give 1 to {_LONGEST} characters "
                "(one that is not ASCII, a slash or a percent sign counts as three or more)"
            )
        if wait is not None and not 0 <= wait < math.inf:
            raise ValueError(f"wait={wait!r} is no time to wait: give seconds, 0 to try once, or None to wait for ever")
        self.name = name
        self.client = client
        self._wait = wait
        self._task = NewTask(
            kind=_PREFIX + said, id=_PREFIX + said, max_crashes=_MANY, claim_timeout=ttl, heartbeat_timeout=ttl
        )

    def __repr__(self) -> str:
        return f"Named({self.name!r})"

    def lease(self, idle_timeout: float | None) -> "NamedLease":
        """What `lease(…)` gives."""
        return NamedLease(self, idle_timeout=idle_timeout)

    @property
    def task(self) -> Task:
        """What stands for the task that is granted, until it is."""
        return Task(id=self._task.kind, kind=self._task.kind, token="", ttl=self._task.heartbeat_timeout)

    def acquire(self) -> Task:
        """Wait until it is ours. Raises `NotGranted`."""
        self._there(self.client.schedule_all([self._task])[0])
        connection = self.client.connection()
        return connection.run(self._granted(connection)).task.bind(self.client)

    async def aacquire(self) -> Task:
        """`acquire`, from an event loop."""
        self._there((await self.client.aschedule_all([self._task]))[0])
        connection = self.client.connection()
        return (await connection.arun(self._granted(connection))).task.bind(self.client)

    def _there(self, scheduled: Scheduled) -> None:
        if scheduled.status.ended:
            raise NotGranted(f"the lease of {self.name!r} is granted to nobody any more: it is {scheduled.status}")

    async def _granted(self, connection: Connection) -> Holding:
        """In the driver's loop."""
        clock, keeper = connection.clock, connection.keeper
        until = math.inf if self._wait is None else clock.now() + self._wait
        while True:
            left = max(0.0, until - clock.now())
            holdings = await keeper.claim([self._task.kind], limit=1, wait=min(_POLL, left), started=True)
            if holdings:
                return holdings[0]
            if clock.now() >= until:
                raise NotGranted(f"the lease of {self.name!r} is held by another; waited for {self._wait:g} s")


class NamedLease(Lease):
    """The right to a name, in this process, for as long as it lasts. It has no result: it is given back."""

    def __init__(self, named: Named, *, idle_timeout: float | None = None) -> None:
        super().__init__(named.task, idle_timeout=idle_timeout)
        self._named = named

    def __enter__(self) -> Self:
        if self._holding is None:
            self._acquired(self._named.acquire())
        return super().__enter__()

    async def __aenter__(self) -> Self:
        if self._holding is None:
            self._acquired(await self._named.aacquire())
        return await super().__aenter__()

    def _acquired(self, task: Task) -> None:
        self.task = task
        self._reserved = self._named.client.reserve(task)

    def complete(self, result: Any = None) -> NoReturn:
        """Not of a name: there is nothing to be completed."""
        raise self._no_task()

    def fail(self, error: Any, *, retry: bool | float = True) -> NoReturn:
        """Not of a name: there is nothing to fail."""
        raise self._no_task()

    def then(self, kind: str, payload: Any = None, **options: Unpack[TaskOptions]) -> NoReturn:
        """Not of a name: nothing is ever settled that it could follow."""
        raise self._no_task()

    def _no_task(self) -> LeasekitError:
        return LeasekitError(
            f"{self._named.name!r} is a name, not a task: leaving the block gives it back, that is all"
        )

    def _outcome_of(self, error: BaseException | None, interrupted: Outcome) -> Outcome:
        return "release"
