"""What type checkers know of the public face. They are what fails here: the tests only run what they read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, assert_type

import certifi
import pytest
from msgspec import UnsetType
from starlette.types import Receive, Scope, Send

import leasekit
from leasekit import (
    AccessDenied,
    AlreadyDone,
    AuditEntry,
    BackendError,
    Cancelled,
    CannotDecode,
    Client,
    Closed,
    ConfigError,
    Draining,
    Exponential,
    Fatal,
    Firing,
    FixedDelays,
    Flow,
    FlowInfo,
    GateInfo,
    Health,
    Heartbeats,
    HistoryEntry,
    Idle,
    IdleTimeout,
    KindInfo,
    KindSettings,
    Lease,
    LeaseError,
    LeaseEvent,
    LeasekitError,
    LeaseLost,
    LossReason,
    MissingDependency,
    Named,
    NamedLease,
    NewTask,
    NewToken,
    NodeInfo,
    NotGranted,
    NotHeld,
    NotYet,
    Once,
    OnceLease,
    Page,
    PeriodicInfo,
    PeriodicTask,
    Polynomial,
    ProtocolError,
    Refused,
    RetryPolicy,
    Scheduled,
    Stats,
    Status,
    Step,
    StepInfo,
    StoreDamaged,
    StoreLocked,
    Task,
    TaskInfo,
    TaskOptions,
    Tasks,
    Throttled,
    TokenInfo,
    TooLarge,
    Unavailable,
    UnknownScheme,
    Untrusted,
    Verdict,
    Worker,
    WorkerInfo,
    connect,
    hooks,
    lease,
    leased,
)
from leasekit import backend as seam
from leasekit.backend import (
    Backend,
    Beat,
    BulkChanger,
    CancelSource,
    Capabilities,
    ChainCancelled,
    ChainDirectory,
    Claimed,
    CompleteSettings,
    DeadLetters,
    Ended,
    EndSource,
    GateDirectory,
    KindDirectory,
    KindListener,
    Matched,
    NameSource,
    NodeDirectory,
    Outcome,
    PeriodicDirectory,
    Purged,
    Purger,
    Redriven,
    Rescheduled,
    Rescheduler,
    Scheduler,
    Selection,
    Settlement,
    TaskSink,
    Ticket,
    TicketSource,
    TokenDirectory,
    Vacuumed,
    VerdictWord,
    WindowListener,
    WorkerDirectory,
    WorkerDrainer,
    cancel_all,
    check_kinds,
    check_limit,
    checked,
    effective,
    payload_digest,
)
from leasekit.codecs import Codec, Codecs, Compressed, Encoded
from leasekit.console import StoreConsole
from leasekit.flows import Failure, Goto
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit.wire import ClaimRequest


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(MemoryBackend(MemoryService(), worker="w")) as client:
        yield client


# Values -----------------------------------------------------------------------------------------------------------


def test_heartbeats() -> None:
    heartbeats = Heartbeats(ttl=300, cycle=100, batch=10).for_ttl(30)
    assert_type(heartbeats, Heartbeats)
    assert_type(heartbeats.outage_survived, float)
    assert_type(heartbeats.capacity, int)
    assert_type(heartbeats.budget(), str)


def test_policies() -> None:
    policies: list[RetryPolicy] = [Exponential(first=2.0), Polynomial(), FixedDelays(waits=[1, 2.5])]
    tasks = [NewTask(kind="k", payload=1, retry=policy) for policy in policies]
    assert_type(tasks[0].retry, RetryPolicy | UnsetType)
    settings = effective(tasks[0])
    assert_type(settings, CompleteSettings)
    assert_type(settings.retry, RetryPolicy)
    options: TaskOptions = {"priority": 0, "retry": policies[0]}
    assert options


def test_idle() -> None:
    assert_type(Idle(30.0).expired, bool)
    assert_type(Idle(30.0).remaining, float)


# Clients ----------------------------------------------------------------------------------------------------------


def test_connect() -> None:
    def hear(event: hooks.Event) -> None: ...

    client = connect("memory://", heartbeats=Heartbeats(), hooks=[hear], worker="w", retry_for=1.0)
    assert_type(client, Client)
    client.listen(hear)
    assert_type(client.close(), None)
    assert_type(connect("http://h", headers={"authorization": "x"}, ca=Path(certifi.where()), proxy="http://p"), Client)
    with pytest.raises(ConfigError):
        connect("memory://", patience=1.0)  # type: ignore[call-arg]


def test_scheduling_and_reading(client: Client) -> None:
    options: TaskOptions = {"priority": 0}
    assert_type(client.schedule("k", {"n": 1}, **options), Scheduled)
    scheduled = client.schedule_all([NewTask(kind="k")])
    assert_type(scheduled, list[Scheduled])
    info = client.get(scheduled[0].id)
    assert_type(info, TaskInfo | None)
    assert info is not None
    assert_type(info.history, list[HistoryEntry])
    assert_type(info.status, Status)
    assert_type(client.list_tasks(status=Status.NEW), Page)
    assert_type(client.list_tasks(tags=["red"]).tasks[:0], list[TaskInfo])
    assert_type(info.tags, list[str])
    assert_type(info.requires, dict[str, str])
    assert_type(client.schedule("k", requires={"gpu": "a100"}), Scheduled)
    assert_type((info.prefers, info.prefer_for), tuple[dict[str, str], float | None])
    assert_type(client.schedule("k", prefers={"zone": "eu"}, prefer_for=30), Scheduled)
    assert_type(client.tasks("k", labels={"gpu": "a100"}), Tasks)
    assert_type(Worker(client, labels={"gpu": "a100"}).labels, dict[str, str])
    assert_type(client.list_tasks().tasks, list[TaskInfo])
    assert_type(client.stats(), Stats)
    assert_type(client.stats().kinds, dict[str, dict[str, int]])
    assert_type(client.reschedule(info.id, delay=timedelta(seconds=5), priority=0), Rescheduled)
    assert_type(client.cancel(info.id), list[Verdict])
    tried = client.cancel_matching(kind="nothing")
    assert_type(tried, Matched)
    assert_type(client.reschedule_matching(kind="nothing", delay=5, priority=0).token, str)
    assert_type(client.cancel_chain(info.id), list[Verdict])
    assert_type(client.list_tasks(root=info.root), Page)
    assert_type(client.wait_tasks(info.id, timeout=30), list[TaskInfo])
    assert_type(client.workers(), list[WorkerInfo])
    assert_type(client.nodes(), list[NodeInfo])
    info_of_kind = client.set_kind("k", KindSettings(max_attempts=3, retention=3600))
    assert_type(info_of_kind, KindInfo)
    assert_type(info_of_kind.settings.retention, float | UnsetType)
    assert_type(client.kind("k"), KindInfo | None)
    assert_type(client.kinds(), list[KindInfo])
    assert_type(client.set_periodic("p", PeriodicTask(kind="k", every=3600)), PeriodicInfo)
    assert_type(client.list_periodic(), list[PeriodicInfo])
    assert_type(client.get_periodic("p"), PeriodicInfo | None)
    assert_type(client.list_periodic()[0].firings, list[Firing])
    assert_type(client.pause_periodic("p"), PeriodicInfo)
    assert_type(client.resume_periodic("p"), PeriodicInfo)
    assert_type(client.trigger_periodic("p"), Scheduled)
    assert_type(client.delete_periodic("p"), None)
    flow = Flow("order", state=dict[str, int])

    @flow.step(retry_every=3, retry_until=60)
    def only(state: dict[str, int], step: Step) -> dict[str, int]:
        assert_type(step.failure, Failure | None)
        assert_type(step.results, list[Any])
        return {**state, "execution": step.execution}

    steps: list[Callable[[dict[str, int], Step], dict[str, int]]] = [only]
    assert steps
    started = flow.start(client, {"a": 1}, key="acme", delay=timedelta(days=1))
    assert_type(started, Scheduled)
    assert_type(flow.start_all(client, [{"a": 1}]), list[Scheduled])
    assert_type(flow.goto("only", {"a": 1}), Goto[dict[str, int]])
    assert_type(flow.draw("mermaid"), str)
    assert_type(client.flow(started.id), FlowInfo | None)
    assert_type(client.flows("order"), tuple[list[FlowInfo], str | None])
    assert_type(client.flows("order")[0][0].history, list[StepInfo])
    assert_type(client.cancel_flow(started.id), list[Verdict])
    assert_type(client.pause(kind="k", until=60, reason="why"), GateInfo)
    assert_type(client.drop(collection="c", until=datetime(2100, 1, 1, tzinfo=UTC)), GateInfo)
    assert_type(client.gates(), list[GateInfo])
    client.open(kind="k")
    assert_type(client.delete_kind("k"), None)
    assert_type(client.health(), Health)
    assert_type(client.health().trust_left, float | None)
    assert_type(client.redrive(info.id, rate=5), Redriven)
    assert_type(client.redrive(kind="k", dry_run=True).tasks, list[Verdict])
    selection: Selection = {"kind": "k", "error": "no such month", "since": datetime(2026, 1, 1, tzinfo=UTC)}
    assert_type(client.list_dead(**selection, limit=5), Page)
    assert_type(client.redrive(**selection), Redriven)
    assert_type(client.purge(status=Status.DEAD, error_type="ValueError", min_attempts=2), Purged)
    assert_type(client.purge("a-task", dry_run=False).kinds, dict[str, dict[str, int]])
    assert_type(seam.dead_ones({"kind": "k"}), dict[str, Any])


@pytest.mark.anyio
async def test_the_same_from_an_event_loop(client: Client) -> None:
    assert_type(await client.aschedule("k"), Scheduled)
    (scheduled,) = await client.aschedule_all([NewTask(kind="k")])
    assert_type(scheduled, Scheduled)
    assert_type(await client.aget(scheduled.id), TaskInfo | None)
    assert_type(await client.alist_tasks(), Page)
    assert_type(await client.astats(), Stats)
    assert_type(await client.areschedule(scheduled.id, delay=0), Rescheduled)
    assert_type(await client.acancel(scheduled.id), list[Verdict])
    assert_type(await client.acancel_matching(kind="nothing"), Matched)
    assert_type(await client.areschedule_matching(kind="nothing", delay=5), Matched)
    assert_type(await client.acancel_chain(scheduled.id), list[Verdict])
    assert_type(await client.await_tasks(scheduled.id), list[TaskInfo])
    assert_type(await client.aworkers(), list[WorkerInfo])
    assert_type(await client.anodes(), list[NodeInfo])
    assert_type(await client.aset_kind("k", KindSettings()), KindInfo)
    assert_type(await client.akind("k"), KindInfo | None)
    assert_type(await client.akinds(), list[KindInfo])
    flow = Flow("count", state=int)

    @flow.step()
    async def count(n: int) -> int:
        return n + 1

    assert_type(await count(1), int)
    assert_type(await flow.astart(client, 1, id="one"), Scheduled)
    assert_type(await client.aflow("one"), FlowInfo | None)
    assert_type(await client.acancel_flow("one"), list[Verdict])
    assert_type(await client.aset_periodic("p", PeriodicTask(kind="k", every=3600)), PeriodicInfo)
    assert_type(await client.aget_periodic("p"), PeriodicInfo | None)
    assert_type(await client.apause(collection="c"), GateInfo)
    assert_type(await client.adrop(kind="k"), GateInfo)
    assert_type(await client.agates(), list[GateInfo])
    await client.aopen(kind="k")
    assert_type(await client.adelete_kind("k"), None)
    assert_type(await client.aredrive(kind="k", limit=5), Redriven)
    assert_type(await client.alist_dead(kind="k", reason="max_attempts"), Page)
    assert_type(await client.apurge(kind="k", key="tenant-7"), Purged)


# Leases -----------------------------------------------------------------------------------------------------------


def test_a_lease(client: Client) -> None:
    client.schedule("k")
    tasks = client.tasks("k", until_idle=0)
    assert_type(tasks, Tasks)
    for task in tasks:
        assert_type(task, Task)
        with lease(task, idle_timeout=60) as held:
            assert_type(held, Lease)
            assert_type(held.fence, int)
            assert_type(held.attempt, int)
            assert_type(held.checkpoint, Any)
            assert_type(held.remaining(), float)
            assert_type(held.remaining_runtime(), float | None)
            assert_type(held.lost, bool)
            assert_type(held.check(), None)
            held.progress({"page": 1})
            held.then("next", 1, priority=0)
            held.complete({"ok": True})


@pytest.mark.anyio
async def test_a_lease_in_an_event_loop(client: Client) -> None:
    await client.aschedule("k")
    async for task in client.tasks("k", until_idle=0):
        assert_type(task, Task)
        async with lease(task) as held:
            assert_type(held, Lease)
            held.release(after=1.0)


@pytest.mark.anyio
async def test_names(client: Client) -> None:
    named, once = client.named("n", wait=0, ttl=30), client.once("o")
    assert_type(named, Named)
    assert_type(once, Once)
    with named as held:
        assert_type(held, NamedLease)
        assert_type(held.fence, int)
    async with once as running:
        assert_type(running, OnceLease)
    with lease(client.named("n"), idle_timeout=60) as leased_name:
        assert_type(leased_name, Lease)


def test_leased() -> None:
    @leased
    def plain(task: Task, held: Lease, width: int) -> str:
        return "done"

    @leased(idle_timeout=60)
    async def in_loop(task: Task) -> int:
        return 1

    assert {plain.__name__, in_loop.__name__} == {"plain", "in_loop"}


def test_a_worker() -> None:
    worker = Worker("memory://", heartbeats=Heartbeats(), concurrency=2)
    assert_type(worker, Worker)
    worker.stop()


class Reversed(Codec):
    name = "reversed"
    digest_key = b"secret"

    def encode(self, clear: bytes) -> bytes:
        return clear[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]


def test_codecs() -> None:
    several: Codecs = [Compressed(Reversed()), Reversed()]
    Worker("memory://", codec=Reversed())
    with connect("memory://", codec=several) as client:
        assert_type(client, Client)
    encoded = Encoded.of({"$codec": "reversed", "data": "e30="})
    assert encoded is not None
    assert_type(encoded.codec, str)
    assert_type(CannotDecode("why").has_codec, bool)
    with pytest.raises(ConfigError):
        connect("memory://", codec="reversed")  # type: ignore[arg-type]


# Errors -----------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    roots: list[type[LeasekitError]] = [
        ConfigError, UnknownScheme, MissingDependency, Closed, CannotDecode, StoreLocked, StoreDamaged, BackendError,
        LeaseError,
    ]  # fmt: skip
    of_services: list[type[BackendError]] = [Unavailable, Throttled, ProtocolError, Refused, Untrusted]
    of_leases: list[type[LeaseError]] = [
        LeaseLost, Cancelled, Draining, IdleTimeout, AlreadyDone, NotGranted, NotHeld,
    ]  # fmt: skip
    raised: list[type[Fatal]] = [Fatal, TooLarge]
    assert roots and of_services and of_leases and raised  # noqa: PT018


def test_why_a_lease_was_lost() -> None:
    lost = LeaseLost("lost", task_id="a", reason="taken", events=[LeaseEvent(1.0, "sent", 0.0)])
    assert_type(lost.reason, LossReason)
    assert_type(lost.events, Sequence[LeaseEvent])
    with pytest.raises(AssertionError):
        assert lost.reason == "expired"
    LeaseLost("lost", reason="because")  # type: ignore[arg-type]
    assert_type(Throttled("later", retry_after=1.0).retry_after, float | None)
    assert_type(Refused("no").errors, list[dict[str, Any]])
    assert_type(NotGranted("no").ended, str | None)


def test_a_handler_that_asks_to_be_called_again() -> None:
    assert_type(NotYet(after=3).after, float | None)
    assert_type(NotYet("the VM boots").after, float | None)
    NotYet(3)  # type: ignore[arg-type]


# Hooks ------------------------------------------------------------------------------------------------------------


def test_hooks() -> None:
    def hear(event: hooks.Event) -> None:
        match event:
            case hooks.Lost():
                assert_type(event.reason, LossReason)
            case hooks.Claimed():
                assert_type(event.task_ids, Sequence[str])
            case hooks.Answered():
                assert_type(event.verdicts, Mapping[str, int])
            case hooks.Settled():
                assert_type(event.task, Task | None)
            case hooks.CapacityExceeded():
                assert_type(event.held, int)
            case hooks.CancelRequested() | hooks.AtRisk():
                assert_type(event.token, str)
            case hooks.Sent() | hooks.Renewed() | hooks.ReportDelayed() | hooks.Redriven():
                assert_type(event.task_ids, Sequence[str])
            case _:
                assert_type(event.at, float)

    hook: hooks.Hook = hear
    hooks.add_global_hook(hook)
    hooks.remove_global_hook(hook)
    listeners = hooks.Hooks([hook, hooks.log_events])
    assert_type(listeners.active, bool)
    assert_type(hooks.gauge_sources(hook), list[hooks.Source])
    assert_type(hooks.log_fields("a", "token"), dict[str, str])

    class Leases:
        hooks = listeners

        def gauges(self) -> Mapping[str, float]:
            return {"leases": 1}

    source: hooks.Source = Leases()
    hooks.register_gauges(source)


class Quiet(hooks.Tracer):
    @property
    def listening(self) -> bool:
        return False

    def __call__(self, event: hooks.Event) -> None: ...

    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        return nullcontext(tasks)

    def running(self, task: Task) -> hooks.Running:
        raise NotImplementedError


# Backends ---------------------------------------------------------------------------------------------------------


class Own:
    """The least that an adapter is."""

    capabilities = Capabilities(progress=False, max_result=None)

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        return Claimed(tasks=[], waited=None)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="renewed") for beat in beats]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        outcome: Outcome = settlements[0].outcome
        word: VerdictWord = "settled" if outcome == "success" else "failed"
        return [Verdict(id=settlement.id, verdict=word) for settlement in settlements]

    async def aclose(self) -> None: ...


def test_backends() -> None:
    backend: Backend = Own()
    assert_type(backend.capabilities, Capabilities)
    scheduler: Scheduler = MemoryBackend(MemoryService(), worker="w")
    sink: TaskSink = scheduler
    assert isinstance(sink, WorkerDirectory)
    assert isinstance(sink, WorkerDrainer)
    draining: Callable[[str], Coroutine[Any, Any, WorkerInfo]] = sink.drain_worker
    assert callable(draining)
    assert isinstance(sink, WindowListener)
    assert isinstance(sink, NodeDirectory)
    assert isinstance(sink, KindDirectory)
    assert isinstance(sink, PeriodicDirectory)
    assert not isinstance(sink, TokenDirectory)
    assert isinstance(sink, GateDirectory)
    assert isinstance(sink, BulkChanger)
    assert isinstance(sink, Rescheduler)
    assert_type(seam.unknown_task("a"), str)
    assert isinstance(sink, ChainDirectory)
    cancelling: Callable[..., Coroutine[Any, Any, ChainCancelled]] = sink.cancel_chain
    assert callable(cancelling)
    assert isinstance(sink, CancelSource)
    assert not isinstance(sink, KindListener)
    assert not isinstance(sink, NameSource)
    assert not isinstance(sink, EndSource)
    if isinstance(sink, EndSource):
        ends: Callable[..., Coroutine[Any, Any, Ended]] = sink.ended
        assert callable(ends)
    purger: Purger = MemoryBackend(MemoryService(), worker="w")
    assert isinstance(sink, Purger)
    assert isinstance(sink, DeadLetters)
    ticketed: TicketSource = MemoryBackend(MemoryService(), worker="w")
    assert isinstance(ticketed, TicketSource)
    assert Ticket(id="a", fence=0).fence == 0
    assert_type(connect(backend), Client)
    with connect(MemoryBackend(MemoryService(), worker="w")) as client:
        assert_type(client.purge(kind="k", status=Status.DEAD, older_than=60), Purged)
        vacuum: Callable[[], Vacuumed] = client.vacuum
        assert callable(vacuum)
        assert callable(purger.vacuum)


def test_the_checks_of_an_adapter() -> None:
    fields = {"worker": "w", "kinds": ["k"], "limit": 1, "wait": 0.0, "claim_id": "c"}
    assert_type(checked(ClaimRequest, fields), ClaimRequest)
    check_kinds(["k"])
    check_limit("limit", 1)
    assert_type(payload_digest(b"{}"), bytes)
    assert_type(asyncio.run(cancel_all([])), None)


def test_the_seam_and_the_package_have_the_same_values() -> None:
    shared = set(seam.__all__) & set(leasekit.__all__)
    assert all(getattr(seam, name) is getattr(leasekit, name) for name in shared)


def iterates(tasks: Tasks) -> tuple[Iterator[Task], AsyncIterator[Task]]:
    return iter(tasks), aiter(tasks)


def winds_down(verdict: Verdict) -> bool:
    return verdict.cancel_requested


Handle = Callable[[Task], Lease]
handle: Handle = lease


def test_access_tokens() -> None:
    made: Callable[..., NewToken] = Client.create_token
    listed: Callable[[Client], list[TokenInfo]] = Client.tokens
    assert all(map(callable, (made, listed)))
    denied: LeasekitError = AccessDenied("no")
    assert isinstance(denied, BackendError)

    def seen(client: Client) -> None:
        assert_type(client.token("t"), TokenInfo | None)
        assert_type(client.revoke_token("t"), TokenInfo)
        assert_type(client.rotate_token("t", overlap=1).secret, str)
        assert_type(client.audit().entries, list[AuditEntry])

    assert callable(seen)


def test_the_console_of_a_store(tmp_path: Path) -> None:
    console = StoreConsole(f"sqlite:///{tmp_path}/tasks.db", mode="read-only")
    closing: Coroutine[Any, Any, None] = console.aclose()
    asyncio.run(closing)
    app: Callable[[Scope, Receive, Send], Awaitable[None]] = StoreConsole(f"sqlite:///{tmp_path}/tasks.db")
    assert callable(app)
