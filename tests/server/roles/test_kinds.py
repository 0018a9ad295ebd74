"""The settings of kinds: what a task takes from its kind, and who hears of a change."""
# pyright: reportPrivateUsage=false

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from leasekit.errors import Unavailable
from leasekit.server import declarations
from leasekit.server.engine import Engine
from leasekit.server.store import Store
from leasekit.server.store.kind_defaults import KindDefaults
from leasekit.server.store.memory import MemoryStore
from leasekit.task import DEFAULTS, CompleteSettings, FixedDelays, KindInfo, KindSettings, NewTask, Status
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def put(bench: Bench, settings: KindSettings | None, *, kind: str = "k") -> KindInfo | None:
    return await bench.engine.operations.set_kind(kind, settings, by="operator")


async def test_settings_are_kept_with_when_and_by_whom_they_were_changed(bench: Bench) -> None:
    settings = KindSettings(max_attempts=3, retention=3600.0)
    info = await put(bench, settings)
    at = datetime.fromtimestamp(bench.clock.wall, UTC)
    assert info == KindInfo(kind="k", settings=settings, changed_at=at, changed_by="operator")
    assert await bench.engine.queries.kinds() == [info]
    await bench.restart()
    assert await bench.engine.queries.kinds() == [info]


async def test_a_task_takes_from_its_kind_what_it_does_not_say(bench: Bench) -> None:
    await put(bench, KindSettings(priority=1, claim_timeout=50.0, heartbeat_timeout=60.0, max_runtime=70.0))
    task = await bench.taken("a", claim_timeout=20.0)
    assert (task.ttl, task.max_runtime, (await bench.info("a")).priority) == (20, 70, 1)
    assert (await bench.beat(task)).ttl == 60


async def declared(bench: Bench, **settings: Any) -> KindSettings:
    info = await bench.engine.operations.set_kind("k", KindSettings(**settings), by="worker", is_declared=True)
    assert info is not None
    return info.settings


async def test_code_changes_only_the_settings_of_which_it_says_something_new(bench: Bench) -> None:
    await put(bench, KindSettings(priority=1, max_attempts=9))
    assert await declared(bench, max_attempts=3, rate=5.0, burst=9) == KindSettings(
        priority=1, max_attempts=3, rate=5.0, burst=9
    )
    await put(bench, KindSettings(priority=1, max_attempts=4, rate=6.0, burst=9))
    assert await declared(bench, max_attempts=3, rate=5.0, weight=2.0) == KindSettings(
        priority=1, max_attempts=4, rate=6.0, weight=2.0
    )


async def test_code_wins_as_a_whole_where_it_contradicts_what_was_changed_by_hand(bench: Bench) -> None:
    await declared(bench, rate=5.0)
    await put(bench, KindSettings(priority=1))
    assert await declared(bench, rate=5.0, burst=9) == KindSettings(rate=5.0, burst=9)


async def test_an_older_declaration_counts_again_once_the_newer_one_is_forgotten(bench: Bench) -> None:
    await declared(bench, weight=1.0)
    assert await declared(bench, weight=2.0) == KindSettings(weight=2.0)
    await bench.later(declarations.FORGOTTEN - 1)
    assert await declared(bench, weight=1.0) == KindSettings(weight=2.0)
    await declared(bench, weight=2.0)  # it is noted
    await bench.later(2)
    assert await declared(bench, weight=1.0) == KindSettings(weight=2.0)
    await bench.later(declarations.FORGOTTEN)
    assert await declared(bench, weight=1.0) == KindSettings(weight=1.0)


async def test_a_repeated_declaration_is_only_noted(bench: Bench) -> None:
    await declared(bench, weight=2.0)
    before = await bench.engine.queries.kinds()
    await bench.later(100)
    await declared(bench, weight=2.0)
    (info,) = await bench.engine.queries.kinds()
    assert info == msgspec.structs.replace(before[0], declared_at=info.declared_at)
    assert info.declared_at == datetime.fromtimestamp(bench.clock.wall, UTC)


async def test_settings_hold_after_a_restart_too(bench: Bench) -> None:
    await put(bench, KindSettings(priority=1))
    await bench.restart()
    await bench.put("a")
    assert (await bench.info("a")).priority == 1


async def test_crashes_and_time_outs_count_as_the_kind_says(bench: Bench) -> None:
    await put(bench, KindSettings(max_crashes=0, heartbeat_timeout=10.0))
    await bench.taken("a")
    await bench.later(11)
    assert await bench.status("a") == Status.DEAD
    await put(bench, KindSettings(expiry="retry", retry=FixedDelays(waits=[100]), heartbeat_timeout=10.0))
    await bench.taken("b")
    await bench.later(11)
    assert await bench.status("b") == Status.RETRIABLE_FAILURE


async def test_requests_of_one_transaction_agree_on_the_settings_before_it(bench: Bench) -> None:
    """A change comes last in its transaction: what is remembered of kinds is committed."""
    await asyncio.gather(put(bench, KindSettings(priority=0)), bench.put("a"))
    assert (await bench.info("a")).priority in (0, 2)
    await bench.put("b")
    assert (await bench.info("b")).priority == 0


async def test_a_change_is_an_event_and_a_line_of_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="leasekit.server")
    events = bench.engine.feed.follow(kind="k")
    await anext(events)
    await put(bench, KindSettings(priority=0))
    await put(bench, KindSettings(priority=0))  # changes nothing
    await put(bench, None)
    heard = b""
    while heard.count(b"data:") < 2:
        heard += await anext(events)
    assert heard.count(b'"kind_changed"') == heard.count(b'"worker":"operator"') == 2
    assert [record.getMessage() for record in caplog.records if "kind" in record.getMessage()] == [
        "operator has set the settings of kind 'k': {\"priority\":0}",
        "operator has set the settings of kind 'k': {\"priority\":0}",
        "operator has removed the settings of kind 'k'",
    ]


# What a node remembers


def remembered(store: Store, kinds: KindDefaults) -> dict[str, CompleteSettings]:
    with store.transaction() as tx:
        return dict(kinds.read(tx))


def change(store: Store, kind: str, settings: bytes | None) -> None:
    with store.transaction() as tx:
        tx.set_kind(kind, settings, at=1.0, by=None)


def test_a_node_reads_what_has_changed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    store, kinds = MemoryStore(), KindDefaults()
    assert remembered(store, kinds) == {}
    change(store, "a", b'{"priority":0}')
    change(store, "b", b'{"priority":1}')
    assert {kind: settings.priority for kind, settings in remembered(store, kinds).items()} == {"a": 0, "b": 1}
    change(store, "a", None)
    assert {kind: settings.priority for kind, settings in remembered(store, kinds).items()} == {"b": 1}
    with store.transaction() as tx:
        monkeypatch.setattr(type(tx), "kinds", None)
        assert kinds.read(tx).keys() == {"b"}


def test_a_store_that_was_put_back_is_read_anew() -> None:
    store, kinds = MemoryStore(), KindDefaults()
    for _ in range(3):
        change(store, "a", b'{"priority":0}')
    assert remembered(store, kinds).keys() == {"a"}
    older = MemoryStore()
    change(older, "b", b'{"priority":1}')
    assert remembered(older, kinds).keys() == {"b"}


def test_damaged_settings_have_no_effect_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    store, kinds = MemoryStore(), KindDefaults()
    change(store, "a", b'{"priority":9}')
    change(store, "b", b"{")
    change(store, "c", b'{"of_a_newer_leasekit":1,"priority":0}')
    assert {kind: settings.priority for kind, settings in remembered(store, kinds).items()} == {"c": 0}
    assert len(caplog.records) == 2


async def test_what_is_remembered_goes_when_the_store_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(bench, KindSettings(priority=0))
    await bench.put("a")
    kinds = bench.engine.commit.kinds
    assert kinds._of_kind

    def fail(*_: object) -> None:
        raise Unavailable("the store failed")

    monkeypatch.setattr(KindDefaults, "read", fail)
    with pytest.raises(Unavailable):
        await bench.put("b")
    assert not kinds._of_kind


async def test_a_task_of_a_kind_without_settings_has_the_defaults() -> None:
    async with Engine(MemoryStore()) as engine:
        await engine.schedule([NewTask(kind="k", id="a")])
        info = await engine.queries.get("a")
    assert info is not None
    assert info.priority == DEFAULTS.priority
