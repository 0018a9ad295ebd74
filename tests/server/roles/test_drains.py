"""Drains: what a worker that drains is granted, who hears of it, and when a drain is over."""

import asyncio
import uuid
from typing import Any

import pytest

from leasekit.errors import Refused
from leasekit.server.access import KindPatterns
from leasekit.server.fair_bound import CALLER
from leasekit.server.roles import directory, drains
from leasekit.server.roles.audit import Note
from leasekit.server.roles.directory import SEEN_FOR
from leasekit.server.roles.tokens import Create
from leasekit.task import Beat, NewTask, Ticket, WorkerInfo
from leasekit.wire import TokenRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio


async def drain(bench: Bench, worker: str = "w") -> WorkerInfo:
    info = await bench.engine.operations.drain(worker, by="ada")
    assert info is not None
    return info


async def undrain(bench: Bench, worker: str = "w") -> None:
    await bench.engine.operations.undrain(worker, by="ada")


async def draining(bench: Bench) -> list[str]:
    return [worker.name for worker in await bench.engine.fleet.workers() if worker.draining_since is not None]


async def parked(bench: Bench, count: int = 1) -> None:
    """Wait until so many claims are parked."""
    while sum(poll.is_parked for poll in bench.engine._long_polls._polls.values()) < count:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


async def test_a_worker_that_drains_is_granted_nothing_until_that_is_taken_back(bench: Bench) -> None:
    held = await bench.taken("held")
    await bench.put("next")
    info = await drain(bench)
    assert (info.name, info.running, info.draining_since) == ("w", 1, info.last_seen)
    for _ in range(2):
        claimed = await bench.claim(wait=30)
        assert (claimed.tasks, claimed.draining) == ([], True)
    await bench.restart()
    assert (await bench.claim(wait=30)).draining
    assert (await bench.beat(held)).verdict == "renewed"
    assert (await bench.settle(held)).verdict == "settled"
    await undrain(bench)
    assert await bench.ids() == ["next"]
    assert await draining(bench) == []


async def test_other_workers_go_on(bench: Bench) -> None:
    await bench.claim()
    await drain(bench)
    await bench.put("a")
    assert await bench.ids(worker="other") == ["a"]


async def test_a_claim_that_waits_is_answered_at_once(bench: Bench) -> None:
    claims = [asyncio.create_task(bench.claim(worker=worker, wait=60)) for worker in ("w", "w", "other")]
    await parked(bench, 3)
    await drain(bench)
    for claim in claims[:2]:
        assert (await claim).draining
    await bench.put("a")
    assert [task.id for task in (await claims[2]).tasks] == ["a"]


async def test_a_task_that_wakes_a_claim_of_a_draining_worker_goes_to_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine._long_polls, "drain", lambda workers: None)  # the hint was lost
    first = asyncio.create_task(bench.claim(wait=10))
    await parked(bench)
    second = asyncio.create_task(bench.claim(worker="other", wait=10))
    await parked(bench, 2)
    await drain(bench)
    await bench.put("a", delay=60)
    await bench.later(60)
    assert (await first).draining
    assert [task.id for task in (await second).tasks] == ["a"]


async def test_a_repeated_claim_gets_what_it_was_granted_before(bench: Bench) -> None:
    await bench.put("a", "b")
    (task,) = (await bench.claim(limit=1, claim_id="c")).tasks
    await drain(bench)
    again = await bench.claim(limit=1, claim_id="c")
    assert (again.tasks, again.draining) == ([task], False)
    assert (await bench.claim(limit=0, claim_id="d")).tasks == []


async def test_names_are_granted_so_that_what_runs_can_end(bench: Bench) -> None:
    await bench.claim()
    await drain(bench)
    await bench.engine.schedule([NewTask(kind="named:lock", id="named:lock")])
    assert await bench.ids(kinds=("named:lock",)) == ["named:lock"]


async def test_tickets_of_a_draining_worker_are_left(bench: Bench) -> None:
    await bench.put("a")
    await bench.claim(kinds=("other",))
    await drain(bench)
    claimed = await bench.claim(tickets=[Ticket(id="a", fence=0)])
    assert (claimed.tasks, claimed.refused, claimed.draining) == ([], [], True)
    assert await bench.status("a") == "new"


async def test_a_worker_that_nobody_knows_is_not_drained(bench: Bench) -> None:
    assert await bench.engine.operations.drain("typo", by=None) is None
    await undrain(bench, "typo")


async def test_drains_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_MOST", 1)
    for worker in ("a", "b"):
        await bench.claim(worker=worker)
    for _ in range(2):
        await drain(bench, "a")
    with pytest.raises(Refused, match="1 workers drain already"):
        await drain(bench, "b")


async def test_a_process_that_starts_later_under_the_same_name_is_not_drained_and_ends_the_drain(bench: Bench) -> None:
    since = bench.engine.clock.peek()
    await bench.claim(since=since)
    bench.clock.advance(10)
    await drain(bench)
    await bench.put("a")
    assert (await bench.claim(since=since)).draining
    await bench.later(10)
    assert await draining(bench) == ["w"]
    assert await bench.ids(since=bench.engine.clock.peek()) == ["a"]
    await bench.later(1)
    assert await draining(bench) == []


async def token(bench: Bench, *kinds: str) -> str:
    """Make an access token for these kinds, and return its id."""
    name = uuid.uuid4().hex
    await bench.engine.operations.change_token(
        Create(TokenRequest(id=name, name=name, digest=name * 2, scopes=["work"], kinds=list(kinds)))
    )
    return name


async def call(bench: Bench, caller: str, *kinds: str, is_new: bool = False) -> None:
    """Claim as the worker w with this token; `is_new`: in a process that has just started."""
    CALLER.set(caller)
    await bench.claim(kinds=kinds, limit=1, since=bench.engine.clock.peek() if is_new else None)
    CALLER.set("")


async def known(bench: Bench) -> None:
    """Let the engine run for so long that each worker has called."""
    await bench.engine.tick()
    bench.clock.advance(SEEN_FOR)


async def test_a_worker_that_starts_anew_ends_its_drain_with_a_token_for_the_kinds_of_all_that_used_its_name(
    bench: Bench,
) -> None:
    some, more = await token(bench, "own.a", "own.b*"), await token(bench, "own.*")
    await known(bench)
    await bench.put("a", kind="own.a")
    await call(bench, some, "own.a")
    await drain(bench)
    bench.clock.advance(10)
    await call(bench, some, "own.a")
    await bench.engine.tick()
    assert await draining(bench) == ["w"]
    await call(bench, more, "own.c", is_new=True)
    await bench.engine.tick()
    assert await draining(bench) == []


@pytest.mark.parametrize("knows", ["claim", "lease", "heartbeat", "a token for all kinds", "many tokens"])
async def test_a_token_for_other_kinds_than_those_of_a_worker_ends_no_drain(bench: Bench, knows: str) -> None:
    others, own = await token(bench, "k", "other"), await token(bench, "foreign", "o*")
    match knows:
        case "claim":
            await known(bench)
            await call(bench, others, "k")
        case "lease":  # of before the engine has started
            await bench.put("held", claim_timeout=5 * SEEN_FOR)
            await call(bench, others, "k")
            await bench.restart()
            await known(bench)
        case "heartbeat":
            await known(bench)
            CALLER.set(others)
            await bench.engine.heartbeat("w", [Beat(id="gone", token="t")])
        case "many tokens":
            await known(bench)
            for _ in range(9):
                await call(bench, await token(bench, "foreign"), "foreign")
        case _:
            await known(bench)
            await call(bench, "", "foreign")
    await drain(bench)
    bench.clock.advance(10)
    await bench.engine.tick()
    for _ in range(2):
        await call(bench, own, *(f"o{n}" for n in range(600)), is_new=True)  # more kinds than are kept of a worker
    await call(bench, own, "foreign", is_new=True)
    await bench.engine.tick()
    assert await draining(bench) == ["w"]
    assert await bench.engine.fleet.workers(KindPatterns(["foreign", "o*"])) == []  # nor does it see anything of it
    await call(bench, await token(bench, "*"), "k", is_new=True)
    await bench.engine.tick()
    assert await draining(bench) == []


async def test_soon_after_a_start_no_token_for_some_kinds_ends_a_drain(bench: Bench) -> None:
    others, own = await token(bench, "k"), await token(bench, "foreign")
    await call(bench, others, "k")
    await drain(bench)
    await bench.restart()
    await bench.engine.tick()
    await bench.later(SEEN_FOR - 1)
    await call(bench, own, "foreign", is_new=True)
    await bench.engine.tick()
    assert await draining(bench) == ["w"]
    await call(bench, others, "k")  # as it does once a minute
    await bench.later(1)
    assert await draining(bench) == ["w"]


async def test_a_token_that_is_no_longer_known_ends_no_drain_and_owns_no_worker(bench: Bench) -> None:
    await known(bench)
    own = await token(bench, "foreign")
    await call(bench, "forgotten", "foreign")
    await drain(bench)
    bench.clock.advance(10)
    for caller in ("forgotten", own):
        await call(bench, caller, "foreign", is_new=True)
        await bench.engine.tick()
        assert await draining(bench) == ["w"]
    assert await bench.engine.fleet.workers(KindPatterns(["foreign"])) == []


async def forgotten(bench: Bench, caller: str, patch: pytest.MonkeyPatch) -> None:
    """Claim as the worker w, and have it forgotten for lack of room."""
    patch.setattr(directory, "_MOST", 0)
    await call(bench, caller, "k")
    assert len(bench.engine.fleet) == 0


async def test_a_name_that_was_forgotten_for_lack_of_room_is_that_of_no_token_for_some_kinds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, own = await token(bench, "k"), await token(bench, "foreign")
    await known(bench)
    await call(bench, others, "k")
    await drain(bench)
    with monkeypatch.context() as patch:
        await forgotten(bench, others, patch)
    bench.clock.advance(10)
    await bench.engine.tick()
    await call(bench, own, "foreign", is_new=True)
    await bench.engine.tick()
    assert await draining(bench) == ["w"]
    assert await bench.engine.fleet.workers(KindPatterns(["foreign"])) == []


async def test_a_worker_that_was_forgotten_for_lack_of_room_has_not_gone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await known(bench)
    await bench.claim()
    await drain(bench)
    bench.clock.advance(SEEN_FOR + 1)
    with monkeypatch.context() as patch:
        await forgotten(bench, "", patch)
    await bench.engine.tick()
    await bench.engine.tick()
    assert bench.engine.queries.draining_here == 1
    await bench.later(2 * SEEN_FOR)
    await bench.engine.tick()
    assert bench.engine.queries.draining_here == 0


async def test_a_second_drain_is_about_the_process_that_started_since_the_first(bench: Bench) -> None:
    await bench.claim()
    await drain(bench)
    bench.clock.advance(10)
    since = bench.engine.clock.peek()
    assert not (await bench.claim(since=since)).draining
    bench.clock.advance(10)
    await drain(bench)
    await bench.engine.tick()
    assert (await bench.claim(since=since)).draining


async def test_the_drain_of_a_worker_that_has_gone_is_over(bench: Bench) -> None:
    await bench.claim()
    await bench.engine.tick()
    await drain(bench)
    await bench.later(SEEN_FOR - 1)
    assert bench.engine.queries.draining_here == 1
    for _ in range(2):  # the second of its looks comes a minute later
        await bench.later(61)
    await bench.put("a")
    assert await bench.ids() == ["a"]


async def test_the_drain_of_a_worker_that_holds_a_task_goes_on(bench: Bench) -> None:
    await bench.taken("held", claim_timeout=5 * SEEN_FOR)
    await bench.engine.tick()
    await drain(bench)
    for _ in range(3):
        await bench.later(SEEN_FOR)
    assert await draining(bench) == ["w"]
    await bench.put("a")
    assert (await bench.claim()).draining


async def test_a_drain_is_an_event_and_an_entry_of_the_audit_log(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    bench.engine.feed.wanted_here = True
    monkeypatch.setattr(bench.engine.feed, "hear", seen.extend)
    await bench.claim()
    await bench.engine.operations.drain("w", by="ada", note=Note("worker.drain", target="w"))
    for _ in range(2):
        await bench.engine.operations.undrain("w", by="ada", note=Note("worker.undrain", target="w"))
    events = [(event.event, event.worker) for event in seen if event.event != "joined"]
    assert events == [("draining", "w"), ("undrained", "w")]
    entries = (await bench.engine.queries.audit()).entries
    assert sorted((entry.act, entry.target, entry.count) for entry in entries) == [
        ("worker.drain", "w", 1),
        ("worker.undrain", "w", 0),
        ("worker.undrain", "w", 1),
    ]


async def test_a_kind_whose_only_worker_drains_has_none(bench: Bench) -> None:
    await bench.claim()
    await bench.put("a")
    assert (await bench.engine.queries.stats()).unmet == {}
    await drain(bench)
    assert (await bench.engine.queries.stats()).unmet == {"k": [{}]}
