"""The server as a simulated process: the real engine, over a store that outlives the process."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.history import Began, Ended, Fault, Final, Served
from harness.recording import digest
from harness.simulation.queues import Queues, SimulatedQueues
from harness.simulation.store import Committed, WatchedStore
from harness.simulation.world import Process, World
from leasekit.errors import BackendError, Throttled
from leasekit.server.commit import GroupCommit, RequestClass
from leasekit.server.engine import Engine
from leasekit.server.store import Filter
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Beat, Settlement, Status


class Server:
    """The task server: one incarnation after another, over one store."""

    def __init__(self, world: World, *, name: str = "server") -> None:
        self.world = world
        self._name = name
        self._chance = world.chance(name)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.store = self._make_store()
        self.queues = self._make_queues()
        self.wall = 1_700_000_000.0  # wall clock minus true time
        self.latency = 0.0  # the longest of a commit
        self.die_at: str | None = None  # the point of a commit at which the next kill happens
        self._is_rebooted = False  # since the last incarnation
        self.process: Process | None = None
        self.engine: Engine | None = None
        self._count = 0
        self._boots = 0  # starts of the machine
        self._rate = 1 + self._chance.uniform(-1, 1) * world.scenario.drift

    def _make_store(self) -> WatchedStore:
        if self.world.scenario.store == "sql":
            self._folder = tempfile.TemporaryDirectory(prefix="leasekit-simulation-")
            return WatchedStore(SqliteStore(Path(self._folder.name) / "tasks.db"), self.world, Committed())
        return WatchedStore(MemoryStore(), self.world, Committed())

    def _make_queues(self) -> Queues | None:
        return Queues(self.world) if self.world.scenario.has_queues else None

    def start(self) -> None:
        if self.process is not None and self.process.is_alive:
            return
        self._count += 1
        boot = None if self.process is None else self.process.boot()
        if self._is_rebooted:
            boot, self._is_rebooted = self._chance.uniform(5.0, 100.0), False
            self._boots += 1
        process = self.process = Process(self.world, f"{self._name}#{self._count}", rate=self._rate, boot=boot)
        self.world.log(Began, process.who, role="server")
        process.start(self._serve(process))

    async def _serve(self, process: Process) -> None:
        def writer(*args: Any, **kwargs: Any) -> "_Writer":
            return _Writer(self, process, *args, **kwargs)

        engine = Engine(
            self.store,
            clock=lambda: self.world.now + self.wall,
            boot=process.boot,
            boot_id=f"{self._name}-{self._boots}",
            random=self._chance,
            period=self.world.scenario.period,
            writer=writer,  # type: ignore[arg-type]
            queues=None if self.queues is None else SimulatedQueues(self.queues, process),
        )
        self.store.now = engine._clock.instant
        try:
            await engine.__aenter__()
        except BackendError:  # the store failed: it is started again
            self.kill(back_in=5.0)
        else:
            self.engine = engine

    def kill(self, *, back_in: float, is_rebooted: bool = False) -> None:
        """Kill the server, and start it again later, after a reboot of its machine if `is_rebooted`."""
        process = self.process
        if process is None or not process.is_alive:
            return
        process.die()
        self._is_rebooted |= is_rebooted
        self.engine = None
        self.store.crash()
        self.world.log(Ended, process.who, how="killed")
        self.world.after(back_in, self.start)

    def stop(self, *, back_in: float) -> None:
        """Stop the server: waiting calls are answered, accepted writes are committed."""
        if self.process is not None and self.engine is not None and self.process.runs:
            engine, self.engine = self.engine, None
            self.process.start(self._stop(self.process, engine, back_in))

    async def _stop(self, process: Process, engine: Engine, back_in: float) -> None:
        engine.end_waits()
        await engine.__aexit__(None, None, None)
        process.die()
        self.world.log(Ended, process.who, how="exited")
        self.world.after(back_in, self.start)

    async def answer(self, op: str, worker: str, request: Any) -> Any:
        engine = self.engine
        if engine is None:
            raise Throttled("the server starts or stops", retry_after=0.5)
        match op:
            case "claim" | "claim_tickets":
                return await engine.claim(worker=worker, **request)
            case "beat":
                return await engine.heartbeat(worker, request)
            case "settle":
                return await engine.results(worker, request)
            case "stats" | "gates":
                return await getattr(engine.queries, op)()
            case "list_tasks":
                return await engine.queries.list_tasks(**request)
            case "reschedule":
                return await engine.operations.reschedule(*request, by=worker)
            case "reschedule_matching":
                return await engine.operations.reschedule_matching(request, by=worker)
            case "drain" | "undrain":
                return await getattr(engine.operations, op)(request, by=worker)
            case "set_kind":
                return await engine.operations.set_kind(*request, by=worker)
            case "redrive" | "set_gate" | "change_periodic" | "cancel_matching":
                return await getattr(engine.operations, op)(request)
            case _:  # schedule, cancel
                return await getattr(engine, op)(request)

    def mend(self) -> None:
        """End the faults that have not happened yet, and start the server if it is away."""
        self.die_at = None
        self.start()

    def for_request(self) -> "Server":
        return self

    def write(self, write: Callable[[], None]) -> None:
        """Run a transaction; a node may stand still in the middle of it."""
        write()

    def finals(self) -> None:
        with self.store.view() as view:
            rows = view.page(Filter(), after=0, limit=10_000_000)
        for row in rows:
            self.world.log(
                Final, "store", task=row.id, status=row.status.value, kind=row.kind, attempt=row.attempt,
                crashes=row.crashes, fence=row.fence,
            )  # fmt: skip

    @property
    def unfinished(self) -> int:
        with self.store.view() as view:
            counts = view.counts()
        return sum(n for of_kind in counts.values() for status, n in of_kind.items() if not Status(status).ended)

    def close(self) -> None:
        self.store.close()
        if self._folder is not None:
            self._folder.cleanup()


class _Writer(GroupCommit):
    """A group commit in the loop of its process, which may be killed before or after it."""

    def __init__(self, server: Server, process: Process, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server = server
        self._process = process
        self._is_due = False

    async def start(self) -> None:
        self._store.open()
        self._is_open = True

    async def stop(self) -> None:
        while any(self._queues.values()):
            self._deliver(self._apply(self._next()))
        self._is_open = False
        self._store.close()

    def submit(self, rank: RequestClass, request: Any, **options: Any) -> None:
        super().submit(rank, request, **options)
        if not self._is_due:
            self._is_due = True
            self._soon(self._server.write, self._write)

    def _soon(self, call: Any, *args: Any) -> None:
        server = self._server
        if server.latency and (wait := server._chance.uniform(0, server.latency)):
            server.world.fired["server_slow"] += 1
            self._process.loop.call_later(wait, call, *args)
        else:
            self._process.loop.call_soon(call, *args)

    def _write(self) -> None:
        self._is_due = False
        if not any(self._queues.values()) or self._is_killed("kill_before_commit"):
            return
        outcome = self._apply(self._next())
        if self._is_killed("kill_after_commit"):
            return
        self._soon(self._deliver, outcome)
        if any(self._queues.values()):
            self._is_due = True
            self._soon(self._server.write, self._write)

    def _is_killed(self, point: str) -> bool:
        server = self._server
        if server.die_at != point:
            return False
        server.die_at = None
        server.world.fired[point] += 1
        back_in = server._chance.uniform(0.5, 30.0)
        server.world.log(Fault, "world", name=point, lasts=back_in)
        server.kill(back_in=back_in)
        return True

    def _transact(self, jobs: Sequence[Any]) -> Any:
        outcome = super()._transact(jobs)
        for job, answers in outcome.answered:
            if job.rank.name in ("heartbeats", "releases", "results"):
                for item, verdict in zip(job.request, answers, strict=True):
                    self._served(item, verdict.verdict)
        return outcome

    def _served(self, item: Beat | Settlement, verdict: str) -> None:
        _, fence = self._server.store.fences.get(item.token, (item.id, 0))
        details = {"what": "beat"}
        if isinstance(item, Settlement):
            details = {"what": "settle", "outcome": item.outcome, "digest": digest(item)}
        self._server.world.log(Served, self._process.who, task=item.id, fence=fence, verdict=verdict, **details)
