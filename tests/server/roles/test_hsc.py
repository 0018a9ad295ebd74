"""What holders ask for: heartbeats and results."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import UNSET, Raw

from leasekit.server.ids import successor_id
from leasekit.server.roles import hsc
from leasekit.task import Beat, FixedDelays, NewTask, Outcome, Polynomial, Settlement
from tests.server.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]


# Heartbeats


async def test_the_first_beat_makes_it_processing(bench: Bench) -> None:
    task = await bench.taken("a")
    assert (await bench.beat(task)).verdict == "renewed"
    assert await bench.status("a") == "processing"


async def test_a_buffered_task_stays_claimed(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    assert (await bench.beat(task, started=False)).ttl == 20
    assert await bench.status("a") == "claimed"
    bench.clock.advance(19)
    assert (await bench.beat(task, started=False)).verdict == "renewed"


async def test_a_started_task_does_not_go_back_into_the_buffer(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.beat(task)
    await bench.beat(task, started=False)
    assert await bench.status("a") == "processing"


async def test_a_claim_grants_the_claim_timeout_and_a_beat_the_heartbeat_timeout(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=20)
    assert task.ttl == 10
    bench.clock.advance(9)
    assert (await bench.beat(task)).ttl == 20
    bench.clock.advance(19)
    assert (await bench.beat(task)).verdict == "renewed"


async def test_a_beat_brings_no_end_nearer_for_its_answer_may_not_be_heard(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=300, heartbeat_timeout=20)
    for started in (False, True):
        assert (await bench.beat(task, started=started)).ttl == 20
    await bench.later(299)
    assert await bench.ids() == []
    assert (await bench.beat(task)).ttl == 20
    await bench.later(19)
    assert await bench.ids() == []
    await bench.later(1)
    assert await bench.ids() == ["a"]


@pytest.mark.parametrize("ttls", [(100.0, 20.0), (20.0, 100.0)])
async def test_after_a_restart_a_lease_lasts_as_long_as_its_holder_may_believe(
    bench: Bench, ttls: tuple[float, float]
) -> None:
    """The wall clock was set while the server was away: what was kept of the lease's end means nothing."""
    task = await bench.taken("a", claim_timeout=ttls[0], heartbeat_timeout=ttls[1])
    await bench.beat(task)
    bench.clock.step(3600)
    await bench.restart()
    await bench.later(99)
    assert await bench.ids() == []
    await bench.later(11)
    assert await bench.ids() == ["a"]


async def test_a_run_that_lasted_too_long_stays_gone_though_a_restart_sets_the_clock_back(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=10)
    await bench.beat(task)
    bench.clock.advance(10)
    assert (await bench.beat(task)).verdict == "gone"
    bench.clock.step(-3600)
    await bench.restart()
    assert (await bench.beat(task)).verdict == "gone"


async def test_a_run_is_renewed_for_its_max_runtime_and_counts_as_a_crash_when_its_lease_has_ended(
    bench: Bench,
) -> None:
    task = await bench.taken("a", max_runtime=25, claim_timeout=20, heartbeat_timeout=20)
    for _ in range(2):
        assert (await bench.beat(task)).verdict == "renewed"
        bench.clock.advance(12)
    assert (await bench.beat(task)).verdict == "renewed"
    await bench.later(1)
    verdict = await bench.beat(task)
    assert (verdict.verdict, verdict.reason) == ("gone", "overdue")
    assert (await bench.ids(), (await bench.info("a")).crashes) == ([], 0)
    await bench.later(19)
    assert (await bench.beat(task)).reason == "overdue"
    assert (await bench.ids(), (await bench.info("a")).crashes) == (["a"], 1)


async def test_a_lease_that_expired_before_the_max_runtime_is_not_said_to_be_overdue(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=25, claim_timeout=20, heartbeat_timeout=20)
    await bench.beat(task)
    await bench.later(20)
    assert (await bench.beat(task)).reason == "expired"
    await bench.later(20)
    assert (await bench.beat(task)).reason == "expired"


async def test_max_runtime_counts_from_the_first_beat_of_a_body_that_has_begun(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=10)
    await bench.beat(task, started=False)
    bench.clock.advance(100)
    assert [(await bench.beat(task)).verdict for _ in range(2)] == ["renewed"] * 2
    bench.clock.advance(10)
    assert (await bench.beat(task)).verdict == "gone"


async def test_max_runtime_counts_anew_for_the_next_run(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=10)
    await bench.beat(task)
    bench.clock.advance(9)
    await bench.settle(task, "release")
    again = await bench.take()
    await bench.beat(again)
    bench.clock.advance(9)
    assert (await bench.beat(again)).verdict == "renewed"


async def test_what_a_run_that_lasted_too_long_has_finished_counts(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=10)
    await bench.beat(task)
    bench.clock.advance(10)
    assert (await bench.beat(task)).verdict == "gone"
    assert (await bench.settle(task)).verdict == "settled"


async def test_max_runtime_outlives_a_restart(bench: Bench) -> None:
    task = await bench.taken("a", max_runtime=10)
    await bench.beat(task)
    await bench.restart()
    bench.clock.advance(10)
    assert (await bench.beat(task)).verdict == "gone"


async def test_a_beat_at_the_very_end_is_too_late(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    beat = await bench.beat(task)
    assert (beat.verdict, beat.reason) == ("gone", "expired")


async def test_what_was_said_to_be_gone_stays_gone_though_a_restart_gives_leases_more_time(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    assert [(await bench.beat(task)).verdict for _ in range(2)] == ["gone"] * 2
    await bench.restart()
    assert (await bench.beat(task)).reason == "expired"
    info = await bench.info("a")
    assert (info.status, info.crashes, [run.outcome for run in info.history]) == ("enqueued", 1, ["expired"])


async def test_a_late_beat_throws_no_finished_work_away(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    assert (await bench.beat(task)).verdict == "gone"
    assert (await bench.settle(task)).verdict == "settled"


async def test_a_beat_never_revives_a_lease_that_was_taken_back(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    await bench.later(10)
    assert await bench.status("a") == "enqueued"
    assert (await bench.beat(task)).reason == "expired"
    assert await bench.status("a") == "enqueued"


async def test_a_beat_says_why_a_lease_is_gone(bench: Bench) -> None:
    lost = await bench.taken("lost", claim_timeout=10)
    bench.clock.advance(10)
    await bench.take()
    ended = await bench.taken("ended", kind="e")
    await bench.settle(ended)
    given_back = await bench.taken("given-back", kind="g")
    await bench.settle(given_back, "release")
    called_off = await bench.taken("called-off", kind="c")
    await bench.cancel("called-off")
    await bench.settle(called_off, "cancelled")
    reasons = [(await bench.beat(task)).reason for task in (lost, ended, given_back, called_off)]
    assert reasons == ["taken", "settled", "settled", "cancelled"]
    (unknown,) = await bench.engine.heartbeat("w", [Beat(id="nobody", token="t")])
    assert (unknown.verdict, unknown.reason) == ("gone", "unknown")


async def test_a_beat_that_finds_an_expired_lease_is_told_the_same_when_it_is_repeated(bench: Bench) -> None:
    called_off = await bench.taken("called-off", claim_timeout=10)
    await bench.cancel("called-off")
    last = await bench.taken("last", kind="l", claim_timeout=10, max_crashes=0)
    bench.clock.advance(10)
    for task, reason in ((called_off, "cancelled"), (last, "expired")):
        assert [(await bench.beat(task)).reason for _ in range(2)] == [reason] * 2


async def test_a_token_of_another_task_renews_nothing(bench: Bench) -> None:
    one, other = await bench.taken("a", claim_timeout=10), await bench.taken("b")
    (beat,) = await bench.engine.heartbeat("w", [Beat(id=one.id, token=other.token)])
    assert (beat.verdict, beat.reason) == ("gone", "taken")
    bench.clock.advance(10)
    assert (await bench.beat(one)).verdict == "gone"


async def test_verdicts_come_by_position(bench: Bench) -> None:
    await bench.put("a", "b", "c")
    a, b, c = (await bench.claim()).tasks
    await bench.settle(b)
    beats = [Beat(id=task.id, token=task.token) for task in (a, b, c, a)]
    verdicts = await bench.engine.heartbeat("w", beats)
    assert [(one.id, one.verdict) for one in verdicts] == [
        ("a", "renewed"),
        ("b", "gone"),
        ("c", "renewed"),
        ("a", "renewed"),
    ]


async def test_the_latest_progress_goes_to_the_next_holder(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    assert bytes(task.progress) == b"null"
    await bench.beat(task, progress={"page": 1})
    await bench.beat(task, progress=Raw(b'{"page": 2}'))
    await bench.beat(task, progress=UNSET)
    await bench.later(10)
    assert bytes((await bench.take()).progress) == b'{"page": 2}'


@pytest.mark.parametrize("together", [True, False])
async def test_progress_of_a_beat_that_was_overtaken_renews_and_replaces_no_newer(
    bench: Bench, *, together: bool
) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    beats = [Beat(id="a", token=task.token, progress=[number], progress_seq=number) for number in (2, 3, 1)]
    for batch in [beats] if together else [[beat] for beat in beats]:
        await bench.later(4)
        verdicts = await bench.engine.heartbeat("w", batch)
        assert {verdict.verdict for verdict in verdicts} == {"renewed"}
    await bench.later(10)
    again = await bench.take()
    assert bytes(again.progress) == b"[3]"
    await bench.beat(again, progress=[0], progress_seq=1)  # a claim counts anew
    await bench.settle(again, "release")
    assert bytes((await bench.take()).progress) == b"[0]"


@pytest.mark.parametrize(("number", "kept"), [(1, b"[2]"), (2, b"[7]"), (3, b"[7]"), (None, b"[7]")])
@pytest.mark.parametrize("is_late", [False, True])
async def test_progress_with_a_result_replaces_what_is_not_newer(
    bench: Bench, number: int | None, kept: bytes, *, is_late: bool
) -> None:
    task = await bench.taken("a", claim_timeout=10, heartbeat_timeout=10)
    await bench.beat(task, progress=[2], progress_seq=2)
    if is_late:
        await bench.later(10)
    verdict = await bench.settle(task, "crash", progress=[7], progress_seq=number)
    assert verdict.verdict == "settled"
    assert bytes((await bench.take()).progress) == kept


async def test_progress_of_a_stale_beat_is_not_kept(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    await bench.later(10)
    await bench.beat(task, progress=[1])
    assert bytes((await bench.take()).progress) == b"null"


# Results: what becomes of the task


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("success", "success"),
        ("fatal", "fatal_failure"),
        ("retry", "retriable_failure"),
        ("release", "enqueued"),
        ("crash", "enqueued"),
        ("cancelled", "cancelled"),
    ],
)
async def test_an_outcome_says_what_becomes_of_a_task(bench: Bench, outcome: Outcome, status: str) -> None:
    task = await bench.taken("a")
    assert (await bench.settle(task, outcome)).verdict == "settled"
    assert await bench.status("a") == status


async def test_a_retry_waits_by_its_policy(bench: Bench) -> None:
    task = await bench.taken("a", retry=FixedDelays(waits=[5, 7]))
    for wait in (5, 7, 7):
        await bench.settle(task, "retry")
        bench.clock.advance(wait - 0.001)
        assert await bench.ids() == []
        bench.clock.advance(0.001)
        task = await bench.take()


async def test_crashes_do_not_lengthen_the_wait_for_a_retry(bench: Bench) -> None:
    task = await bench.taken("a", retry=FixedDelays(waits=[5, 100]))
    await bench.settle(task, "crash")
    await bench.settle(await bench.take(), "retry")
    bench.clock.advance(5)
    assert await bench.ids() == ["a"]


async def test_a_holder_may_say_when_to_retry(bench: Bench) -> None:
    task = await bench.taken("a", retry=Polynomial())
    await bench.settle(task, "retry", retry_after=2.0)
    bench.clock.advance(2)
    assert await bench.ids() == ["a"]


async def test_a_release_is_ready_at_once_or_when_it_says(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "release")
    task = await bench.take()
    await bench.settle(task, "release", retry_after=5.0)
    assert await bench.ids() == []
    bench.clock.advance(5)
    assert await bench.ids() == ["a"]


async def test_a_crash_is_ready_at_once(bench: Bench) -> None:
    await bench.settle(await bench.taken("a", retry=FixedDelays(waits=[100])), "crash", retry_after=100.0)
    assert await bench.ids() == ["a"]


async def test_progress_comes_with_a_result_too(bench: Bench) -> None:
    await bench.settle(await bench.taken("a"), "release", progress=[7])
    assert bytes((await bench.take()).progress) == b"[7]"


# Results: counts


async def test_attempts_count_grants_that_were_not_released_and_the_fence_counts_all(bench: Bench) -> None:
    await bench.put("a", retry=FixedDelays(waits=[0]))
    seen: list[tuple[int, int]] = []
    outcomes: list[Any] = ["release", "crash", "release", "retry", "success"]
    for outcome in outcomes:
        task = await bench.take()
        seen.append((task.attempt, task.fence))
        await bench.settle(task, outcome)
    assert seen == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]


async def test_max_attempts_bounds_retries_only(bench: Bench) -> None:
    task = await bench.taken("a", max_attempts=2, retry=FixedDelays(waits=[0]))
    outcomes: list[Any] = ["retry", "crash", "release", "retry"]
    for outcome in outcomes:
        await bench.settle(task, outcome, error={"n": 1})
        if outcome != outcomes[-1] or await bench.status("a") != "dead":
            task = await bench.take()
    info = await bench.info("a")
    assert (info.status.value, info.attempt, info.crashes) == ("dead", 3, 1)
    assert info.reason == "2 attempts ended in retry: max_attempts is 2"
    assert bytes(info.error) == b'{"n":1}'
    assert await bench.ids() == []


async def test_one_attempt_may_be_all(bench: Bench) -> None:
    await bench.settle(await bench.taken("a", max_attempts=1), "retry")
    assert await bench.status("a") == "dead"


@pytest.mark.parametrize("way", ["crash", "expiry"])
@pytest.mark.parametrize("most", [0, 2])
async def test_max_crashes_bounds_runs_whose_holder_vanished(bench: Bench, way: str, most: int) -> None:
    await bench.put("a", max_crashes=most, claim_timeout=10)
    for _ in range(most + 1):
        assert await bench.status("a") != "dead"
        task = await bench.take()
        if way == "crash":
            await bench.settle(task, "crash")
        else:
            await bench.later(10)
    info = await bench.info("a")
    assert (info.status.value, info.crashes) == ("dead", most + 1)
    assert info.reason is not None
    assert info.reason.startswith(f"{most + 1} runs ended because their holder vanished: max_crashes is {most}")
    assert await bench.ids() == []


# Results: late, stale, and repeated ones


@pytest.mark.parametrize("taken_back", [False, True])
async def test_a_late_result_counts_while_nobody_else_got_the_task(bench: Bench, taken_back: bool) -> None:
    task = await bench.taken("a", claim_timeout=10)
    if taken_back:
        await bench.later(10)
        assert await bench.status("a") == "enqueued"
    else:
        bench.clock.advance(10)
    assert (await bench.settle(task, result="late")).verdict == "settled"
    info = await bench.info("a")
    assert (info.status.value, bytes(info.result), info.crashes) == ("success", b'"late"', 0)
    assert [(run.outcome, run.worker) for run in info.history] == [("success", "w")]
    assert await bench.ids() == []


async def test_a_late_retry_or_crash_counts_once(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, max_crashes=1)
    await bench.later(10)
    assert (await bench.info("a")).crashes == 1
    assert (await bench.settle(task, "crash")).verdict == "settled"
    assert (await bench.info("a")).crashes == 1
    task = await bench.take()
    await bench.later(10)
    assert await bench.status("a") == "dead"


async def test_a_late_result_of_a_task_that_has_ended_meanwhile_is_gone(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10, max_crashes=0)
    await bench.later(10)
    assert await bench.status("a") == "dead"
    assert (await bench.settle(task)).reason == "expired"
    assert await bench.status("a") == "dead"


async def test_a_result_is_gone_once_another_got_the_task(bench: Bench) -> None:
    first = await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    second = await bench.take()
    verdict = await bench.settle(first, result="old")
    assert (verdict.verdict, verdict.reason) == ("gone", "taken")
    assert await bench.status("a") == "claimed"
    assert (await bench.settle(second, result="new")).verdict == "settled"
    assert bytes((await bench.info("a")).result) == b'"new"'


async def test_a_repeat_is_told_the_same_and_changes_nothing(bench: Bench) -> None:
    task = await bench.taken("a", retry=FixedDelays(waits=[0]))
    for _ in range(3):
        assert (await bench.settle(task, "retry", error={"n": 1})).verdict == "settled"
    assert (await bench.take()).attempt == 2
    assert (await bench.settle(task, "retry", error={"n": 1})).verdict == "settled"
    assert await bench.status("a") == "claimed"
    assert len((await bench.info("a")).history) == 1


async def test_a_repeat_is_told_the_same_after_the_end_and_after_a_restart(bench: Bench) -> None:
    task = await bench.taken("a", retry=FixedDelays(waits=[0]))
    await bench.settle(task, "retry", error=1)
    await bench.settle(await bench.take(), result=2)
    await bench.restart()
    assert (await bench.settle(task, "retry", error=1)).verdict == "settled"
    assert await bench.status("a") == "success"


@pytest.mark.parametrize(
    "other",
    [
        {"outcome": "fatal"},
        {"result": 2},
        {"result": 1, "error": 1},
        {"result": 1, "progress": 1},
        {"result": 1, "then": [NewTask(kind="next")]},
    ],
)
async def test_another_report_with_the_same_token_is_gone(bench: Bench, other: Any) -> None:
    task = await bench.taken("a")
    await bench.settle(task, result=1)
    verdict = await bench.settle(task, **other)
    assert (verdict.verdict, verdict.reason) == ("gone", "settled")
    assert bytes((await bench.info("a")).result) == b"1"
    assert await bench.ids(kinds=("next",)) == []


async def test_a_repeat_in_the_same_batch_is_told_the_same(bench: Bench) -> None:
    task = await bench.taken("a")
    one = Settlement(id=task.id, token=task.token, outcome="success", result=1)
    other = Settlement(id=task.id, token=task.token, outcome="fatal")
    verdicts = await bench.engine.results("w", [one, one, other])
    assert [verdict.verdict for verdict in verdicts] == ["settled", "settled", "gone"]


async def test_strangers_among_results_fail_alone(bench: Bench) -> None:
    task = await bench.taken("a")
    results = [
        Settlement(id="nobody", token="t", outcome="success"),
        Settlement(id=task.id, token="forged", outcome="success"),
        Settlement(id=task.id, token=task.token, outcome="success"),
    ]
    verdicts = await bench.engine.results("w", results)
    assert [(one.verdict, one.reason) for one in verdicts] == [
        ("gone", "unknown"),
        ("gone", "taken"),
        ("settled", None),
    ]


async def test_a_token_does_not_settle_what_waits(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "release")
    assert (await bench.settle(task)).verdict == "gone"
    assert await bench.status("a") == "enqueued"


# Results: successors


async def test_successors_are_scheduled_with_the_end_and_once(bench: Bench) -> None:
    task = await bench.taken("a")
    then = [NewTask(kind="next", payload=n) for n in range(3)]
    for _ in range(2):
        assert (await bench.settle(task, then=then)).verdict == "settled"
    got = (await bench.claim(kinds=("next",))).tasks
    assert [bytes(one.payload) for one in got] == [b"0", b"1", b"2"]
    assert await bench.ids(kinds=("next",)) == []


async def test_a_successor_whose_id_stands_for_another_task_is_told_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hsc.logger.filters[0], "_windows", {})  # other tests may have used up this minute's lines
    await bench.put("taken", kind="foreign")
    task = await bench.taken("a")
    then = [NewTask(kind="next", id="taken"), NewTask(kind="next", id="free")]
    for _ in range(2):
        assert (await bench.settle(task, then=then)).verdict == "settled"
    assert await bench.ids(kinds=("next",)) == ["free"]
    assert caplog.messages == [
        "the id 'taken' of a successor of task 'a' stands for another task, so there is no successor"
    ]


async def test_successors_may_have_ids_keys_and_times_of_their_own(bench: Bench) -> None:
    await bench.put("there", kind="next")
    task = await bench.taken("a")
    later = datetime.fromtimestamp(bench.clock.wall + 10, UTC)
    then = [
        NewTask(kind="next", id="there"),
        NewTask(kind="next", id="mine", at=later),
        NewTask(kind="next", dedupe_key="key"),
        NewTask(kind="next", dedupe_key="key"),
    ]
    await bench.settle(task, "fatal", then=then)
    assert len(await bench.ids(kinds=("next",))) == 2
    bench.clock.advance(10)
    assert await bench.ids(kinds=("next",)) == ["mine"]


async def test_each_run_has_successors_of_its_own(bench: Bench) -> None:
    first, second = await bench.taken("a"), await bench.taken("b")
    for task in (first, second):
        await bench.settle(task, then=[NewTask(kind="next"), NewTask(kind="next")])
    ids = [successor_id(task.id, task.token, n) for task in (first, second) for n in (0, 1)]
    assert await bench.ids(kinds=("next",)) == ids, "only the holder of the run knows them before"
