"""`/metrics`: numbers that are right, for no more series than are known beforehand, and nothing secret."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.histogram import Histogram
from leasekit.server.http.metrics import Metrics
from leasekit.server.store.memory import MemoryStore
from leasekit.task import NewTask
from leasekit.wire import PurgeRequest

pytestmark = pytest.mark.anyio

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/leasekit.json"
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
    await engine.purge(PurgeRequest())
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


async def test_a_store_that_does_not_answer_costs_the_numbers_of_its_tasks_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> Any:
        raise Unavailable("away")

    await put(engine, "a")
    metrics = Metrics(engine)
    assert await value(metrics, "leasekit_store_up") == 1
    monkeypatch.setattr(engine, "stats", fail)
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


async def test_the_dashboard_asks_for_what_there_is_and_shows_all_of_it(engine: Engine, dashboard: Any) -> None:
    await put(engine, "a")
    metrics = Metrics(engine)
    metrics.count("/v1/tasks", "POST", 200)
    exposed = {name for name, _ in await samples(metrics)}
    asked = set(re.findall(r"\b(?:leasekit|process)_\w+", json.dumps(dashboard["panels"])))
    assert asked <= exposed
    ours = {name for name in exposed if name.startswith("leasekit_")}
    assert ours - asked <= {"leasekit_commit_seconds_sum", "leasekit_commit_seconds_count"}


async def test_the_dashboard_can_be_imported_anywhere(dashboard: Any) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "job", "kind"}
    assert "id" not in dashboard
