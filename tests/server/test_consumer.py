"""Leases that end: who takes them back, when, and when not."""

from random import Random
from typing import Any

import msgspec
import pytest

from leasekit.server.consumer import REAP_BATCH, reap
from leasekit.server.turn import Readied, Turn
from leasekit.task import Beat

pytestmark = pytest.mark.anyio


async def test_a_lease_that_ended_goes_back_to_enqueued_and_counts_a_crash(bench: Any) -> None:
    await bench.taken("a", claim_timeout=10)
    await bench.later(9.999)
    assert await bench.status("a") == "claimed"
    await bench.later(0.001)
    info = await bench.info("a")
    assert (info.status.value, info.crashes, info.attempt, info.worker) == ("enqueued", 1, 1, "w")
    assert [(run.outcome, run.fence, run.worker) for run in info.history] == [("expired", 1, "w")]
    assert await bench.ids() == ["a"]


async def test_all_leases_that_ran_out_are_counted_whoever_takes_them_back(bench: Any) -> None:
    tasks = [await bench.taken(task_id, claim_timeout=10) for task_id in ("seen", "beaten", "cancelled")]
    bench.clock.advance(10)
    await bench.beat(tasks[1])
    await bench.cancel("cancelled")
    assert bench.engine.expired == 2
    await bench.engine.tick()
    assert bench.engine.expired == 3


async def test_the_history_says_since_when_nothing_was_heard_and_from_whom(bench: Any) -> None:
    task = await bench.taken("a", heartbeat_timeout=20)
    await bench.beat(task)
    await bench.later(21)
    info = await bench.info("a")
    error = msgspec.json.decode(info.history[0].error)
    assert error == {
        "type": "LeaseExpired",
        "message": "nothing was heard from worker 'w' since 1970-01-12 13:46:40 UTC, 21 s ago (its ttl is 20 s)",
    }
    assert info.error == info.history[0].error


async def test_a_processing_lease_ends_a_heartbeat_timeout_after_its_last_beat(bench: Any) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    await bench.later(9)
    await bench.beat(task)
    await bench.later(19.999)
    assert await bench.status("a") == "processing"
    await bench.later(0.001)
    assert await bench.status("a") == "enqueued"


async def test_what_is_taken_back_queues_behind_what_was_due_before(bench: Any) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.advance(5)
    await bench.put("b")
    await bench.later(5)
    assert await bench.ids() == ["b", "a"]


async def test_many_leases_are_taken_back_in_small_batches_and_all_of_them(bench: Any) -> None:
    count = 2 * REAP_BATCH + 1
    await bench.put(*(f"t{n}" for n in range(count)), claim_timeout=10)
    await bench.claim(limit=1000)
    await bench.later(10)
    assert await bench.engine.stats() == {"kinds": {"k": {"enqueued": count}}}


async def test_reaping_is_limited_per_look(bench: Any) -> None:
    await bench.put(*(f"t{n}" for n in range(1200)), claim_timeout=10)
    for _ in range(2):
        await bench.claim(limit=1000)
    await bench.later(10)
    assert (await bench.engine.stats())["kinds"]["k"] == {"enqueued": 1000, "claimed": 200}
    await bench.later(0)
    assert (await bench.engine.stats())["kinds"]["k"] == {"enqueued": 1200}


async def test_what_is_taken_back_is_told_as_ready(bench: Any) -> None:
    await bench.put("a", "b", claim_timeout=10)
    await bench.put("c", claim_timeout=10, max_crashes=0)
    await bench.claim()
    with bench.engine._store.transaction() as tx:
        turn = Turn(tx, now=bench.clock.wall + 10, instant=0.0, random=Random(1))
        assert reap(turn) == 3
        assert turn.readied() == {"k": Readied(2, None)}


# Restart


async def test_a_wall_clock_set_back_while_the_server_was_away_takes_no_time_back(bench: Any) -> None:
    await bench.put("a")
    bench.clock.step(-3600)
    await bench.restart()
    assert await bench.ids() == ["a"]


async def test_nor_does_it_where_the_last_that_was_written_was_a_claim(bench: Any) -> None:
    await bench.put("a")
    await bench.later(100)
    task = await bench.take()
    bench.clock.step(-3600)
    await bench.restart()
    await bench.settle(task, "release")
    assert await bench.ids() == ["a"]
    await bench.later(301 * 1.1)
    assert await bench.status("a") == "enqueued", "its lease has ended"


async def test_a_restart_gives_every_live_lease_its_whole_ttl_again(bench: Any) -> None:
    claimed = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    beaten = await bench.taken("b", claim_timeout=100, heartbeat_timeout=20)
    await bench.beat(beaten)
    bench.clock.advance(15)
    await bench.restart()
    # A buffered lease may have been beaten for its heartbeat timeout: it gets the longer of the two.
    bench.clock.advance(19.999)
    assert (await bench.beat(claimed, started=False)).verdict == "renewed"
    assert (await bench.beat(beaten)).verdict == "renewed"


async def test_a_restart_shortens_no_lease(bench: Any) -> None:
    task = await bench.taken("a", claim_timeout=100, heartbeat_timeout=10)
    await bench.restart()
    bench.clock.advance(99)
    assert (await bench.beat(task)).verdict == "renewed"


async def test_leases_that_nobody_holds_end_after_a_restart_too(bench: Any) -> None:
    await bench.put(*(f"t{n}" for n in range(50)), claim_timeout=10, heartbeat_timeout=10)
    await bench.claim()
    await bench.restart()
    await bench.later(10)
    assert len(await bench.ids()) < 50, "their ends are spread"
    await bench.later(1)
    assert (await bench.engine.stats())["kinds"]["k"].get("enqueued", 0) > 0
    await bench.later(1)
    info = [await bench.info(f"t{n}") for n in range(50)]
    assert all(one.crashes == 1 for one in info)


# Clocks


async def test_a_wall_clock_that_is_set_back_does_not_move_time_back(bench: Any) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.step(-3600)
    await bench.later(10)
    assert await bench.status("a") == "enqueued"
    assert await bench.ids() == ["a"]


async def test_a_wall_clock_that_jumps_ahead_ends_no_lease_before_its_ttl(bench: Any) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    bench.clock.step(3600)
    await bench.later(5)
    assert (await bench.beat(task)).verdict == "renewed"
    bench.clock.step(3600)
    await bench.later(9)
    assert await bench.status("a") == "processing"
    await bench.later(11)
    assert await bench.status("a") == "enqueued"


async def test_a_beat_is_not_too_late_because_the_clock_jumped(bench: Any) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    bench.clock.step(1_000_000)
    assert (await bench.beat(task)).verdict == "renewed"


async def test_a_jump_is_not_forgotten_when_its_first_transaction_fails(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await bench.taken("a", claim_timeout=10)
    bench.clock.step(3600)
    ranks = {rank.name: rank for rank in bench.engine._commit._queues}

    def fail(*_: Any) -> Any:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(type(ranks["heartbeats"]), "apply", property(lambda _: fail))
        with pytest.raises(RuntimeError, match="boom"):
            await bench.engine.heartbeat("w", [Beat(id="x", token="t")])
    await bench.later(1)
    assert await bench.status("a") == "claimed"
    assert (await bench.beat(task)).verdict == "renewed"


async def test_a_wall_clock_that_is_a_little_ahead_is_followed(bench: Any) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.step(0.9)
    await bench.later(9.1)
    assert await bench.status("a") == "enqueued"
