"""Leases of names: one holder at a time (`Client.named`), and one run to the end (`Client.once`).

A name is a task of a kind of its own. The task of a named lease is never settled: leaving the block releases it, and
the next waiting process is granted it. The task of a once is settled by the first block that succeeds. So names
need nothing of a service but that an id has one task (`unique_ids`), and their leases are kept like those of all
tasks: by trust, heartbeats, the fence, the watchdog, and the checkpoint that one holder leaves to the next.
"""

import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, NoReturn, Protocol, Self, TypeVar, Unpack
from urllib.parse import quote

from leasekit._binding import bind
from leasekit._blocks import AsyncExit, Exit, end_of_block
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.retrying import call_once
from leasekit._leased_run import LeasedRun, outcome_of
from leasekit._session import Session
from leasekit.backend import Backend, NameSource, TaskSink
from leasekit.config import check_number
from leasekit.errors import AlreadyDone, BackendError, ConfigError, LeasekitError, NotGranted, NotHeld
from leasekit.lease import Lease
from leasekit.task import NewTask, Outcome, Scheduled, Status, Task, TaskOptions
from leasekit.task.words import NAME_PREFIX, NAME_PREFIXES

__all__ = ["PREFIXES", "Named", "NamedLease", "Once", "OnceLease", "kind_of", "require_names"]

PREFIXES = NAME_PREFIXES
"""What the kinds of tasks begin with that stand for a name."""

_LONGEST = 128  # the length of an id
_MANY = 1_000_000  # crashes of holders; a name must survive all of them
_LOOK = 10.0  # seconds for the answer to a look at a name


def kind_of(name: str, prefix: str = NAME_PREFIX) -> str:
    """Return the kind, and the id, of the task that stands for a name."""
    return prefix + quote(name, safe=" !#$&'()*+,:;=?@[]")


class _Service(Protocol):
    """The part of a client that a name needs."""

    def __schedule__(self, tasks: Sequence[NewTask], *, at_most: float | None) -> list[Scheduled]: ...

    async def __aschedule__(self, tasks: Sequence[NewTask], *, at_most: float | None) -> list[Scheduled]: ...

    def __patience__(self, at_most: float | None) -> tuple[float, float]: ...


def require_names(backend: Backend) -> None:
    """Raise `ConfigError` if this service cannot hold leases of names."""
    if not isinstance(backend, TaskSink):
        why = "accepts no tasks"
    elif not backend.capabilities.unique_ids:
        why = "may hold several tasks of one id, so a name could have two holders"
    else:
        return
    what = f"{type(backend).__name__} cannot hold leases of names, because it {why}"
    raise ConfigError(f"{what}: keep names in another service, such as redis:// or http://")


class _Name:
    """A name, and how a lease of it is acquired."""

    prefix = PREFIXES[0]
    """How the kinds and ids of its tasks begin."""
    poll = 20.0
    """Seconds of one long poll; the name is looked at after each."""

    def __init__(self, service: _Service, session: Session, name: str, *, wait: float | None, ttl: float) -> None:
        kind = kind_of(name, self.prefix)
        if not name or len(kind) > _LONGEST:
            raise ValueError(
                f"{name[:200]!r} cannot be the name of a lease: give 1 to {_LONGEST - len(self.prefix)} characters "
                "(one that is not ASCII, a slash or a percent sign counts as three or more)"
            )
        check_number("wait", wait, or_none=True)
        check_number("ttl", ttl, least=2, most=365 * 86400)
        self.name = name
        self._service = service
        self._session = session
        self._wait = wait
        self._ttl = ttl
        self._new = _task(kind, ttl)

    @property
    def task(self) -> Task:
        """The task that stands for the granted one, until it is granted."""
        return Task(id=self._new.kind, kind=self._new.kind, token="", ttl=self._ttl)

    def bound(self, task: Task) -> Task:
        """Return the granted task, with the session that keeps its lease."""
        return bind(task, self._session.reserve)

    def outcome_of(self, held: HeldLease, error: BaseException | None, interrupted: Outcome) -> Outcome:
        """Return the outcome of the name's task when a block ends; see `_leased_run.outcome_of`."""
        return "release"

    def acquire(self, acquisition: "_Acquisition") -> None:
        """Wait until the name is granted. Raises `NotGranted`, `LeasekitError`, and `AlreadyDone` for a once."""
        connection, until = self._begin()
        if _source(connection) is None:
            self._check_not_ended(self._service.__schedule__([self._new], at_most=self._wait)[0].status)
        try:
            is_granted = connection.run(self._claim_until_granted(connection, acquisition, until))
        except BaseException:
            acquisition.give_up(connection)  # it may have been granted at this very moment
            raise
        if not is_granted:
            with suppress(BackendError):
                self._check_not_ended(self._service.__schedule__([self._task_if_lost()], at_most=0)[0].status)
            raise self._timeout_error()

    async def aacquire(self, acquisition: "_Acquisition") -> None:
        """Do what `acquire` does, from an event loop."""
        connection, until = self._begin()
        if _source(connection) is None:
            self._check_not_ended((await self._service.__aschedule__([self._new], at_most=self._wait))[0].status)
        try:
            is_granted = await connection.arun(self._claim_until_granted(connection, acquisition, until))
        except BaseException:
            acquisition.give_up(connection)
            raise
        if not is_granted:
            with suppress(BackendError):
                self._check_not_ended((await self._service.__aschedule__([self._task_if_lost()], at_most=0))[0].status)
            raise self._timeout_error()

    def _begin(self) -> tuple[Connection, float]:
        """Return the connection, and until when the name is waited for. Raises `ConfigError`: no service of names."""
        connection = self._session.connection()
        if connection.name_source is None:
            require_names(connection.backend)
        return connection, math.inf if self._wait is None else connection.clock.now() + self._wait

    def _check_not_ended(self, status: Status | None) -> None:
        """Raise `NotGranted` if waiting makes no sense, because the task of the name has ended."""
        if status is not None and status.ended:
            why = f"the lease of {self.name!r} can no longer be granted: its task is {status}"
            raise NotGranted(why, ended=status)

    def _timeout_error(self) -> NotGranted:
        return NotGranted(f"the lease of {self.name!r} is held by another process; waited for {self._wait:g} s")

    async def _claim_until_granted(self, connection: Connection, acquisition: "_Acquisition", until: float) -> bool:
        """Claim the name, in the driver's loop. Return False if it was not granted in time."""
        clock, keeper = connection.clock, connection.keeper
        if (source := _source(connection)) is not None:
            repeat_for, within = self._service.__patience__(self._wait)
            leases, status = await keeper.claim_name(source, self._new, repeat_for=repeat_for, within=within)
            if leases:
                acquisition.take(connection, leases[0])
                return True
            self._check_not_ended(status)
        while not acquisition.given_up:
            left = max(0.0, until - clock.now())
            leases = await keeper.claim(
                [self._new.kind],
                limit=1,
                wait=min(self.poll, left),
                repeat_for=None if self._wait is None else left,
                started=True,
            )
            if leases:
                acquisition.take(connection, leases[0])
                return True
            if clock.now() >= until:
                return False
            await self._recheck(connection)
        return False

    async def _recheck(self, connection: Connection) -> None:
        """Raise what `_check_not_ended` does, between two polls; schedule the task anew if the service has lost it."""
        backend: Any = connection.backend  # a `TaskSink`: it has scheduled the name before
        with suppress(BackendError):  # the next poll is repeated for longer
            again = await call_once(lambda: backend.schedule([self._task_if_lost()]), within=_LOOK)
            self._check_not_ended(again[0].status)

    def _task_if_lost(self) -> NewTask:
        """Return the task of a name that the service may have lost: not due before the trust of its holder ends."""
        # By the service's clock: that of this client may be wrong.
        return _task(self._new.kind, self._ttl, delay=self._ttl)


def _source(connection: Connection) -> NameSource | None:
    """Return the call that makes and claims a name at once; None if the service has none, or a tracer must see two."""
    return None if connection.hooks.tracer is not None else connection.name_source


def _task(kind: str, ttl: float, *, delay: float | None = None) -> NewTask:
    return NewTask(
        kind=kind, id=kind, delay=delay, max_attempts=None, max_crashes=_MANY, claim_timeout=ttl, heartbeat_timeout=ttl
    )


class _OnceName(_Name):
    """A name whose task is settled by the first block that succeeds, or fails for good."""

    prefix = PREFIXES[1]
    """How the kinds and ids of its tasks begin."""
    poll = 5.0
    """Seconds of one long poll: shorter, because the end of another run does not wake it."""

    def outcome_of(self, held: HeldLease, error: BaseException | None, interrupted: Outcome) -> Outcome:
        outcome = outcome_of(held, error, interrupted)
        return "release" if outcome == "retry" else outcome

    def _check_not_ended(self, status: Status | None) -> None:
        if status in (Status.SUCCESS, Status.FATAL_FAILURE):
            raise AlreadyDone(f"{self.name!r} was run to its end before: {status}")
        super()._check_not_ended(status)


class _Acquisition:
    """An attempt to acquire a name, with its grant. Written in the driver's loop."""

    def __init__(self, on_grant: Callable[[Connection, HeldLease], object]) -> None:
        self._on_grant = on_grant
        self._granted: tuple[Connection, HeldLease] | None = None
        self.given_up = False

    def take(self, connection: Connection, held: HeldLease) -> None:
        """Record a grant at once: the thread that waits for it may be interrupted before it knows."""
        held.reserved = True
        self._granted = connection, held
        self._on_grant(connection, held)

    def give_up(self, connection: Connection) -> None:
        """Give the lease back if it was granted, and stop waiting: its block will not begin. Any thread."""
        self.given_up = True
        connection.driver.call_soon(self._release)

    def _release(self) -> None:
        if self._granted is not None:
            connection, held = self._granted
            connection.keeper.release_if_unstarted(held)


class _Acquiring(Lease):
    """A lease that is acquired where its block begins."""

    def __repr__(self) -> str:
        if not self._run.begun:
            return f"<{type(self).__name__} of {self._named.name!r}: not granted>"
        return super().__repr__()

    def __init__(self, named: _Name, *, idle_timeout: float | None = None, block: Owner | None = None) -> None:
        super().__init__(LeasedRun(named.task, idle_timeout=idle_timeout, outcome_of=named.outcome_of))
        self._named = named
        self._exit = block or self._exit
        del self._exit_function  # it serves one `with` statement; a name that was not granted may be entered again

    def _exit_function(self) -> Callable[..., Any]:
        exit_function = functools.partial(self._leave)
        self._exit = weakref.ref(exit_function)
        return exit_function

    def __enter__(self) -> Self:
        if not self._run.begun:
            self._named.acquire(_Acquisition(self._take_grant))
        return super().__enter__()

    async def __aenter__(self) -> Self:
        if not self._run.begun:
            await self._named.aacquire(_Acquisition(self._take_grant))
        return await super().__aenter__()

    def _take_grant(self, connection: Connection, held: HeldLease) -> None:
        self._run.task = self._named.bound(held.task)
        self._reserved = connection, held
        self._own(connection, held)


class NamedLease(_Acquiring):
    """The right to a name, in this process, as long as the lease lasts. It has no result: it is released."""

    def complete(self, result: Any = None) -> NoReturn:
        """Raise `LeasekitError`: a name has no result."""
        raise self._no_outcome_error()

    def fail(self, error: Any, *, retry: bool | float = True) -> NoReturn:
        """Raise `LeasekitError`: a name cannot fail."""
        raise self._no_outcome_error()

    def then(self, kind: object, payload: Any = None, **options: Unpack[TaskOptions]) -> NoReturn:
        """Raise `LeasekitError`: a name is never settled, so no task can follow."""
        raise self._no_outcome_error()

    def _no_outcome_error(self) -> LeasekitError:
        return LeasekitError(
            f"{self._named.name!r} is a name, not a task: it has no outcome, leave the block to release it"
        )


class OnceLease(_Acquiring):
    """The right to run code to its end. A block that fails releases it, and a later caller tries again."""

    def fail(self, error: Any, *, retry: bool | float = True) -> None:
        """Do what `Lease.fail` does, but let the next caller run at once, because a name has no retry policy."""
        super().fail(error, retry=0 if retry is True else retry)


L = TypeVar("L", bound=_Acquiring)


class _Entered(Generic[L]):
    """A name whose lease is acquired where a block begins: `with name:` or `with lease(name):`."""

    _name_type: ClassVar[type[_Name]] = _Name
    _lease_type: type[L]

    def __init__(self, service: _Service, session: Session, name: str, *, wait: float | None, ttl: float) -> None:
        self._name = self._name_type(service, session, name, wait=wait, ttl=ttl)
        self._blocks: dict[int, Owner] = {}  # by thread: of the `with` statement that is about to enter
        # In the order in which they came; the first that lives is entered. A lock could stay held after an interrupt.
        self._entered: list[Owner] = []
        self._kept: object = None  # what lives as long as a block that was entered without a `with` statement
        self._lease: L | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def name(self) -> str:
        """The name that is leased."""
        return self._name.name

    def __lease__(self, idle_timeout: float | None) -> L:
        """Return a lease of this name, for the block of `with lease(…)`."""
        return self._lease_type(self._name, idle_timeout=idle_timeout)

    def _exit_function(self) -> Callable[..., Any]:
        """Return the function by which a `with` statement leaves the block; it lives exactly as long as the block."""
        exit_function = functools.partial(self._leave)
        self._blocks[threading.get_ident()] = weakref.ref(exit_function)
        return exit_function

    def _new_lease(self) -> L:
        """Make the lease for a block that begins. Raises `NotHeld` while another block goes on."""
        block, kept = self._blocks.pop(threading.get_ident(), None), None
        if block is not None and block() is None:  # of a statement that was interrupted before
            block = None
        if block is None:
            kept = functools.partial(self._leave)
        owner = block or weakref.ref(kept)
        self._entered.append(owner)
        for other in self._entered[:]:
            if other is owner:
                break
            if other() is not None:
                raise NotHeld(f"{self!r} is entered already: ask the client for another one, for each block at a time")
            with suppress(ValueError):  # another thread has removed it
                self._entered.remove(other)
        self._kept = kept
        self._lease = self._lease_type(self._name, block=block)
        return self._lease

    def _leave(self, *error: Any) -> Any:
        try:
            return end_of_block(self._lease, *error)
        finally:
            self._kept = None

    def __enter__(self) -> L:
        held = self._new_lease()
        try:
            return held.__enter__()
        except BaseException:
            self._kept = None
            raise

    __exit__: Exit = end_of_block

    async def __aenter__(self) -> L:
        held = self._new_lease()
        try:
            return await held.__aenter__()
        except BaseException:
            self._kept = None
            raise

    __aexit__: AsyncExit = end_of_block


class Named(_Entered[NamedLease]):
    """A name to be leased, one block at a time; `Client.named` makes it."""

    _lease_type = NamedLease


class Once(_Entered[OnceLease]):
    """A name for code that is run to its end once, one block at a time; `Client.once` makes it."""

    _name_type = _OnceName
    _lease_type = OnceLease
