"""`/metrics`: numbers that are right, for no more series than are known beforehand, and nothing secret."""

import asyncio
import inspect
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # Schemathesis brings it
from prometheus_client.parser import text_string_to_metric_families

from leasekit.errors import Unavailable
from leasekit.periodic import PeriodicTaskItem
from leasekit.queues import QueueName
from leasekit.server.engine import Engine
from leasekit.server.histogram import Histogram
from leasekit.server.http import metrics as metrics_module
from leasekit.server.http.metrics import _DURATIONS, Metrics
from leasekit.server.roles import backlog
from leasekit.server.roles.gates import GateChange
from leasekit.server.roles.periodic import Put, Trigger
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.tally import Tally
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Beat, KindSettings, NewTask, Outcome, Settlement
from leasekit.wire import PurgeRequest, RedriveRequest

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana/leasekit.json"
ALERTS = DOCS / "prometheus/alerts.yml"
PROMTOOL = shutil.which("promtool")  # in Debian's package prometheus
OPERATIONS = DOCS / "operations.md"
NO_TX: Any = None
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(MemoryStore()) as engine:
        yield engine


async def samples(metrics: Metrics) -> Samples:
    text = (await metrics.exposition()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return (await samples(metrics)).get((name, frozenset(labels.items())))


async def put(engine: Engine, *kinds: str) -> None:
    for start in range(0, len(kinds), 1000):
        await engine.schedule([NewTask(kind=kind) for kind in kinds[start : start + 1000]])


async def settle(engine: Engine, kind: str, outcome: Outcome) -> None:
    claimed = await engine.claim(worker="w", kinds=[kind], limit=1, wait=0, claim_id=uuid.uuid4().hex)
    (task,) = claimed.tasks
    await engine.results("w", [Settlement(id=task.id, token=task.token, outcome=outcome)])


async def test_tasks_are_counted_by_kind_and_status(engine: Engine) -> None:
    await put(engine, "a", "a", "b")
    await engine.claim(worker="w", kinds=["a"], limit=1, wait=0, claim_id="c")
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_tasks", kind="a", status="new") == 1
    assert await value(metrics, "leasekit_tasks", kind="a", status="claimed") == 1
    assert await value(metrics, "leasekit_tasks", kind="b", status="new") == 1


async def test_a_kind_of_which_no_task_is_left_has_no_series(engine: Engine) -> None:
    answers = await engine.schedule([NewTask(kind="gone")])
    await put(engine, "stays")
    await engine.cancel([answer.id for answer in answers])
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_tasks", kind="gone", status="cancelled") == 1
    await engine.operations.purge(PurgeRequest())
    assert {labels for name, labels in await samples(metrics) if name == "leasekit_tasks"} == {
        frozenset({("kind", "stays"), ("status", "new")})
    }


async def test_ten_thousand_kinds_make_a_hundred_series_and_one(engine: Engine) -> None:
    await put(engine, *(f"kind-{n}" for n in range(10_000)))
    found = await samples(Metrics(engine))
    kinds = {dict(labels)["kind"]: count for (name, labels), count in found.items() if name == "leasekit_tasks"}
    assert len(kinds) == 101
    assert kinds["other"] == 9_900


async def test_a_kind_keeps_its_name_when_bigger_ones_come(engine: Engine) -> None:
    metrics = Metrics(engine)
    await put(engine, *(f"kind-{n}" for n in range(100)))
    await metrics.exposition()
    await put(engine, *["big"] * 1000)
    assert await value(metrics, "leasekit_tasks", kind="kind-0", status="new") == 1
    assert await value(metrics, "leasekit_tasks", kind="other", status="new") == 1000


async def test_of_the_first_the_biggest_have_a_name(engine: Engine) -> None:
    await put(engine, *(f"kind-{n}" for n in range(200)), "zzz", "zzz")
    assert await value(Metrics(engine), "leasekit_tasks", kind="zzz", status="new") == 2


async def test_a_kind_that_has_not_changed_for_an_hour_makes_room(engine: Engine) -> None:
    await put(engine, *(f"kind-{n}" for n in range(100)))
    now = [0.0]
    metrics = Metrics(engine, clock=lambda: now[0])
    await samples(metrics)
    now[0] = 3000
    await put(engine, "kind-7")
    await samples(metrics)
    await put(engine, "new", "newer", "newer")
    assert await value(metrics, "leasekit_tasks", kind="other", status="new") == 3
    now[0] = 3700
    await put(engine, "new", "kind-0")
    found = await samples(metrics)
    counts = {dict(labels)["kind"]: count for (name, labels), count in found.items() if name == "leasekit_tasks"}
    assert len(counts) == 101
    assert (counts["new"], counts["kind-0"], counts["kind-7"], counts["other"]) == (2, 2, 2, 3)


async def test_transactions_are_measured(engine: Engine) -> None:
    metrics = Metrics(engine)
    before = await value(metrics, "leasekit_commit_batch_size_sum") or 0
    await put(engine, *["a"] * 40)
    after = await samples(metrics)
    assert after["leasekit_commit_batch_size_sum", frozenset()] == before + 40 + 1  # the probe of the scrape
    count = after["leasekit_commit_batch_size_count", frozenset()]
    assert count == after["leasekit_commit_seconds_count", frozenset()]


async def test_claims_that_wait_are_shown(engine: Engine) -> None:
    metrics = Metrics(engine)
    waiting = asyncio.create_task(engine.claim(worker="w", kinds=["a"], limit=1, wait=60, claim_id="c"))
    while await value(metrics, "leasekit_claims_waiting") != 1:
        assert not waiting.done()
    assert await value(metrics, "leasekit_workers") == 1
    await put(engine, "a")
    await waiting
    assert await value(metrics, "leasekit_claims_waiting") == 0


async def test_closed_gates_and_dropped_tasks_are_shown(engine: Engine) -> None:
    await engine.schedule([NewTask(kind="k")])
    await engine.operations.set_gate(GateChange("kind", "k", "drop", None, None, None, None))
    await engine.operations.set_gate(GateChange("collection", "c", "pause", None, None, None, None))
    await engine.tick()
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_gate", kind="k", collection="", mode="drop") == 1
    assert await value(metrics, "leasekit_gate", kind="", collection="c", mode="pause") == 1
    assert await value(metrics, "leasekit_tasks_dropped_total", kind="k") == 1
    await engine.operations.set_gate(GateChange("kind", "k", "open", None, None, None, None))
    await engine.tick()
    assert await value(metrics, "leasekit_gate", kind="k", collection="", mode="drop") is None


async def test_settlements_deaths_and_redrives_are_counted(engine: Engine) -> None:
    metrics = Metrics(engine)
    scheduled = await engine.schedule([NewTask(kind="a"), NewTask(kind="a", max_attempts=1), NewTask(kind="b")])
    await settle(engine, "a", "success")
    await settle(engine, "a", "retry")
    await engine.operations.redrive(RedriveRequest(ids=[scheduled[1].id]))
    found = await samples(metrics)

    def count(name: str, **labels: str) -> float | None:
        return found.get((f"leasekit_{name}_total", frozenset(labels.items())))

    assert count("settlements", kind="a", outcome="success") == 1
    assert count("settlements", kind="a", outcome="retry") == 1
    assert count("tasks_died", kind="a") == 1
    assert count("redrives", kind="a") == 1
    assert count("tasks_scheduled", kind="a") == 2
    assert count("tasks_died", kind="b") == 0


async def test_a_repeated_settlement_counts_once(engine: Engine) -> None:
    await put(engine, "a")
    (task,) = (await engine.claim(worker="w", kinds=["a"], limit=1, wait=0, claim_id="c")).tasks
    for _ in range(2):
        await engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
    assert await value(Metrics(engine), "leasekit_settlements_total", kind="a", outcome="success") == 1
    assert await value(Metrics(engine), "leasekit_run_seconds_count", kind="a") == 1


async def test_removed_tasks_are_counted_by_who_removed_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(engine, "a", "a")
    await settle(engine, "a", "success")
    await engine.operations.purge(PurgeRequest())
    await settle(engine, "a", "success")
    monkeypatch.setattr(engine.sweeper._old, "_keep", 0.0)
    await engine.sweeper.sweep()
    for by in ("purge", "retention"):
        assert await value(Metrics(engine), "leasekit_tasks_removed_total", kind="a", by=by) == 1


async def test_a_transaction_that_is_undone_counts_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(engine, "a")
    tasks = (await engine.claim(worker="w", kinds=["a"], limit=1, wait=0, claim_id="c")).tasks
    commit = MemoryStore.transaction

    @contextmanager
    def full(store: MemoryStore) -> Iterator[Any]:
        with commit(store) as tx:
            yield tx
            raise Unavailable("full")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "transaction", full)
        with pytest.raises(Unavailable):
            await engine.results("w", [Settlement(id=tasks[0].id, token=tasks[0].token, outcome="success")])
    assert await value(Metrics(engine), "leasekit_settlements_total", kind="a", outcome="success") is None
    await engine.results("w", [Settlement(id=tasks[0].id, token=tasks[0].token, outcome="success")])
    assert await value(Metrics(engine), "leasekit_settlements_total", kind="a", outcome="success") == 1


async def test_waits_and_runs_are_timed_by_the_clocks_of_the_store() -> None:
    clock = [1e6]
    async with Engine(MemoryStore(), clock=lambda: clock[0]) as engine:
        await put(engine, "a")
        clock[0] += 7
        (task,) = (await engine.claim(worker="w", kinds=["a"], limit=1, wait=0, claim_id="c")).tasks
        clock[0] += 3
        for _ in range(2):
            await engine.heartbeat("w", [Beat(id=task.id, token=task.token, started=True)])
            clock[0] += 10
        await engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
        found = await samples(Metrics(engine))
    labels = frozenset({("kind", "a")})
    assert found["leasekit_wait_seconds_sum", labels] == 7
    assert found["leasekit_start_seconds_sum", labels] == 10
    assert found["leasekit_handler_seconds_sum", labels] == 20
    assert found["leasekit_run_seconds_sum", labels] == 23


async def test_a_run_that_no_heartbeat_told_of_began_with_its_claim() -> None:
    clock = [1e6]
    async with Engine(MemoryStore(), clock=lambda: clock[0]) as engine:
        await put(engine, "a")
        clock[0] += 7
        (task,) = (await engine.claim(worker="w", kinds=["a"], limit=1, wait=0, claim_id="c")).tasks
        clock[0] += 20
        await engine.results("w", [Settlement(id=task.id, token=task.token, outcome="success")])
        found = await samples(Metrics(engine))
    labels = frozenset({("kind", "a")})
    assert found["leasekit_start_seconds_sum", labels] == 7
    assert found["leasekit_handler_seconds_sum", labels] == 20


async def test_due_tasks_are_told_from_later_ones() -> None:
    clock = [1e6]
    async with Engine(MemoryStore(), clock=lambda: clock[0]) as engine:
        at = datetime.fromtimestamp(clock[0] + 100, UTC)
        await engine.schedule([NewTask(kind="a"), NewTask(kind="a", priority=0), NewTask(kind="a", at=at)])
        clock[0] += 30
        found = await samples(Metrics(engine))
    labels = frozenset({("kind", "a")})
    assert found["leasekit_tasks_due", labels] == 2
    assert found["leasekit_tasks_later", labels] == 1
    assert found["leasekit_oldest_due_seconds", labels] == 30


async def test_tasks_that_wait_for_others_are_counted(engine: Engine) -> None:
    await engine.schedule([NewTask(kind="a", id="first"), NewTask(kind="a", after=["first"])])
    await engine.schedule([NewTask(kind="b", delay=100.0)])
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_tasks_awaiting", kind="a") == 1
    assert await value(metrics, "leasekit_tasks_awaiting", kind="b") == 0
    await settle(engine, "a", "success")
    assert await value(metrics, "leasekit_tasks_awaiting", kind="a") == 0


async def test_keys_with_due_tasks_are_counted() -> None:
    clock = [1e6]
    async with Engine(MemoryStore(), clock=lambda: clock[0]) as engine:
        await engine.schedule([NewTask(kind="a", key=key) for key in ("x", "x", "y")])
        await engine.schedule([NewTask(kind="a", key="later", delay=100.0), NewTask(kind="a")])
        found = await samples(Metrics(engine))
    labels = frozenset({("kind", "a")})
    assert [found[f"leasekit_{name}", labels] for name in ("keys_due", "tasks_due", "tasks_later")] == [2, 4, 1]


async def test_one_number_of_a_backlog_follows_from_the_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_MOST", 4)
    monkeypatch.setattr(backlog, "_LEAST", 1)
    later = datetime.now(UTC) + timedelta(days=1)
    await engine.schedule([NewTask(kind="a") for _ in range(9)] + [NewTask(kind="a", at=later)])
    await engine.schedule([NewTask(kind="b", at=later) for _ in range(9)])
    found = await engine.queries.backlogs({"a": 10, "b": 9, "c": 0})
    assert [found[kind][1:3] for kind in "abc"] == [(9, 1), (0, 9), (0, 0)]


async def test_a_step_of_the_wall_clock_is_noted_in_both_directions() -> None:
    wall, boot = [1e6], [50.0]
    async with Engine(MemoryStore(), clock=lambda: wall[0], boot=lambda: boot[0]) as engine:
        for step in (0.0, 100.0, 0.2, -30.0):
            wall[0] += 1 + step
            boot[0] += 1
            await engine.tick()
        assert await value(Metrics(engine), "leasekit_clock_steps_total") == 2


def test_ten_thousand_kinds_have_a_hundred_labels_and_an_idle_one_makes_room() -> None:
    def happens(kind: str, at: float) -> UnitOfWork:
        turn = UnitOfWork(NO_TX, now=at, instant=at, random=Random(1))
        turn.counted[kind, "scheduled", ""] += 1
        return turn

    tally = Tally()
    for n in range(10_000):
        tally.add(happens(f"kind-{n}", n / 1000))
    assert len(tally.kinds) == 101
    assert tally.total("scheduled") == 10_000
    tally.add(happens("kind-0", 3000.0))
    tally.add(happens("late", 3609.0))
    assert {"late", "kind-0", "other"} <= tally.kinds.keys()
    assert "kind-1" not in tally.kinds
    assert len(tally.kinds) == 101


async def test_a_store_that_does_not_answer_costs_the_numbers_of_its_tasks_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> Any:
        raise Unavailable("away")

    await put(engine, "a")
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_store_up") == 1
    monkeypatch.setattr(engine.queries, "counts", fail)
    found = await samples(metrics)
    assert found["leasekit_store_up", frozenset()] == 0
    assert not [name for name, _ in found if name == "leasekit_tasks"]
    assert ("leasekit_claims_waiting", frozenset()) in found


async def test_a_label_cannot_break_the_format(engine: Engine) -> None:
    await put(engine, 'a"} 1\\')
    assert await value(Metrics(engine), "leasekit_tasks", kind='a"} 1\\', status="new") == 1


async def test_an_answer_is_counted_once(engine: Engine) -> None:
    metrics = Metrics(engine)
    metrics.count("/v1/tasks", "POST", 200)
    assert await value(metrics, "leasekit_http_requests_total", route="/v1/tasks", method="POST", status="200") == 1


async def test_strange_paths_and_methods_make_no_series_of_their_own(engine: Engine) -> None:
    metrics = Metrics(engine)
    for n in range(1000):
        metrics.count(None, f"M{n}", 404)
    assert await value(metrics, "leasekit_http_requests_total", route="other", method="other", status="404") == 1000


async def test_a_tally_counts_a_value_with_the_first_bound_that_it_does_not_pass() -> None:
    histogram = Histogram([1, 2, 5])
    for number in (1, 2, 3, 6):
        histogram.add(number)
    assert histogram.cumulated() == [1, 2, 3, 4]
    assert histogram.sum == 12


# The dashboard --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture
async def lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Samples]:
    """A scrape of a server to which everything has happened that a metric counts."""
    async with Engine(SqliteStore(tmp_path / "tasks.db")) as engine:
        await put(engine, "a", "a")
        await settle(engine, "a", "success")
        await engine.operations.purge(PurgeRequest())
        await engine.operations.set_gate(GateChange("kind", "dropped", "drop", None, None, None, None))
        await engine.operations.set_kind("limited", KindSettings(concurrency=1), by=None)
        await engine.operations.change_periodic(Put("p", PeriodicTaskItem(kind="a", every=60), None, is_declared=False))
        await engine.operations.change_periodic(Trigger("p", None, None))
        await put(engine, "d", "dropped", "limited", "limited")
        await engine.claim(worker="w", kinds=["limited"], limit=2, wait=0, claim_id="c")
        await engine.tick()
        metrics = Metrics(engine)
        metrics.count("/v1/tasks", "POST", 200)
        nodes = SimpleNamespace(alive=["this one"], company=SimpleNamespace(fault=None))
        with monkeypatch.context() as patch:  # these are for other stores, and for queues
            patch.setattr(engine, "neighbours", nodes)
            patch.setattr(engine, "enqueuer", SimpleNamespace(depths={QueueName("a", 2): 3}, failing=[]))
            found = await samples(metrics)
        yield found


_PART = re.compile(r"_(sum|count|bucket)$")


async def test_the_dashboard_asks_for_what_there_is_and_shows_all_of_it(lived: Samples, dashboard: Any) -> None:
    exposed = {name for name, _ in lived}
    asked = set(re.findall(r"\b(?:leasekit|process)_\w+", json.dumps(dashboard["panels"])))
    assert asked <= exposed
    ours = {_PART.sub("", name) for name in exposed if name.startswith("leasekit_")}
    assert ours == {_PART.sub("", name) for name in asked if name.startswith("leasekit_")}


async def test_what_has_lived_has_each_metric_that_there_is_and_operators_can_read_of_it(lived: Samples) -> None:
    named = set(re.findall(r'"(leasekit_\w+)"', inspect.getsource(metrics_module))) | {
        f"leasekit_{name}_seconds" for name, *_ in _DURATIONS
    }
    found = {re.sub(r"_(total|created)$", "", _PART.sub("", name)) for name, _ in lived if name.startswith("leasekit_")}
    assert found == named
    told = re.findall(r"^\| (`leasekit_.*?) \|", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert named == {re.sub(r"_total$", "", name) for name in re.findall(r"`(leasekit_\w+)", " ".join(told))}


async def test_the_dashboard_and_the_alerts_select_by_labels_that_there_are(lived: Samples, dashboard: Any) -> None:
    labels = {name: {label for found, of in lived if found == name for label, _ in of} for name, _ in lived}
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in [*targets, *(alert["expr"] for alert in alerts())]:
        for name, selected in re.findall(r"\b(leasekit_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", selected)) <= labels[name] | {"job"}, expression


# The alerts -----------------------------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


async def test_the_alerts_watch_what_there_is(lived: Samples) -> None:
    exposed = {name for name, _ in lived}
    for alert in alerts():
        names = set(re.findall(r"\bleasekit_\w+", alert["expr"]))
        assert names, alert
        assert names <= exposed, alert
        assert alert["annotations"]["summary"]
        assert alert["labels"]["severity"] in {"page", "ticket"}


async def test_there_is_an_example_of_each_alert() -> None:
    examples = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    assert [test["alertname"] for one in examples for test in one["alert_rule_test"]] == [
        alert["alert"] for alert in alerts()
    ]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_prometheus_takes_the_alerts_and_fires_them(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=ALERTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
async def test_prometheus_takes_the_metrics(engine: Engine) -> None:
    await put(engine, "a")
    text = await Metrics(engine).exposition()
    done = await asyncio.to_thread(
        subprocess.run, [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_each_alert_is_explained() -> None:
    explained = re.findall(r"^\| `(Leasekit\w+)` \|", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert explained == [alert["alert"] for alert in alerts()]


async def test_sets_of_labels_that_no_worker_has_are_counted_by_kind(engine: Engine) -> None:
    await engine.schedule([NewTask(kind="a", requires={"gpu": gpu}) for gpu in ("t4", "a100", "h100")])
    await put(engine, "b")
    metrics = Metrics(engine)
    await engine.claim(worker="v", kinds=["a"], limit=1, wait=0, claim_id="a", labels={"gpu": "t4"})
    assert await value(metrics, "leasekit_requirements_unmet", kind="a") == 2
    assert await value(metrics, "leasekit_requirements_unmet", kind="b") == 1
    await engine.claim(worker="w", kinds=["a", "b"], limit=1, wait=0, claim_id="b", labels={"gpu": "a100"})
    assert await value(metrics, "leasekit_requirements_unmet", kind="a") == 1
    assert await value(metrics, "leasekit_requirements_unmet", kind="b") == 0


async def test_what_is_unmet_of_a_kind_is_counted_however_many_tasks_of_other_kinds_wait(engine: Engine) -> None:
    await put(engine, "b")
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_requirements_unmet", kind="b") == 1
    for start in (0, 500):
        await engine.schedule([NewTask(kind=f"k{start + n // 2}") for n in range(1000)])
    assert await value(metrics, "leasekit_requirements_unmet", kind="b") == 1
    assert await value(metrics, "leasekit_requirements_unmet", kind="other") == 900  # and one is not looked at


async def test_the_dashboard_can_be_imported_anywhere(dashboard: Any) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "job", "kind"}
    assert "id" not in dashboard
