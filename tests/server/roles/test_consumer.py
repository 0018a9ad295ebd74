"""Leases that end: who takes them back, when, and when not."""

from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from leasekit.server.roles.consumer import REAP_BATCH, reap, silence
from leasekit.server.store import Trigger
from leasekit.server.unit_of_work import NewlyDue, UnitOfWork
from leasekit.task import Beat, FixedDelays, Stats, Status
from tests.sampling import slow_after
from tests.server.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]

HELD = Trigger(
    1, "a", "k", 2, 10.0, 20.0, Status.PROCESSING, 7, 3, 1, 1, False, "w", "token", 500.0, None  # noqa: FBT003
)  # fmt: skip


async def test_a_lease_that_ended_goes_back_to_enqueued_and_counts_a_crash(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    await bench.later(9.999)
    assert await bench.status("a") == "claimed"
    await bench.later(0.001)
    info = await bench.info("a")
    assert (info.status.value, info.crashes, info.attempt, info.worker) == ("enqueued", 1, 1, "w")
    assert [(run.outcome, run.fence, run.worker) for run in info.history] == [("expired", 1, "w")]
    assert await bench.ids() == ["a"]


async def test_an_expiry_that_counts_as_an_attempt_waits_by_the_retry_policy(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10, expiry="retry", max_crashes=0, retry=FixedDelays(waits=[30]))
    await bench.later(10)
    info = await bench.info("a")
    assert (info.status, info.crashes) == (Status.RETRIABLE_FAILURE, 0)
    assert await bench.ids() == []
    await bench.later(29.999)
    assert await bench.ids() == []
    await bench.later(0.001)
    assert await bench.ids() == ["a"]


async def test_all_leases_that_ran_out_are_counted_whoever_takes_them_back(bench: Bench) -> None:
    tasks = [await bench.taken(task_id, claim_timeout=10) for task_id in ("seen", "beaten", "cancelled")]
    bench.clock.advance(10)
    await bench.beat(tasks[1])
    await bench.cancel("cancelled")
    assert bench.engine.commit.tally.total("expired") == 2
    await bench.engine.tick()
    assert bench.engine.commit.tally.total("expired") == 3


async def test_the_history_says_since_when_nothing_was_heard_and_from_whom(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=20, heartbeat_timeout=20)
    await bench.beat(task)
    await bench.later(21)
    info = await bench.info("a")
    error = msgspec.json.decode(info.history[0].error)
    assert error == {
        "type": "LeaseExpired",
        "message": "nothing was heard from worker 'w' since 1970-01-12 13:46:40 UTC, 21 s ago (its ttl is 20 s)",
    }
    assert info.error == info.history[0].error


async def test_after_a_restart_the_history_still_says_when_the_worker_was_heard_last(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=20, heartbeat_timeout=20)
    await bench.beat(task)
    bench.clock.advance(100)
    await bench.restart()
    await bench.later(23)
    message = msgspec.json.decode((await bench.info("a")).history[0].error)["message"]
    assert "since 1970-01-12 13:46:40 UTC, 123 s ago (its ttl is 20 s, counted anew when the process that" in message


async def test_a_lease_ends_by_the_clock_of_its_server_though_an_earlier_one_was_hours_ahead(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    for _ in range(500):
        bench.clock.advance(9)
        await bench.beat(task)
    bench.clock.step(-4500)
    await bench.restart()
    await bench.later(11)
    assert await bench.status("a") == "enqueued"


async def test_a_processing_lease_ends_a_heartbeat_timeout_after_its_last_beat(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    await bench.later(9)
    await bench.beat(task)
    await bench.later(19.999)
    assert await bench.status("a") == "processing"
    await bench.later(0.001)
    assert await bench.status("a") == "enqueued"


async def test_what_is_taken_back_queues_behind_what_was_due_before(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.advance(5)
    await bench.put("b")
    await bench.later(5)
    assert await bench.ids() == ["b", "a"]


async def test_many_leases_are_taken_back_in_small_batches_and_all_of_them(bench: Bench) -> None:
    count = 2 * REAP_BATCH + 1
    await bench.put(*(f"t{n}" for n in range(count)), claim_timeout=10)
    await bench.claim(limit=1000)
    await bench.later(10)
    assert await bench.engine.queries.stats() == Stats(kinds={"k": {"enqueued": count}})


async def test_reaping_is_limited_per_look(bench: Bench) -> None:
    await bench.put(*(f"t{n}" for n in range(1200)), claim_timeout=10)
    for _ in range(2):
        await bench.claim(limit=1000)
    await bench.later(10)
    assert (await bench.engine.queries.stats()).kinds["k"] == {"enqueued": 1000, "claimed": 200}
    await bench.later(0)
    assert (await bench.engine.queries.stats()).kinds["k"] == {"enqueued": 1200}


async def test_what_is_taken_back_is_told_as_ready(bench: Bench) -> None:
    await bench.put("a", "b", claim_timeout=10)
    await bench.put("c", claim_timeout=10, max_crashes=0)
    await bench.claim()
    with bench.engine._store.transaction() as tx:
        turn = UnitOfWork(tx, now=bench.clock.wall + 10, instant=bench.clock.wall + 10, random=Random(1))
        assert reap(turn) == 3
        assert turn.readied() == {"k": NewlyDue(2, None)}


# Restart


async def test_a_wall_clock_set_back_while_the_server_was_away_takes_no_time_back(bench: Bench) -> None:
    await bench.put("a")
    bench.clock.step(-3600)
    await bench.restart()
    assert await bench.ids() == ["a"]


async def test_nor_does_it_where_the_last_that_was_written_was_a_claim(bench: Bench) -> None:
    await bench.put("a")
    await bench.later(100)
    task = await bench.take()
    bench.clock.step(-3600)
    await bench.restart()
    await bench.settle(task, "release")
    assert await bench.ids() == ["a"]
    await bench.later(301 * 1.1)
    assert await bench.status("a") == "enqueued", "its lease has ended"


async def test_a_restart_gives_every_live_lease_its_whole_ttl_again(bench: Bench) -> None:
    claimed = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    beaten = await bench.taken("b", claim_timeout=100, heartbeat_timeout=20)
    await bench.beat(beaten)
    bench.clock.advance(15)
    await bench.restart()
    # A buffered lease may have been beaten for its heartbeat timeout: it gets the longer of the two.
    bench.clock.advance(19.999)
    assert (await bench.beat(claimed, started=False)).verdict == "renewed"
    assert (await bench.beat(beaten)).verdict == "renewed"


async def test_a_restart_shortens_no_lease(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=100, heartbeat_timeout=10)
    await bench.restart()
    bench.clock.advance(99)
    assert (await bench.beat(task)).verdict == "renewed"


@pytest.mark.parametrize("step", slow_after(1, [3600.0, -3600.0, 0.0]))
async def test_a_lease_that_nobody_holds_ends_though_no_server_is_up_for_its_ttl(bench: Bench, step: float) -> None:
    await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    for passed in range(1, 13):
        bench.clock.advance(1)
        bench.clock.step(step)
        await bench.restart()
        assert await bench.status("a") == ("claimed" if passed < 12 else "enqueued"), passed


async def test_each_beat_gives_a_lease_its_whole_ttl_at_the_next_restart(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    for _ in range(10):
        bench.clock.advance(9)
        await bench.restart()
        bench.clock.advance(9)
        assert (await bench.beat(task)).verdict == "renewed"


async def test_a_new_grant_gives_a_lease_its_whole_ttl_at_the_next_restart(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    await bench.restart()
    await bench.later(11)
    task = await bench.take()
    bench.clock.advance(9)
    await bench.restart()
    bench.clock.advance(9)
    assert (await bench.beat(task)).verdict == "renewed"


async def test_leases_that_nobody_holds_end_after_a_restart_too(bench: Bench) -> None:
    await bench.put(*(f"t{n}" for n in range(50)), claim_timeout=10, heartbeat_timeout=10)
    await bench.claim()
    await bench.restart()
    await bench.later(10)
    assert len(await bench.ids()) < 50, "their ends are spread"
    await bench.later(1)
    assert (await bench.engine.queries.stats()).kinds["k"].get("enqueued", 0) > 0
    await bench.later(1)
    info = [await bench.info(f"t{n}") for n in range(50)]
    assert all(one.crashes == 1 for one in info)


# Clocks


async def test_a_wall_clock_that_is_set_back_does_not_move_time_back(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.step(-3600)
    await bench.later(10)
    assert await bench.status("a") == "enqueued"
    assert await bench.ids() == ["a"]


async def test_a_wall_clock_that_jumps_ahead_changes_no_end_of_a_lease(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    bench.clock.step(3600)
    await bench.later(5)
    assert (await bench.beat(task)).verdict == "renewed"
    bench.clock.step(1_000_000)
    await bench.later(9.999)
    assert await bench.status("a") == "processing"
    await bench.later(0.001)
    assert await bench.status("a") == "enqueued"


async def test_nor_do_many_small_steps(bench: Bench) -> None:
    """As a daemon makes them that corrects the wall clock: each too small to be called a jump."""
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    for _ in range(99):
        bench.clock.step(0.9)
        await bench.later(0.1)
    assert await bench.status("a") == "claimed"
    assert (await bench.beat(task)).verdict == "renewed"


async def test_what_is_due_follows_the_wall_clock_however_little_it_is_ahead(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "retry", retry_after=10.0)
    for _ in range(10):
        bench.clock.step(0.9)
        assert await bench.ids() == []
        await bench.later(0.1)
    assert await bench.ids() == ["a"]


async def test_runtimes_do_not_follow_the_wall_clock(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=60)
    await bench.beat(task)
    bench.clock.step(3600)
    await bench.later(59)
    assert (await bench.beat(task)).verdict == "renewed"
    await bench.later(1)
    assert (await bench.beat(task)).verdict == "gone"


async def test_after_steps_the_history_says_by_the_wall_clock_since_when_nothing_was_heard(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=20, heartbeat_timeout=20, max_crashes=0)
    await bench.beat(task)
    bench.clock.step(3600)
    await bench.later(21)
    since = "since 1970-01-12 14:46:40 UTC, 21 s ago (its ttl is 20 s)"
    info = await bench.info("a")
    assert since in msgspec.json.decode(info.history[0].error)["message"]
    assert since in (info.reason or "")


async def test_a_stall_is_not_forgotten_when_its_first_transaction_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await bench.taken("a", claim_timeout=10)
    bench.engine._clock._stall = 5.0  # type: ignore[attr-defined]  # that of a single writer
    bench.clock.advance(3600)
    ranks = {rank.name: rank for rank in bench.engine.commit._queues}

    def fail(*_: Any) -> Any:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(type(ranks["heartbeats"]), "apply", property(lambda _: fail))
        with pytest.raises(RuntimeError, match="boom"):
            await bench.engine.heartbeat("w", [Beat(id="x", token="t")])
    await bench.later(1)
    assert await bench.status("a") == "claimed"
    assert (await bench.beat(task)).verdict == "renewed"


# What is known of who vanished


def test_a_lease_that_ran_out_says_since_when_nothing_was_heard_and_from_whom() -> None:
    held = replace(HELD, next_trigger_at=500.0)
    said = "nothing was heard from worker 'w' since 1970-01-01 00:08:00 UTC, 21 s ago (its ttl is 20 s)"
    assert silence(held, now=501.0, instant=501.0) == said


@pytest.mark.parametrize(("heartbeat_at", "since"), [(None, "00:00:40 UTC, 460 s"), (90.0, "00:01:30 UTC, 410 s")])
def test_a_lease_that_a_restart_has_extended_says_since_when_nothing_was_heard(
    heartbeat_at: float | None, since: str
) -> None:
    held = replace(HELD, next_trigger_at=500.0, was_extended=True, claimed_at=40.0, heartbeat_at=heartbeat_at)
    assert silence(held, now=500.0, instant=501.0) == (
        f"nothing was heard from worker 'w' since 1970-01-01 {since} ago (its ttl is 20 s, counted anew when the "
        "process that serves the store had changed or stalled)"
    )


def test_of_a_buffered_task_it_claims_no_more_than_it_knows() -> None:
    """It may have been beaten for either of the two ttls: since the later of the two moments nothing was heard."""
    held = replace(HELD, status=Status.CLAIMED, next_trigger_at=500.0)
    assert "since 1970-01-01 00:08:10 UTC, 11 s ago (its ttl is 10 s); its handler had not begun" in silence(
        held, now=501.0, instant=501.0
    )


def test_a_body_that_ran_too_long_is_no_silent_worker() -> None:
    held = replace(HELD, next_trigger_at=500.0, max_runtime=60.0, run_until=490.0)
    said = silence(held, now=501.0, instant=501.0)
    assert said.startswith("no beat was accepted from worker 'w' since")
    assert said.endswith(": its max_runtime of 60 s was over")


def test_a_body_that_may_still_run_is_not_said_to_run_too_long() -> None:
    held = replace(HELD, next_trigger_at=500.0, max_runtime=60.0, run_until=510.0)
    assert "max_runtime" not in silence(held, now=501.0, instant=501.0)
