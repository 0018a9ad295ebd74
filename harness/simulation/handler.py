"""Simulated handlers: their steps are events of the world, and the task's payload plans them."""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from harness.history import Effect, Started, Stopped
from leasekit._leased_run import LeasedRun
from leasekit._worker.claimed_task import ClaimedTask
from leasekit.errors import Fatal, LeaseError
from leasekit.lease import Lease

if TYPE_CHECKING:
    from harness.simulation.worker import Worker


class Plan(Struct, frozen=True, omit_defaults=True):
    """The plan of a handler, as its task's payload: the same in every attempt, except for `flaky` ends."""

    lasts: float  # seconds
    effect_every: float
    ends: str = "success"  # or retry, fatal, raise, release, flaky: two retries, then a success
    deaf: bool = False  # does not check its lease, and acts often
    poison: bool = False  # kills its process
    hangs: bool = False  # reports no progress, and ends only when told to
    then: int = 0


class SimulatedHandler:
    """A run of a handler."""

    def __init__(self, worker: "Worker", work: ClaimedTask, run: LeasedRun) -> None:
        self._worker = worker
        self._world = worker.world
        self._work = work
        self._run = run
        self._lease = lease = Lease(run)
        self._plan = msgspec.convert(_decoded(lease.task.payload), Plan)
        self._fence = lease.fence
        self._until = self._world.now + self._plan.lasts
        self._version = 0
        self._skipped = False
        self.is_over = False

    def begin(self) -> None:
        """Run the first step."""
        world, lease = self._world, self._lease
        idle = self._work.handler.idle_timeout
        world.log(Started, self._worker.who, task=lease.task.id, fence=lease.fence, idle_timeout=idle)
        self._next()

    def _next(self) -> None:
        plan = self._plan
        every = min(plan.effect_every, 5.0) if plan.deaf else plan.effect_every
        at = self._world.now + every * (0.5 + self._worker.chance.random())
        self._version += 1
        self._world.at(at if plan.hangs else min(at, self._until), self._step, self._version)

    def go_on(self) -> None:
        """Catch up on the step that was skipped while the process stood still."""
        if self._skipped and not self.is_over:
            self._skipped = False
            self._version += 1
            self._world.after(0.0005 * self._worker.chance.random(), self._step, self._version)

    def _step(self, version: int) -> None:
        worker = self._worker
        if self.is_over or version != self._version:
            return
        if not worker.handlers_run or worker.gil not in (None, self):
            self._skipped = True
            return
        if not self._plan.deaf and worker.gil is not self:
            try:
                self._lease.check()
            except LeaseError as loss:
                self._end(loss, how=type(loss).__name__)
                return
        self._moved()
        if self._world.now >= self._until and not self._plan.hangs:
            self._finish()
        else:
            self._act()
            self._next()

    def _moved(self) -> None:
        """Switch to the newest lease, where the task was delivered again."""
        if self._lease.fence != self._fence:
            self._stopped("moved")
            self._fence = self._lease.fence
            self._world.log(Started, self._worker.who, task=self._lease.task.id, fence=self._fence)

    def _act(self) -> None:
        progress = not self._plan.hangs and self._worker.chance.random() < 0.7
        reported = round(self._world.now, 3) if progress else None
        if progress:
            try:
                self._lease.progress(reported)
            except LeaseError:  # the handler is deaf
                progress, reported = False, None
        task = self._lease.task.id
        self._world.log(Effect, self._worker.who, task=task, fence=self._fence, progress=progress, reported=reported)

    def _finish(self) -> None:
        lease, plan = self._lease, self._plan
        self._act()
        if plan.poison:
            self._world.fired["poison"] += 1
            self._worker.die("a poison pill")
            return
        error: Exception | None = None
        ends = plan.ends
        if ends == "flaky":
            ends = "success" if lease.attempt > 2 else "retry"
        try:
            for number in range(plan.then):
                lease.then("short", {"lasts": 5.0, "effect_every": 5.0, "number": number})
        except LeaseError:  # lost at the last moment
            pass
        match ends:
            case "retry":
                error = RuntimeError("not this time")
            case "fatal":
                error = Fatal("never")
            case "release":
                lease.release(after=30.0) if lease.task.fence <= 2 else lease.complete("done")
            case _:
                lease.complete("done")
        self._end(error, how="finished")

    def _end(self, error: BaseException | None, *, how: str) -> None:
        if how == "IdleTimeout":
            self._world.fired["hang"] += 1
        self.is_over = True
        self._stopped(how)
        self._work.end(self._run, error)
        self._worker.handler_ended(self._work)

    def _stopped(self, how: str) -> None:
        self._world.log(Stopped, self._worker.who, task=self._lease.task.id, fence=self._fence, how=how)


def _decoded(payload: Any) -> Any:
    return msgspec.json.decode(payload) if isinstance(payload, msgspec.Raw) else payload
