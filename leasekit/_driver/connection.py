"""Connection: a backend, the keeper of its leases, and the driver's thread, one per client and process."""

import os
import random
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from leasekit._driver import thread
from leasekit._driver.bridge import outcome
from leasekit._driver.clock import Clock
from leasekit._driver.guarding.watchdog import Mode, Watchdog
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.keeping.keeper import Keeper
from leasekit.backend import Backend, Scheduler, TaskSink
from leasekit.config import Heartbeats
from leasekit.errors import Closed, LeasekitError
from leasekit.hooks import Hooks, register_gauges
from leasekit.task import NewTask

T = TypeVar("T")


class _Dead:
    """A stand-in for an owner that is dead already."""


class Connection:
    """Connect one client with the driver in this process. Work that `run` and `arun` get runs in the driver's loop."""

    def __init__(
        self,
        backend: Backend,
        heartbeats: Heartbeats,
        *,
        clock: Clock,
        hooks: Hooks,
        last_resort: Callable[[], None] | None = None,
        watchdog: Mode = "soft",
    ) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.backend = backend
        self.clock = clock
        self.hooks = hooks
        self.watchdog = Watchdog(watchdog, now=clock.now)
        self.keeper = Keeper(
            backend,
            heartbeats,
            clock=clock,
            hooks=hooks,
            chance=random.SystemRandom(),
            last_resort=last_resort,
            watchdog=self.watchdog,
        )
        self.driver = thread.acquire()
        self.driver.when_lost(self._lose_all)
        self.keeper.loop_monitor = self.driver.loop_monitor
        self.keeper.call_soon = self.driver.call_soon
        self._loop = self.driver.submit(self.keeper.run())
        register_gauges(self)

    @property
    def forked(self) -> bool:
        return self.pid != os.getpid()

    @property
    def max_progress(self) -> int:
        return self.backend.capabilities.max_progress

    @property
    def max_result(self) -> int | None:
        return self.backend.capabilities.max_result

    def owner(self, held: HeldLease, owner: Owner) -> Owner:
        """Return a weak reference to what `owner` refers to, whose end makes the keeper abandon the lease `held`.

        No frame refers to the object itself: the traceback of an interrupt would keep it.
        """

        def dead(reference: Owner) -> None:
            if not held.settling and not self.forked:
                self.driver.call_soon(self.keeper.abandoned, held, reference)

        return weakref.ref(owner() or _Dead(), dead)

    def check_accepts_work(self) -> None:
        """Raise `LeasekitError` if the backend cannot schedule a successor with a settlement."""
        name = type(self.backend).__name__
        if isinstance(self.backend, Scheduler):
            return
        if isinstance(self.backend, TaskSink):
            what = f"{name} cannot settle a task and schedule another in one transaction"
            raise LeasekitError(f"{what}: call client.schedule(…) in the block, and expect a second one after a crash")
        raise LeasekitError(f"{name} accepts no work: schedule what follows elsewhere")

    def check_dependencies(self, task: NewTask) -> None:
        """Raise `LeasekitError` if `task` has dependencies (`after`) and the backend does not support them."""
        if task.after and not self.backend.capabilities.dependencies:
            name = type(self.backend).__name__
            raise LeasekitError(f"{name} has no dependencies (`after`): have the task before schedule this one")

    def gauges(self) -> Mapping[str, float]:
        if self.forked or self.closed:
            return {}
        keeper = self.keeper
        return {
            "leasekit.leases.held": len(keeper),
            "leasekit.leases.capacity": keeper.capacity,
            "leasekit.settlements.pending": len(keeper.outbox),
        }

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the driver's loop and block until its result. Raises `Closed` if closing ended the work."""
        try:
            self.refuse_hooks()
        except LeasekitError:
            work.close()
            raise
        answer = self.driver.submit(work)
        try:
            return answer.result()
        except CancelledError:
            raise Closed from None
        except BaseException:
            answer.cancel()  # interrupted: tasks that were claimed meanwhile are given back
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the driver's loop and await its result, from asyncio or trio. Raises `Closed` as `run` does."""
        answer = self.driver.submit(work)
        try:
            return await outcome(answer)
        except CancelledError:
            raise Closed from None
        except BaseException:
            answer.cancel()
            raise

    def refuse_hooks(self) -> None:
        """Raise `LeasekitError` on the driver's own thread, which must not wait for itself."""
        if self.driver.here:
            raise LeasekitError("a hook must not call a blocking method: it would wait for its own thread")

    def _lose_all(self, why: str) -> None:
        self.closed = True
        self.keeper.lose_all(why)

    async def aclose(self) -> None:
        """Close the keeper and the backend. Await this in the driver's loop, and then call `release_driver`."""
        self.closed = True
        try:
            await self.keeper.aclose()
        finally:
            self._loop.cancel()

    def release_driver(self) -> None:
        self.driver.release()
