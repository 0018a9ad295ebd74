"""Connection: a backend, the keeper of its leases, and the driver's thread, one per client and process."""

import contextlib
import math
import os
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from leasekit._driver import thread
from leasekit._driver.answer import Answer
from leasekit._driver.bridge import outcome, whole
from leasekit._driver.clock import Clock
from leasekit._driver.coding import CLEAR, Coding
from leasekit._driver.guarding.watchdog import Mode, Watchdog
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.keeping.keeper import Keeper
from leasekit._driver.keeping.queue_claims import QueueClaims
from leasekit.backend import Backend, NameSource, Scheduler, TaskSink
from leasekit.config import Heartbeats
from leasekit.errors import Closed, ConfigError, LeasekitError
from leasekit.hooks import Hooks, register_gauges
from leasekit.queues import TaskQueues
from leasekit.task import Health, NewTask

T = TypeVar("T")
_STALLED = 10.0  # seconds without a turn of the driver's thread; an idle thread has one in each second


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
        queues: TaskQueues | None = None,
        coding: Coding = CLEAR,
    ) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.backend = backend
        self.clock = clock
        self.hooks = hooks
        self.coding = coding
        self.watchdog = Watchdog(watchdog, now=clock.now)
        self._queue_claims = None if queues is None else QueueClaims(backend, queues, now=clock.now)
        self.keeper = Keeper(
            backend,
            heartbeats,
            claim=None if self._queue_claims is None else self._queue_claims.claim,
            clock=clock,
            hooks=hooks,
            chance=random.SystemRandom(),
            last_resort=last_resort,
            watchdog=self.watchdog,
        )
        self._is_scheduler = isinstance(backend, Scheduler)  # asked once: that takes longer than a short handler
        self.name_source = backend if isinstance(backend, NameSource) else None
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
        """Return a weak reference to the object of `owner`. When that object is deleted, the keeper abandons `held`.

        The argument is a reference too, because a traceback keeps its frames, and what these refer to, alive.
        """

        def dead(reference: Owner) -> None:
            if not held.settling and not self.forked:
                self.driver.call_soon(self.keeper.abandoned, held, reference)

        return weakref.ref(owner() or _Dead(), dead)

    def check_accepts_work(self) -> None:
        """Raise `LeasekitError` if the backend cannot schedule a successor with a settlement."""
        if self._is_scheduler:
            return
        name = type(self.backend).__name__
        if isinstance(self.backend, TaskSink):
            what = f"{name} cannot settle a task and schedule another in one transaction"
            raise LeasekitError(f"{what}: call client.schedule(…) in the block, and expect a second one after a crash")
        raise LeasekitError(f"{name} accepts no work: schedule what follows elsewhere")

    def check_dependencies(self, task: NewTask) -> None:
        """Raise `LeasekitError` if `task` has dependencies (`after`) or a `key` that the backend does not support."""
        name = type(self.backend).__name__
        if task.after and not self.backend.capabilities.dependencies:
            raise LeasekitError(f"{name} has no dependencies (`after`): have the task before schedule this one")
        if task.key is not None and not self.backend.capabilities.keys:
            raise LeasekitError(f"{name} has no fair shares: schedule the task without `key`")

    def gauges(self) -> Mapping[str, float]:
        if self.forked or self.closed:
            return {}
        keeper = self.keeper
        return {
            "leasekit.leases.held": len(keeper),
            "leasekit.leases.capacity": keeper.capacity,
            "leasekit.settlements.pending": len(keeper.outbox),
        }

    def check_labels(self, labels: Mapping[str, str]) -> None:
        """Raise `ConfigError` if there are labels, and the service takes none."""
        if labels and not self.backend.capabilities.labels:
            name = type(self.backend).__name__
            raise ConfigError(f"{name} takes no labels of workers: give tasks for some workers a kind of their own")

    def health(self) -> Health:
        """Judge whether leases can be kept. Any thread: the driver's may be stalled."""
        detail = None if not self._loop.done() else "the keeper has ended"
        if (turn_age := self.driver.loop_monitor.turn_age) > _STALLED:
            detail = f"the driver's thread has had no turn for {turn_age:.0f} s: no lease is renewed"
        now = self.clock.now()
        left = math.inf
        for held in self.keeper.held:
            if not held.term.confirmed or held.settling:  # none of its code runs
                continue
            if held.reason is None:
                left = min(left, held.term.lost_at - now)
                if held.term.lost_at - now < held.term.heartbeats.call_timeout:
                    detail = detail or f"task {held.task.id} is about to be lost: no heartbeat was acknowledged"
            elif held.handler_runs and held.ends_at < now:
                detail = detail or f"task {held.task.id} is lost, and its handler goes on"
        answered_at = self.keeper.reachability.answered_at
        return Health(
            ok=detail is None,
            detail=detail,
            turn_age=round(turn_age, 3),
            trust_left=None if left == math.inf else round(left, 3),
            answered_ago=None if answered_at is None else round(max(0.0, now - answered_at), 3),
        )

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
        """Close the keeper and the backend. Await this in the driver's loop, and let go of the driver then."""
        self.closed = True
        try:
            await self.keeper.aclose()
            if self._queue_claims is not None:
                await self._queue_claims.aclose()
        finally:
            self._loop.cancel()

    def close_here(self) -> None:
        """Close, and let go of the driver, whose thread then ends if it has no other user. Blocks until then."""
        try:
            with contextlib.suppress(Closed):  # its descriptors were closed by other code: nothing is left to close
                self.run(self.aclose())
        finally:
            self.driver.release()

    async def aclose_whole(self) -> None:
        """Do what `close_here` does, from an event loop. A cancel of this call is raised after that."""
        try:
            with contextlib.suppress(Closed, CancelledError):
                await whole(self.driver.submit(self.aclose()))
        finally:
            released: Answer[None] = Answer()

            def release() -> None:
                self.driver.release()
                released.set_result(None)

            threading.Thread(target=release, name=f"{thread.NAME}-release", daemon=True).start()
            await whole(released)
