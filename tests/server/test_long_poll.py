"""Claims that wait: who is woken when."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from leasekit.errors import Throttled, Unavailable
from leasekit.server import long_poll
from leasekit.server.clock import StoreClock
from leasekit.server.commit import Done
from leasekit.server.long_poll import LongPolls
from leasekit.server.roles.claims import Answer, WaitingClaim
from leasekit.server.unit_of_work import NewlyDue
from leasekit.task import Claimed
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_claim_of_two_kinds_that_are_due_at_once_is_tried_and_nothing_stumbles() -> None:
    time = [4.999]
    tried: asyncio.Queue[tuple[WaitingClaim, Done]] = asyncio.Queue()
    stumbled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stumbled.append(context))
    waiting = LongPolls(lambda claim, done: tried.put_nowait((claim, done)), StoreClock(lambda: time[0], None))
    claim = asyncio.create_task(waiting.claim(worker="w", claim_id="c", kinds=["a", "b"], limit=1, wait=60))
    (await tried.get())[1](Answer())
    waiting.ready({"a": NewlyDue(0, 5.0), "b": NewlyDue(0, 5.0)})
    time[0] = 5.0
    (await tried.get())[1](Answer(Claimed(tasks=[])))
    await claim
    await asyncio.sleep(0)
    assert stumbled == []


class Bench:
    """Claims that wait, and a writer that tries them when it is told to."""

    def __init__(self) -> None:
        self.now = 1.0
        self.tried: list[tuple[str, Done]] = []
        self.is_full = False
        self.waiting = LongPolls(self._attempt, StoreClock(lambda: self.now, None))

    def _attempt(self, claim: WaitingClaim, done: Done) -> None:
        if self.is_full:
            raise Throttled("full")
        self.tried.append((claim.claim_id, done))

    def parked(self, claim_id: str, *kinds: str) -> "asyncio.Task[Claimed]":
        claim = self.waiting.claim(worker="w", claim_id=claim_id, kinds=kinds, limit=1, wait=60)
        return asyncio.create_task(claim)

    def answer(self, what: Answer | BaseException) -> list[str]:
        """Who was tried since the last time; all get this answer."""
        tried, self.tried = self.tried, []
        for _, done in tried:
            done(what)
        return [claim_id for claim_id, _ in tried]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.waiting.close()


async def test_the_claims_of_one_token_keep_no_other_from_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "_MOST", 1)
    bench.parked("first/1", "k")
    await until(lambda: bench.answer(Answer()) == ["first/1"])
    refused = bench.parked("first/2", "k")
    await until(refused.done)
    with pytest.raises(Throttled, match="wait already"):
        refused.result()
    bench.parked("other/1", "k")
    await until(lambda: bench.answer(Answer()) == ["other/1"])


async def refusal_of(claim: "asyncio.Task[Claimed]") -> str:
    await until(claim.done)
    return str(claim.exception())


async def test_claims_wait_for_many_kinds_only_if_these_are_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "_KINDS", 4)
    first = bench.parked("one/1", "a", "b", "c", "d")
    await until(lambda: bench.answer(Answer()) == ["one/1"])
    for number in range(2, 9):
        bench.parked(f"one/{number}", "a", "c", "d", "b")
        await until(lambda number=number: bench.answer(Answer()) == [f"one/{number}"])  # type: ignore[misc]
    assert await refusal_of(bench.parked("one/9", "d", "e")) == "claims wait for 4 kinds already"
    bench.parked("other/1", "e", "f")
    await until(lambda: bench.answer(Answer()) == ["other/1"])
    bench.waiting.ready({"a": NewlyDue(1, None)})
    assert bench.answer(Answer(Claimed(tasks=[]))) == ["one/1"]
    await first
    assert "kinds already" in await refusal_of(bench.parked("one/10", "d", "e"))


async def test_kinds_that_no_claim_waits_for_any_longer_are_not_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "_KINDS", 2)
    for number in range(9):
        claim = bench.parked("c", f"a{number}", f"b{number}")
        await until(lambda: bench.tried)
        bench.answer(Answer())
        bench.waiting.ready({f"a{number}": NewlyDue(1, None)})
        assert bench.answer(Answer(Claimed(tasks=[]))) == ["c"]
        await claim


async def test_a_claim_that_does_not_wait_is_not_refused_for_its_kinds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "_KINDS", 1)
    bench.parked("c1", "a")
    await until(lambda: bench.answer(Answer()) == ["c1"])
    claim = asyncio.create_task(bench.waiting.claim(worker="w", claim_id="c2", kinds=["b"], limit=1, wait=0))
    await until(lambda: bench.answer(Answer()) == ["c2"])
    assert (await claim).tasks == []
    assert "kinds already" in await refusal_of(bench.parked("c3", "b"))


async def test_the_wake_of_a_claim_whose_caller_has_left_before_its_turn_goes_to_another(bench: Bench) -> None:
    first = bench.parked("first", "a")
    await until(lambda: bench.answer(Answer()) == ["first"])
    second = bench.parked("second", "a")
    await until(lambda: bench.answer(Answer()) == ["second"])
    bench.waiting.ready({"a": NewlyDue(1, None)})
    first.cancel()
    await until(first.done)
    assert bench.answer(Answer(again=True)) == ["first"]
    bench.waiting.look()
    assert bench.answer(Answer(Claimed(tasks=[]))) == ["second"]
    await second


async def test_the_turn_of_a_claim_that_failed_goes_to_another_of_its_kinds_with_the_next_look(bench: Bench) -> None:
    claims = [bench.parked("first", "a", "b"), bench.parked("second", "b"), bench.parked("third", "c")]
    await until(lambda: len(bench.tried) == 3)
    bench.answer(Answer())
    bench.waiting.ready({"a": NewlyDue(1, None)})
    assert bench.answer(Unavailable("the disk is full")) == ["first"]
    bench.waiting.look()
    assert bench.answer(Answer()) == ["second"], "only who waits for one of those kinds"
    bench.waiting.look()
    assert bench.answer(Answer()) == []
    with pytest.raises(Unavailable):
        await claims[0]


async def test_a_claim_for_which_there_was_no_room_is_tried_with_the_next_look(bench: Bench) -> None:
    claim = bench.parked("first", "a")
    await until(lambda: bench.tried)
    bench.answer(Answer())
    bench.is_full = True
    bench.waiting.ready({"a": NewlyDue(1, None)})
    bench.is_full = False
    bench.waiting.look()
    assert bench.answer(Answer(Claimed(tasks=[]))) == ["first"]
    await claim


async def test_what_is_due_after_a_step_of_the_clock_is_found_with_the_next_look(bench: Bench) -> None:
    claims = [bench.parked(f"{n}", f"k{n}") for n in range(3)]
    await until(lambda: len(bench.tried) == 3)
    bench.answer(Answer())
    for _ in range(2000):  # told again and again: the agenda does not grow
        bench.waiting.ready({f"k{n}": NewlyDue(0, 1000.0 + n) for n in range(3)})
        bench.waiting.ready({"k2": NewlyDue(1, None)})
        assert bench.answer(Answer()) == ["2"]
    assert len(bench.waiting._agenda) < 1500
    bench.now = 1001.0
    bench.waiting.look()
    assert bench.answer(Answer()) == ["0", "1"]
    bench.waiting.close()
    for claim in claims:
        await claim
