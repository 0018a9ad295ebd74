"""Leases of names: one holder at a time (`Client.named`), and one run to the end (`Client.once`).

A name is a task of a kind of its own. That of a named lease nobody ever settles: whoever leaves the block gives it
back, and whoever waits for it is granted it next. That of a once is settled by the first block that ends well. So
neither needs anything of a service that tasks do not need, and whatever keeps their leases keeps these: trust, beats,
the fence, the watchdog, the checkpoint that one holder leaves to the next.
"""

import math
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack
from urllib.parse import quote

from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit.errors import AlreadyDone, LeasekitError, NotGranted
from leasekit.lease import Lease
from leasekit.task import NewTask, Outcome, Scheduled, Status, Task, TaskOptions

if TYPE_CHECKING:
    from leasekit.client import Client

__all__ = ["Named", "NamedLease", "Once", "OnceLease"]

_LONGEST = 128  # what an id may have
_MANY = 1_000_000  # deaths of holders; a name survives all of them
_POLL = 20.0  # seconds of one long poll


class Named:
    """A name to be leased; `Client.named` makes it. `lease(…)` of it may be asked for as often as wanted."""

    prefix = "named:"

    def __init__(self, client: "Client", name: str, *, wait: float | None, ttl: float) -> None:
        said = self.prefix + quote(name, safe=" !#$&'()*+,:;=?@[]")
        if not name or len(said) > _LONGEST:
            raise ValueError(
                f"{name[:200]!r} cannot be the name of a lease: give 1 to {_LONGEST - len(self.prefix)} characters "
                "(one that is not ASCII, a slash or a percent sign counts as three or more)"
            )
        if wait is not None and not 0 <= wait < math.inf:
            raise ValueError(f"wait={wait!r} is no time to wait: give seconds, 0 to try once, or None to wait for ever")
        self.name = name
        self.client = client
        self._wait = wait
        self._new = NewTask(kind=said, id=said, max_crashes=_MANY, claim_timeout=ttl, heartbeat_timeout=ttl)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def lease(self, idle_timeout: float | None) -> "_Acquiring":
        """What `lease(…)` gives."""
        return NamedLease(self, idle_timeout=idle_timeout)

    @property
    def task(self) -> Task:
        """What stands for the task that is granted, until it is."""
        return Task(id=self._new.kind, kind=self._new.kind, token="", ttl=self._new.heartbeat_timeout)

    def acquire(self, lease: "_Acquiring") -> None:
        """Wait until it is granted to this lease. Raises `NotGranted`, and `AlreadyDone` for a once."""
        self._check_service()
        self._look(self.client.schedule_all([self._new])[0])
        connection = self.client.connection()
        try:
            is_granted = connection.run(self._granted(connection, lease))
        except BaseException:
            lease.let_go(connection)  # it may have been granted at this very moment
            raise
        if not is_granted:
            self._look(self.client.schedule_all([self._new])[0])
            raise self._elsewhere()

    async def aacquire(self, lease: "_Acquiring") -> None:
        """`acquire`, from an event loop."""
        self._check_service()
        self._look((await self.client.aschedule_all([self._new]))[0])
        connection = self.client.connection()
        try:
            is_granted = await connection.arun(self._granted(connection, lease))
        except BaseException:
            lease.let_go(connection)
            raise
        if not is_granted:
            self._look((await self.client.aschedule_all([self._new]))[0])
            raise self._elsewhere()

    def _check_service(self) -> None:
        """Raise `LeasekitError` where the service makes several tasks of one id: each would have a holder."""
        backend = self.client.connection().backend
        if not backend.traits.unique_ids:
            what = f"{type(backend).__name__} may hold several tasks of one id, so {self.name!r} could have two holders"
            raise LeasekitError(f"{what}: keep names in another service, such as redis:// or http://")

    def _look(self, scheduled: Scheduled) -> None:
        """Whether waiting for it makes sense."""
        if scheduled.status.ended:
            why = f"the lease of {self.name!r} is granted to nobody any more: it is {scheduled.status}"
            raise NotGranted(why, ended=scheduled.status)

    def _elsewhere(self) -> NotGranted:
        return NotGranted(f"the lease of {self.name!r} is held by another; waited for {self._wait:g} s")

    async def _granted(self, connection: Connection, lease: "_Acquiring") -> bool:
        """In the driver's loop: false where it was not granted in time."""
        clock, keeper = connection.clock, connection.keeper
        until = math.inf if self._wait is None else clock.now() + self._wait
        while not lease.given_up:
            left = max(0.0, until - clock.now())
            holdings = await keeper.claim([self._new.kind], limit=1, wait=min(_POLL, left), started=True)
            if holdings:
                lease.granted(connection, holdings[0])
                return True
            if clock.now() >= until:
                return False
        return False


class Once(Named):
    """Something to be run to its end once; `Client.once` makes it."""

    prefix = "once:"

    def lease(self, idle_timeout: float | None) -> "_Acquiring":
        """What `lease(…)` gives."""
        return OnceLease(self, idle_timeout=idle_timeout)

    def _look(self, scheduled: Scheduled) -> None:
        if scheduled.status in (Status.SUCCESS, Status.FATAL_FAILURE):
            raise AlreadyDone(f"{self.name!r} was run to its end before: {scheduled.status}")
        super()._look(scheduled)


class _Acquiring(Lease):
    """A lease that is acquired where its block begins."""

    def __init__(self, named: Named, *, idle_timeout: float | None = None) -> None:
        super().__init__(named.task, idle_timeout=idle_timeout)
        self._named = named
        self.given_up = False  # nobody waits for it any more
        self._reserved: tuple[Connection, Holding] | None = None  # what was granted

    def __enter__(self) -> Self:
        if self._holding is None:
            self._named.acquire(self)
        return super().__enter__()

    async def __aenter__(self) -> Self:
        if self._holding is None:
            await self._named.aacquire(self)
        return await super().__aenter__()

    def granted(self, connection: Connection, holding: Holding) -> None:
        """It is ours, in the driver's loop: whoever waits for that may be interrupted before he knows."""
        self.task = holding.task.bind(self._named.client)
        holding.reserved = True
        self._reserved = connection, holding
        self._own(connection, holding)

    def let_go(self, connection: Connection) -> None:
        """Nobody begins it: give it back if it was granted, and wait for it no longer."""
        self.given_up = True
        connection.driver.call_soon(self._let_go)

    def _let_go(self) -> None:
        if self._reserved is not None:
            connection, holding = self._reserved
            connection.keeper.unless_begun(holding)


class NamedLease(_Acquiring):
    """The right to a name, in this process, for as long as it lasts. It has no result: it is given back."""

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


class OnceLease(_Acquiring):
    """The right to run something to its end. A block that fails gives it back: whoever delivered it tries again."""

    def _outcome_of(self, error: BaseException | None, interrupted: Outcome) -> Outcome:
        outcome = super()._outcome_of(error, interrupted)
        return "release" if outcome == "retry" else outcome
