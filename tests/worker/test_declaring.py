"""`@worker.periodic`: what code declares, and when the service is told."""

import asyncio
import logging
from datetime import datetime
from typing import Any

import msgspec
import pytest

import leasekit
from leasekit import Client, ConfigError, Flow, KindInfo, KindSettings, PeriodicInfo, PeriodicTask, Worker
from leasekit._worker import declaring
from leasekit._worker.declaring import Declaring, declared_periodic
from leasekit.errors import Refused, Unavailable
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually
from tests.worker.conftest import AtWork, Submitter


class Report(msgspec.Struct):
    pages: int


@pytest.fixture
def worker(service: MemoryService) -> Worker:
    return Worker(MemoryBackend(service, worker="worker"))


@pytest.fixture
def client(submitter: Submitter) -> Client:
    return submitter.client


def declared(client: Client, name: str) -> PeriodicInfo:
    info: PeriodicInfo = eventually(lambda: client.get_periodic(name))
    return info


def test_what_code_declares_is_set_when_the_worker_starts(
    worker: Worker, client: Client, submitter: Submitter, at_work: AtWork, door: str
) -> None:
    @worker.periodic("0 7 * * MON-FRI", tz="Europe/Berlin", payload=Report(pages=3), catch_up=2, key="t", priority=1)
    @worker.handler("report", max_attempts=7, priority=4)
    def report(payload: Report) -> int:
        return payload.pages

    with at_work(worker):
        info = declared(client, "report")
        fired = client.trigger_periodic("report")
        assert submitter.success(fired.id).result == 3
    assert info.declared_at is not None
    assert info.task == PeriodicTask(
        kind="report",
        payload={"pages": 3},
        cron="0 7 * * MON-FRI",
        tz="Europe/Berlin",
        catch_up=2,
        key="t",
        priority=1,
        max_attempts=7,
    )


def test_a_handler_has_as_many_periodic_tasks_as_have_names(worker: Worker, client: Client, at_work: AtWork) -> None:
    @worker.periodic(every=3600, name="hourly", payload="h")
    @worker.periodic("0 0 * * *", payload="d")
    @worker.handler("k")
    def run(payload: str) -> str:
        return payload

    assert run("here") == "here"
    with at_work(worker):
        tasks = {name: declared(client, name).task for name in ("k", "hourly")}
    assert tasks["k"] == PeriodicTask(kind="k", cron="0 0 * * *", payload="d")
    assert tasks["hourly"] == PeriodicTask(kind="k", every=3600, payload="h")


def test_a_worker_leaves_what_was_changed_by_hand_and_says_so(
    worker: Worker, client: Client, at_work: AtWork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leasekit")

    @worker.periodic(every=3600)
    @worker.handler("k")
    def _(payload: None) -> None: ...

    with at_work(worker):
        declared(client, "k")
    by_hand = PeriodicTask(kind="k", every=60)
    client.set_periodic("k", by_hand)
    client.pause_periodic("k")
    with at_work(worker):
        eventually(lambda: "the periodic task 'k' is not as this code declares" in caplog.text)
    info = declared(client, "k")
    assert (info.task, info.is_paused) == (by_hand, True)


class Directory:
    """A service that answers as its script says, and then keeps what it is told."""

    def __init__(self, *script: BaseException) -> None:
        self.script, self.told, self.is_enough = list(script), list[str](), asyncio.Event()
        self.wanted = 0

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        assert is_declared
        if self.script:
            raise self.script.pop(0)
        self.told.append(name)
        if len(self.told) == self.wanted:
            self.is_enough.set()
        return PeriodicInfo(name=name, task=task, changed_at=datetime(2026, 1, 1).astimezone())


def told(directory: Directory, count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run declarations of `a` and `b` against a service until it was told so many."""
    monkeypatch.setattr(declaring, "_REPEAT", 0.001)
    tasks = {name: PeriodicTask(kind="k", every=60) for name in ("a", "b")}

    directory.wanted = count

    async def run() -> None:
        declared = declared_periodic(directory, tasks)  # type: ignore[arg-type]  # it has all that is called
        running = asyncio.create_task(Declaring(declared).run())
        await directory.is_enough.wait()
        running.cancel()

    asyncio.run(run())
    return directory.told[:count]


def test_a_declaration_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(Directory(), 4, monkeypatch) == ["a", "b", "a", "b"]


def test_a_declaration_waits_for_a_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(Directory(Unavailable("away"), Unavailable("away")), 2, monkeypatch) == ["a", "b"]


def test_a_declaration_that_is_refused_is_logged_once_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Directory):
        async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
            if name == "a":
                raise Refused("cron is no cron expression")
            return await super().set_periodic(name, task, is_declared=is_declared)

    assert told(Refusing(), 3, monkeypatch) == ["b", "b", "b"]
    assert caplog.messages == [
        "the periodic task 'a' is not set, which is tried again in some minutes: cron is no cron expression"
    ]


def test_a_worker_of_a_service_without_periodic_tasks_does_not_start(faulty: Faulty) -> None:
    worker = Worker(faulty)

    @worker.periodic(every=60)
    @worker.handler("k")
    def _(payload: None) -> None: ...

    with pytest.raises(ConfigError, match=r"^Faulty has no periodic tasks: leave @worker\.periodic out"):
        worker.run()


@pytest.mark.parametrize(
    ("cron", "options", "why"),
    [
        (None, {}, "give one of them"),
        ("0 7 * * *", {"every": 60}, "give one of them"),
        (None, {"every": 60, "jitter": 61}, "`jitter` must be at most `every`"),
        (None, {"every": 0}, ">= 1"),
        (None, {"every": 60, "overlap": "allow"}, "Invalid enum value"),
        (None, {"every": 60, "name": "a/b"}, "matching regex"),
        (None, {"every": 60, "payload": "x"}, "does not fit: Expected `int`, got `str`"),
        (None, {"every": 60, "priority": 9}, "<= 4"),
    ],
)
def test_a_declaration_that_is_none_is_refused_where_it_stands(
    worker: Worker, cron: str | None, options: dict[str, Any], why: str
) -> None:
    @worker.handler("k")
    def run(payload: int) -> None: ...

    with pytest.raises(ConfigError, match=why) as error:
        worker.periodic(cron, **{"payload": 1, **options})(run)
    assert str(error.value).startswith("@worker.periodic above test_a_declaration_that_is_none")


def test_an_unknown_option_is_refused_with_a_hint(worker: Worker) -> None:
    @worker.handler("k")
    def run(payload: Any) -> None: ...

    with pytest.raises(TypeError, match="'timezone' is no option of a periodic task"):
        worker.periodic("0 7 * * *", timezone="UTC")(run)  # type: ignore[call-arg]


def test_a_payload_that_is_too_large_is_refused(worker: Worker) -> None:
    @worker.handler("k")
    def run(payload: str) -> None: ...

    with pytest.raises(ConfigError, match="payload must be at most 65536 bytes, got 70002"):
        worker.periodic(every=60, payload="x" * 70_000)(run)


def test_only_handlers_of_the_worker_are_periodic_each_name_once_and_before_it_runs(
    worker: Worker, at_work: AtWork, client: Client
) -> None:
    @worker.handler("k")
    def run(payload: None) -> None: ...

    def plain(payload: None) -> None: ...

    with pytest.raises(ConfigError, match=r"write @worker\.periodic above @worker\.handler"):
        worker.periodic(every=60)(plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is another worker's"):
        leasekit.Worker("memory://").periodic(every=60)(run)
    worker.periodic(every=60)(run)
    with pytest.raises(ConfigError, match=r"there is a periodic task 'k' already: .* name="):
        worker.periodic(every=61)(run)
    with at_work(worker):
        declared(client, "k")
        with pytest.raises(ConfigError, match="too late"):
            worker.periodic(every=60, name="late")(run)


def test_settings_that_a_handler_declares_hold_for_tasks_that_others_schedule(
    worker: Worker, client: Client, at_work: AtWork
) -> None:
    settings = KindSettings(retention=3600.0, concurrency=4, weight=2.0, priority=1)

    @worker.handler("mail", settings=settings, max_attempts=3)
    def mail(payload: str) -> None: ...

    with at_work(worker):
        info: KindInfo = eventually(lambda: client.kind("mail"))
        assert (info.settings, info.declared) == (settings, settings)
        task = client.get(client.schedule("mail", "x", delay=60).id)
    assert task is not None
    assert task.priority == 1


def test_settings_that_were_changed_by_hand_stay_and_the_log_says_so(
    worker: Worker, client: Client, at_work: AtWork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leasekit")

    @worker.handler("k", settings=KindSettings(concurrency=4))
    def _(payload: None) -> None: ...

    with at_work(worker):
        eventually(lambda: client.kind("k"))
    client.set_kind("k", KindSettings(concurrency=2))
    with at_work(worker):
        eventually(lambda: "the settings of kind 'k' are not as this code declares" in caplog.text)
    info = client.kind("k")
    assert info is not None
    assert info.settings == KindSettings(concurrency=2)


def test_a_flow_declares_settings_of_its_kind_too(worker: Worker, client: Client, at_work: AtWork) -> None:
    flow = Flow("f", state=int)

    @flow.step()
    def only(state: int) -> None: ...

    worker.add(flow, settings=KindSettings(weight=3.0))
    with at_work(worker):
        info: KindInfo = eventually(lambda: client.kind(flow.kind))
    assert info.settings == KindSettings(weight=3.0)


def test_a_worker_of_a_service_without_settings_of_kinds_does_not_start(faulty: Faulty) -> None:
    worker = Worker(faulty)

    @worker.handler("k", settings=KindSettings(weight=2.0))
    def _(payload: None) -> None: ...

    with pytest.raises(ConfigError, match=r"^Faulty has no settings of kinds: leave settings=… out of the handler 'k'"):
        worker.run()


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("k", {"weight": 2}, r"settings must be leasekit\.KindSettings\(…\), got \{'weight': 2\}"),
        ("k", KindSettings(concurrency=0), "concurrency"),
        ("named:k", KindSettings(weight=2), "tasks that stand for a name"),  # which have no handlers either
    ],
)
def test_settings_that_no_kind_can_have_are_refused_where_they_stand(
    worker: Worker, kind: str, settings: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^handler '{kind}'.*{why}"):

        @worker.handler(kind, settings=settings)
        def _(payload: None) -> None: ...
