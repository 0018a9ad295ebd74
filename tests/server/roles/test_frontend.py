"""What those who have work ask for: schedule, cancel, get, list."""

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from leasekit.errors import Refused
from leasekit.server.access import KindPatterns
from leasekit.server.roles import selection
from leasekit.task import Exponential, HistoryEntry, NewTask, Outcome, Stats, Status, TaskInfo
from tests.server.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow_with("postgres")]


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# Schedule


async def test_a_task_is_new_until_it_is_claimed(bench: Bench) -> None:
    (answer,) = await bench.put("a")
    assert (answer.id, answer.created, answer.status) == ("a", True, Status.NEW)
    assert await bench.status("a") == "new"
    await bench.take()
    assert await bench.status("a") == "claimed"


async def test_made_up_ids_are_uuids_of_version_7_that_sort_by_time(bench: Bench) -> None:
    (first,) = await bench.engine.schedule([NewTask(kind="k")])
    bench.clock.advance(0.002)
    (second,) = await bench.engine.schedule([NewTask(kind="k")])
    assert first.id[14] == second.id[14] == "7"
    assert first.id[19] in "89ab"
    assert first.id < second.id


async def test_the_same_id_makes_no_second_task_in_one_batch_either(bench: Bench) -> None:
    answers = await bench.put("a", "a", "b")
    assert [(one.id, one.created, one.conflict) for one in answers] == [
        ("a", True, False),
        ("a", False, False),
        ("b", True, False),
    ]
    assert await bench.ids() == ["a", "b"]


@pytest.mark.parametrize("again", [{"payload": {"x": 2, "y": 1}}, {"payload": {"x": 1}, "kind": "other"}])
async def test_the_same_id_with_other_contents_is_a_conflict_and_changes_nothing(
    bench: Bench, again: dict[str, Any]
) -> None:
    await bench.put("a", payload={"x": 1})
    (answer,) = await bench.put("a", **again)
    assert (answer.created, answer.conflict) == (False, True)
    assert bytes((await bench.info("a")).payload) == b'{"x":1}'
    assert await bench.ids(kinds=("other",)) == []


async def test_the_same_payload_written_otherwise_is_no_conflict(bench: Bench) -> None:
    await bench.put("a", payload=Raw(b'{"x": 1, "y": [2, {"b": {"d": null, "c": "\\u00e4"}, "a": 3}]}'))
    same = {"y": [2, {"a": 3, "b": {"c": "ä", "d": None}}], "x": 1}
    (answer,) = await bench.put("a", payload=same)
    assert (answer.created, answer.conflict) == (False, False)
    for other in ({**same, "y": [{"a": 3, "b": {"c": "ä", "d": None}}, 2]}, {**same, "z": None}):
        (answer,) = await bench.put("a", payload=other)
        assert answer.conflict


async def test_a_payload_leaves_as_the_bytes_that_came(bench: Bench) -> None:
    raw = b'{"b" : "\\u0000 \xc3\xa4", "a":[1.0, 1e3]}'
    await bench.put("a", payload=Raw(raw))
    assert bytes((await bench.take()).payload) == raw
    assert bytes((await bench.info("a")).payload) == raw


async def test_scheduling_again_says_how_far_the_first_is(bench: Bench) -> None:
    await bench.settle(await bench.taken("a"), "fatal")
    (answer,) = await bench.put("a")
    assert (answer.created, answer.status) == (False, Status.FATAL_FAILURE)


async def test_a_dedupe_key_makes_one_task_per_kind_however_it_ended(bench: Bench) -> None:
    await bench.put("a", dedupe_key="key")
    await bench.settle(await bench.take())
    again, other_kind = await bench.engine.schedule(
        [NewTask(kind="k", id="b", dedupe_key="key"), NewTask(kind="other", id="c", dedupe_key="key")]
    )
    assert (again.id, again.created, again.status) == ("a", False, Status.SUCCESS)
    assert (other_kind.id, other_kind.created) == ("c", True)


async def test_a_dedupe_key_counts_within_one_batch(bench: Bench) -> None:
    first, second = await bench.engine.schedule([NewTask(kind="k", dedupe_key=" ü") for _ in range(2)])
    assert (first.created, second.created) == (True, False)
    assert first.id == second.id


async def test_a_dedupe_key_counts_as_long_as_the_first_one_said(bench: Bench) -> None:
    await bench.put("a", dedupe_key="key", dedupe_window=10)
    bench.clock.advance(9.9)
    (within,) = await bench.put("b", dedupe_key="key", dedupe_window=1000)
    bench.clock.advance(0.2)
    (after,) = await bench.put("c", dedupe_key="key")
    bench.clock.advance(1000)
    (for_good,) = await bench.put("d", dedupe_key="key")
    assert (within.id, within.created) == ("a", False)
    assert (after.id, after.created) == ("c", True)
    assert (for_good.id, for_good.created) == ("c", False)


async def test_many_dedupe_keys_at_once(bench: Bench) -> None:
    tasks = [NewTask(kind="k", dedupe_key=str(n)) for n in range(1000)]
    first = await bench.engine.schedule(tasks)
    again = await bench.engine.schedule(tasks)
    assert all(one.created for one in first)
    assert [one.id for one in again if not one.created] == [one.id for one in first]


async def test_an_id_that_is_there_outranks_a_dedupe_key(bench: Bench) -> None:
    await bench.put("a", dedupe_key="key")
    await bench.put("b")
    (answer,) = await bench.put("b", dedupe_key="key")
    assert (answer.id, answer.created) == ("b", False)


async def test_a_later_task_is_due_at_its_time(bench: Bench) -> None:
    await bench.put("a", at=at(bench.clock.wall + 10))
    bench.clock.advance(9.999)
    assert await bench.ids() == []
    bench.clock.advance(0.001)
    assert await bench.ids() == ["a"]


async def test_a_delayed_task_is_due_by_the_clock_of_the_server(bench: Bench) -> None:
    assert abs(bench.clock.wall - time.time()) > 86_400, "the submitter's clock is another one"
    await bench.put("a", delay=10)
    bench.clock.advance(9.999)
    assert await bench.ids() == []
    bench.clock.advance(0.001)
    assert await bench.ids() == ["a"]


@pytest.mark.parametrize(
    "moment",
    [
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    ],
)
async def test_the_oddest_times_can_be_read_again(bench: Bench, moment: datetime) -> None:
    await bench.put("a", at=moment)
    assert (await bench.info("a")).at.tzinfo is UTC
    assert len((await bench.engine.queries.list_tasks()).tasks) == 1


# Cancel


async def test_waiting_tasks_are_cancelled_at_once(bench: Bench) -> None:
    await bench.put("new")
    await bench.settle(await bench.taken("retry", kind="r"), "retry", retry_after=5.0)
    await bench.settle(await bench.taken("released", kind="e"), "release")
    verdicts = await bench.engine.cancel(["new", "retry", "released"])
    assert [verdict.verdict for verdict in verdicts] == ["cancelled"] * 3
    assert [await bench.status(name) for name in ("new", "retry", "released")] == ["cancelled"] * 3
    bench.clock.advance(10)
    assert await bench.ids(kinds=("k", "r", "e")) == []


async def test_a_cancel_can_be_repeated(bench: Bench) -> None:
    await bench.put("a")
    assert [(await bench.cancel("a")).verdict for _ in range(2)] == ["cancelled", "cancelled"]
    task = await bench.taken("b")
    assert [(await bench.cancel("b")).verdict for _ in range(2)] == ["cancel_requested", "cancel_requested"]
    assert [one.verdict for one in await bench.engine.cancel(["b", "b"])] == ["cancel_requested", "cancel_requested"]
    assert (await bench.beat(task)).cancel_requested


async def test_a_running_task_is_told_with_its_next_beat_and_keeps_its_lease(bench: Bench) -> None:
    task = await bench.taken("a")
    assert not (await bench.beat(task)).cancel_requested
    assert (await bench.cancel("a")).verdict == "cancel_requested"
    beat = await bench.beat(task)
    assert (beat.verdict, beat.cancel_requested) == ("renewed", True)
    assert await bench.status("a") == "processing"


@pytest.mark.parametrize("outcome", ["cancelled", "retry", "release", "crash"])
async def test_an_ordered_task_is_cancelled_when_it_has_wound_down(bench: Bench, outcome: Outcome) -> None:
    task = await bench.taken("a", max_attempts=1, max_crashes=0)
    await bench.cancel("a")
    assert (await bench.settle(task, outcome)).verdict == "settled"
    assert await bench.status("a") == "cancelled"
    assert (await bench.info("a")).reason is None
    assert await bench.ids() == []


@pytest.mark.parametrize(("outcome", "status"), [("success", "success"), ("fatal", "fatal_failure")])
async def test_an_ordered_task_that_ends_by_itself_has_ended_so(bench: Bench, outcome: Outcome, status: str) -> None:
    task = await bench.taken("a")
    await bench.cancel("a")
    await bench.settle(task, outcome)
    assert await bench.status("a") == status


async def test_an_ordered_task_whose_lease_ends_is_cancelled_and_not_run_again(bench: Bench) -> None:
    task = await bench.taken("a", claim_timeout=10)
    await bench.cancel("a")
    await bench.later(10)
    assert await bench.status("a") == "cancelled"
    assert await bench.ids() == []
    assert (await bench.beat(task)).reason == "cancelled"
    assert (await bench.settle(task)).reason == "cancelled"


async def test_a_task_whose_lease_is_over_is_cancelled_at_once(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.advance(10)
    assert (await bench.cancel("a")).verdict == "cancelled"
    assert [run.outcome for run in (await bench.info("a")).history] == ["expired"]


async def test_what_has_ended_or_is_unknown_is_gone(bench: Bench) -> None:
    await bench.settle(await bench.taken("a"))
    settled, unknown = await bench.engine.cancel(["a", "nobody"])
    assert (settled.verdict, settled.reason) == ("gone", "settled")
    assert (unknown.verdict, unknown.reason) == ("gone", "unknown")


# Get and list


async def test_of_an_unknown_task_there_is_nothing(bench: Bench) -> None:
    assert await bench.engine.queries.get("nobody") is None


async def test_the_end_of_a_lease_is_shown_by_the_wall_clock(bench: Bench) -> None:
    await bench.taken("a", claim_timeout=10)
    bench.clock.wall += 100
    await bench.taken("b", claim_timeout=10)  # a write, which notes the jump
    for info in [await bench.info("a"), (await bench.engine.queries.list_tasks(limit=1)).tasks[0]]:
        assert info.lease_until is not None
        assert info.lease_until.timestamp() == pytest.approx(bench.clock.wall + 10)


async def test_a_task_can_be_read_whole(bench: Bench) -> None:
    start = bench.clock.wall
    task = await bench.taken("a", collection="blue", priority=1, payload=[1])
    bench.clock.advance(1)
    await bench.settle(task, "retry", retry_after=0.0, error={"type": "E"}, progress={"page": 3})
    task = await bench.take()
    bench.clock.advance(1)
    await bench.settle(task, result={"n": 2})
    info = msgspec.json.decode(msgspec.json.encode(await bench.info("a")))
    history = info.pop("history")
    assert info == {
        "id": "a",
        "kind": "k",
        "status": "success",
        "priority": 1,
        "attempt": 2,
        "crashes": 0,
        "fence": 2,
        "at": msgspec.to_builtins(at(start)),
        "collection": "blue",
        "key": None,
        "payload": [1],
        "progress": {"page": 3},
        "result": {"n": 2},
        "error": None,
        "worker": "w",
        "lease_until": None,
        "cancel_requested": False,
        "scheduled_at": msgspec.to_builtins(at(start)),
        "claimed_at": msgspec.to_builtins(at(start + 1)),
        "started_at": None,
        "heartbeat_at": None,
        "progress_at": msgspec.to_builtins(at(start + 1)),
        "ended_at": msgspec.to_builtins(at(start + 2)),
        "reason": None,
        "gate": None,
        "parent": None,
        "root": "a",
        "requires": {},
        "prefers": {},
        "prefer_for": None,
        "start_by": None,
        "tags": [],
    }
    assert [(run["fence"], run["outcome"], run["at"], run["worker"]) for run in history] == [
        (1, "retry", msgspec.to_builtins(at(start + 1)), "w"),
        (2, "success", msgspec.to_builtins(at(start + 2)), "w"),
    ]
    assert history[0]["error"] == {"type": "E"}


async def test_a_task_and_its_history_tell_when_a_run_was_claimed_began_and_was_heard(bench: Bench) -> None:
    times: list[tuple[datetime | None, ...]] = []

    def note(seen: TaskInfo | HistoryEntry) -> None:
        times.append((seen.claimed_at, seen.started_at, seen.heartbeat_at))

    start = bench.clock.wall
    await bench.put("a")
    note(await bench.info("a"))
    bench.clock.advance(1)
    task = await bench.take()
    for started in (False, True, True):
        bench.clock.advance(1)
        await bench.beat(task, started=started)
        note(await bench.info("a"))
    await bench.settle(task, "retry", retry_after=0.0)
    note((await bench.info("a")).history[0])
    await bench.take()
    note(await bench.info("a"))
    claimed, held, began, heard = (at(start + seconds) for seconds in (1, 2, 3, 4))
    assert times == [
        (None, None, None),
        (claimed, None, held),
        (claimed, began, began),
        (claimed, began, heard),
        (claimed, began, heard),
        (heard, None, None),
    ]


async def test_a_waiting_task_says_when_it_is_due_next(bench: Bench) -> None:
    task = await bench.taken("a")
    await bench.settle(task, "retry", retry_after=30.0)
    assert (await bench.info("a")).at == at(bench.clock.wall + 30)


@pytest.fixture(params=[1, 2, 20_000], ids=lambda look: f"steps-of-{look}")
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing looks at so many tasks in one step."""
    monkeypatch.setattr(selection, "LOOK", request.param)


async def test_a_listing_that_finds_little_lets_other_reads_in_between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "LOOK", 10)
    await bench.put(*[f"t{n}" for n in range(100)])
    steps, others = 0, list[str]()
    read = bench.engine._readers.read

    async def noted(look: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:  # another read comes, and is answered before this listing goes on
            others.extend(await read(lambda view: view.triggers(["t0"])))
        return await read(look, **options)

    monkeypatch.setattr(bench.engine._readers, "read", noted)
    assert (await bench.engine.queries.list_tasks(collection="none")).tasks == []
    assert steps > 10
    assert others == ["t0"]


@pytest.mark.parametrize("wanted", [{"kinds": KindPatterns(["mine.*"])}, {"error": "only-this"}, {"reason": "none"}])
async def test_a_small_page_of_few_tasks_among_many_costs_few_steps(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    await bench.put(*[f"t{n}" for n in range(2000)])
    steps = 0
    read = bench.engine._readers.read

    async def counted(look: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        return await read(look, **options)

    monkeypatch.setattr(bench.engine._readers, "read", counted)
    for newest in (False, True):
        assert (await bench.engine.queries.list_tasks(**wanted, newest=newest, limit=1)).tasks == []
    assert steps < 30


@pytest.mark.usefixtures("steps")
async def test_a_listing_goes_on_where_it_ended(bench: Bench) -> None:
    ids = [f"t{n}" for n in range(5)]
    await bench.put(*ids)
    found: list[str] = []
    cursor = None
    for _ in range(3):
        page = await bench.engine.queries.list_tasks(cursor=cursor, limit=2)
        found += [info.id for info in page.tasks]
        cursor = page.cursor
    assert found == ids
    assert cursor is None


@pytest.mark.usefixtures("steps")
async def test_a_listing_that_ends_with_the_page_has_no_cursor(bench: Bench) -> None:
    await bench.put("a", "b")
    assert (await bench.engine.queries.list_tasks(limit=2)).cursor is None


@pytest.mark.usefixtures("steps")
async def test_a_listing_matches_all_that_is_given(bench: Bench) -> None:
    await bench.put("a", collection="blue")
    await bench.put("b", collection="red")
    await bench.put("c", kind="other", collection="blue")
    task = await bench.take(kinds=("other",))
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"kind": "k"}, ["a", "b"]),
        ({"collection": "blue"}, ["a", "c"]),
        ({"kind": "k", "collection": "blue"}, ["a"]),
        ({"status": Status.CLAIMED}, [task.id]),
        ({"worker": "w"}, [task.id]),
        ({"worker": "nobody"}, []),
    ]
    for wanted, ids in cases:
        assert [info.id for info in (await bench.engine.queries.list_tasks(**wanted)).tasks] == ids, wanted


@pytest.mark.usefixtures("steps")
async def test_a_page_of_big_tasks_is_shorter(bench: Bench) -> None:
    for n in range(8):
        await bench.put(f"t{n}", payload="x" * 1_000_000)
    found: list[str] = []
    cursor = None
    sizes: list[int] = []
    while cursor is not None or not sizes:
        page = await bench.engine.queries.list_tasks(cursor=cursor)
        sizes.append(len(page.tasks))
        found += [info.id for info in page.tasks]
        cursor = page.cursor
    assert found == [f"t{n}" for n in range(8)]
    assert max(sizes) < 8


@pytest.mark.parametrize("text", ["'; DROP TABLE task; --", '" OR 1=1 --', "%s %(kind)s :kind ? $1", "a\\'b", "{0}%"])
async def test_text_that_looks_like_sql_is_text(bench: Bench, text: str) -> None:
    await bench.put("other")
    new = NewTask(kind=text, id=text, collection=text, dedupe_key=text, payload=text)
    assert [answer.created for answer in await bench.engine.schedule([new])] == [True]
    assert [answer.created for answer in await bench.engine.schedule([new])] == [False]
    cases: list[dict[str, Any]] = [{"kind": text}, {"collection": text}, {"kind": text, "collection": text}]
    for wanted in cases:
        assert [info.id for info in (await bench.engine.queries.list_tasks(**wanted)).tasks] == [text]
    assert (await bench.engine.queries.list_tasks(worker=text)).tasks == []
    task = await bench.take(kinds=(text,))
    assert (task.id, task.kind) == (text, text)
    assert await bench.ids() == ["other"]


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1e3", "9" * 100, "²"])
async def test_a_cursor_that_no_page_gave_is_refused(bench: Bench, cursor: str) -> None:
    with pytest.raises(Refused) as refused:
        await bench.engine.queries.list_tasks(cursor=cursor)
    assert refused.value.errors[0]["field"] == "cursor"


async def test_the_history_shows_the_latest_runs(bench: Bench) -> None:
    await bench.put("a")
    for _ in range(105):
        await bench.settle(await bench.take(), "release")
    fences = [run.fence for run in (await bench.info("a")).history]
    assert fences == list(range(6, 106))


async def test_stats_count_by_kind_and_status(bench: Bench) -> None:
    await bench.put("a", "b")
    await bench.taken("c", kind="other")
    stats = await bench.engine.queries.stats()
    assert stats == Stats(kinds={"k": {"new": 2}, "other": {"claimed": 1}}, unmet={"k": [{}]})  # nobody claims k


async def test_a_policy_is_kept_only_where_it_is_not_the_default(bench: Bench) -> None:
    task = await bench.taken("a", retry=Exponential(first=100, jitter=0))
    await bench.settle(task, "retry")
    assert (await bench.info("a")).at == at(bench.clock.wall + 100)
