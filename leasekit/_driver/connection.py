"""A backend, the keeper of its leases, and the thread that both live in: one for each client and process."""

import os
import random
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from leasekit._driver import thread
from leasekit._driver.bridge import outcome
from leasekit._driver.clock import Clock
from leasekit._driver.holding import Holding, Owner
from leasekit._driver.keeper import Keeper
from leasekit._driver.watchdog import Mode, Watchdog
from leasekit.backend import Backend, Intake, Scheduler
from leasekit.config import Beats
from leasekit.errors import Closed, LeasekitError
from leasekit.hooks import Hooks, show

__all__ = ["Connection"]

T = TypeVar("T")


class Connection:
    """What a client has in this process. The work that it is given is awaited in the driver's loop."""

    def __init__(
        self,
        backend: Backend,
        beats: Beats,
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
            beats,
            clock=clock,
            hooks=hooks,
            chance=random.SystemRandom(),
            last_resort=last_resort,
            watchdog=self.watchdog,
        )
        self.driver = thread.acquire()
        self.keeper.loop_monitor = self.driver.loop_monitor
        self.keeper.call_soon = self.driver.call_soon
        self._loop = self.driver.submit(self.keeper.run())
        show(self)

    @property
    def forked(self) -> bool:
        """True in a child of the process that this connection belongs to."""
        return self.pid != os.getpid()

    @property
    def max_progress(self) -> int:
        """Bytes of JSON that a checkpoint may have here."""
        return self.backend.traits.max_progress

    @property
    def max_result(self) -> int | None:
        """Bytes of JSON that a result may have here; None: as many as it likes."""
        return self.backend.traits.max_result

    def owner(self, holding: Holding, owner: object) -> Owner:
        """A reference to what is to live for this lease to be kept: the keeper hears of its end."""

        def dead(reference: Owner) -> None:
            if not holding.settling and not self.forked:
                self.driver.call_soon(self.keeper.abandoned, holding, reference)

        return weakref.ref(owner, dead)

    def check_accepts_work(self) -> None:
        """Raise `LeasekitError` where no successor can be scheduled with a settlement."""
        name = type(self.backend).__name__
        if isinstance(self.backend, Scheduler):
            return
        if isinstance(self.backend, Intake):
            what = f"{name} cannot settle a task and schedule another in one transaction"
            raise LeasekitError(f"{what}: call client.schedule(…) in the block, and expect a second one after a crash")
        raise LeasekitError(f"{name} accepts no work: schedule what follows elsewhere")

    def gauges(self) -> Mapping[str, float]:
        """How many leases are held of how many that can be, and how many settlements wait for an answer."""
        if self.forked or self.closed:
            return {}
        keeper = self.keeper
        return {
            "leasekit.leases.held": len(keeper),
            "leasekit.leases.capacity": keeper.capacity,
            "leasekit.settlements.pending": len(keeper.outbox),
        }

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The blocking door. Raises `Closed` where the work was ended by closing."""
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
            answer.cancel()  # interrupted: what was claimed meanwhile is given back
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """The other door, from asyncio or trio."""
        try:
            return await outcome(self.driver.submit(work))
        except CancelledError:
            raise Closed from None

    def refuse_hooks(self) -> None:
        """To be called before waiting for the driver's thread: it must not wait for itself."""
        if self.driver.here:
            raise LeasekitError("a hook must not call a blocking method: it would wait for its own thread")

    async def aclose(self) -> None:
        """To be awaited in the driver's loop; `release` then lets go of the thread."""
        self.closed = True
        try:
            await self.keeper.aclose()
        finally:
            self._loop.cancel()

    def release(self) -> None:
        self.driver.release()
