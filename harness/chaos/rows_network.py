"""Rows about the line between workers and server: cut, hanging, slow; lost answers, refusals, nonsense."""

import asyncio
import json
import time
from collections.abc import Callable

from harness.chaos.processes import wait_for
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from harness.history import SettleAnswered

BEATS, CLAIMS, RESULTS, TASKS = "/v1/heartbeats", "/v1/claims", "/v1/results", "/v1/tasks"


@scenario(13, "line-cut", faults=("cut", "reset"), ttl=20, cycle=1)
def line_cut(world: World) -> None:
    """Connections are reset again and again, then refused for a while: no lease is lost."""
    ids = world.held("first", "second")
    for _ in range(5):
        world.proxy.reset()
        time.sleep(0.2)
    world.proxy.cut()
    refused = _at_risk(world)
    wait_for(lambda: _at_risk(world) > refused, what="a refused beat")
    world.fault("cut")
    time.sleep(1)
    world.proxy.mend()
    world.finish_unharmed(ids)


def _at_risk(world: World) -> int:
    return sum(process.said.count("at risk") for process in world.processes)


@scenario(14, "half-open", faults=("hang",), ttl=20, cycle=1)
def half_open(world: World) -> None:
    """The peer accepts and never answers: each beat times out early enough to be retried, no lease is lost."""
    ids = world.held("first", "second")
    _abandoned(world, world.proxy.hang)
    world.finish_unharmed(ids)


@scenario(15, "drip", faults=("drip",), ttl=20, cycle=1)
def drip(world: World) -> None:
    """Answers come a byte at a time: the timeout is for the whole answer, not for each byte."""
    ids = world.held("first", "second")
    _abandoned(world, lambda: world.proxy.drip(0.1))
    world.finish_unharmed(ids)


def _abandoned(world: World, break_it: Callable[[], None]) -> None:
    """Inject a fault, and return once it has made three beats time out: none of them waits for ever."""
    since = time.monotonic()
    break_it()

    def tries() -> int:
        return sum(exchange.path == BEATS and exchange.at >= since for exchange in list(world.proxy.log))

    wait_for(lambda: tries() >= 3, what="beats that time out")
    world.proxy.mend()


@scenario(15, "jitter", faults=("slow",), ttl=20, cycle=2)
def jitter(world: World) -> None:
    """Everything takes 50 to 150 ms each way: nothing is lost, and nothing runs twice."""
    world.proxy.slow(0.05, jitter=0.1)
    world.work("first")
    world.work("second")
    world.finish_unharmed(world.schedule("steady", 40, seconds=0.5))


@scenario(16, "old-requests-again", faults=("again",), ttl=4)
def old_requests_again(world: World) -> None:
    """Every request of a worker arrives again after all tasks have ended: nothing changes."""
    world.work()
    ids = world.schedule("steady", 12, seconds=1.0)
    world.until_ended(ids)
    before = world.infos(ids)
    writes = [it for it in list(world.proxy.log) if it.path in (BEATS, RESULTS) and it.status == 200]

    async def again() -> list[bytes]:
        return [await world.proxy.again(exchange) for exchange in writes]

    answers = asyncio.run(again())
    assert len(answers) >= 4, "too few requests"
    assert not any(b'"renewed"' in answer for answer in answers), "an old beat was taken for a new one"
    world.fault("again")
    assert world.infos(ids) == before, "an old request changed something"


@scenario(16, "answers-again", faults=("repeat_answer", "hang"), ttl=4)
def answers_again(world: World) -> None:
    """The answer to one heartbeat is delivered again and again while no other arrives: it renews the lease once."""
    first = world.work("first", slots=1)
    ids = world.running(count=1, by=first)
    world.until_beaten(ids)
    world.proxy.repeat_answer("POST", BEATS, repeats=30)
    world.proxy.wait(lambda: world.proxy.fired["repeat_answer"] == 1)
    world.proxy.hang("requests")
    second = world.work("second", slots=1, past_proxy=True)
    world.until_acting(second)
    time.sleep(2 * world.ttl)  # long enough for effects of stale answers on the first worker
    world.proxy.mend()
    world.finish(ids)


@scenario(17, "claim-answer-lost", faults=("lose_answer",), ttl=20, cycle=2)
def claim_answer_lost(world: World) -> None:
    """The answer to a claim is lost: its repeat gets the same leases, and no task waits for a ttl."""
    ids = world.schedule("steady", 4, seconds=0.2)
    world.proxy.lose_answer("POST", CLAIMS, times=2)
    world.work()
    world.finish_unharmed(ids)
    assert {info.fence for info in world.infos(ids)} == {1}, "granted anew"


@scenario(17, "long-poll-answer-lost", faults=("lose_answer",), ttl=20, cycle=1)
def long_poll_answer_lost(world: World) -> None:
    """The answer to a claim is lost that had waited for longer than a cycle: its repeat gets the same leases."""
    world.proxy.lose_answer("POST", CLAIMS, times=2)
    world.work()
    wait_for(lambda: sum(it.path == CLAIMS for it in list(world.proxy.log)) >= 2, what="claims of both executors")
    time.sleep(3)
    ids = world.schedule("steady", 4, seconds=0.2) + world.schedule("patient", 4, seconds=0.2)
    world.finish_unharmed(ids)
    assert {info.fence for info in world.infos(ids)} == {1}, "granted anew"


@scenario(18, "schedule-answer-lost", faults=("lose_answer",))
def schedule_answer_lost(world: World) -> None:
    """The answer to a schedule is lost, three times: its repeat makes no second task."""
    world.proxy.lose_answer("POST", TASKS, times=3)
    scheduler = world.submit("steady", 60)
    world.work()
    assert scheduler.popen.wait(60) == 0
    total = sum(sum(counts.values()) for counts in world.client.stats().kinds.values())
    assert total == 60, f"{total} tasks of 60"


@scenario(19, "result-answer-lost", faults=("lose_answer",), ttl=20, cycle=2)
def result_answer_lost(world: World) -> None:
    """The answer to a result is lost, again and again: the repeat gets the same answer, one result counts."""
    ids = world.schedule("steady", 12, seconds=0.1)
    world.proxy.lose_answer("POST", RESULTS, times=4)
    world.work()
    world.until_ended(ids)
    world.proxy.wait(lambda: world.proxy.fired["lose_answer"] == 4)
    world.finish_unharmed(ids)
    assert all(len(info.history) == 1 for info in world.infos(ids))
    assert {answer.verdict for answer in world.of(SettleAnswered)} == {"settled"}, "a repeat got another answer"


@scenario(20, "beat-answer-lost", faults=("lose_answer",), ttl=20, cycle=1)
def beat_answer_lost(world: World) -> None:
    """Answers to heartbeats are lost: the server's leases last longer than the worker's trust, and nothing is lost."""
    ids = world.held("first", "second")
    world.proxy.lose_answer("POST", BEATS, times=3)
    world.proxy.wait(lambda: world.proxy.fired["lose_answer"] == 3, within=60)
    world.until_beaten(ids)
    world.finish_unharmed(ids)


@scenario(20, "first-beat-unheard", faults=("lose_answer", "cut"), ttl=16)
def first_beat_unheard(world: World) -> None:
    """The first beat grants less than the claim, its answer is lost, the line stays cut: no task is granted early."""
    world.proxy.lose_answer("POST", BEATS, times=None)
    world.work("first")
    ids = world.schedule("steady", 2, until="finish", heartbeat_timeout=3)
    world.proxy.wait(lambda: world.proxy.fired["lose_answer"] >= 2, within=60)
    world.proxy.cut()
    world.fault("cut", lasts=world.ttl)
    world.until_running(ids, by=world.work("second", past_proxy=True))
    world.finish(ids)


RETRY_AFTER = ["0", "-1", "1000000000", "Wed, 21 Oct 2037 07:28:00 GMT", "soon", "", "9" * 400, "0.001"]


@scenario(21, "storm", faults=("answer 429", "answer 503"), ttl=20, cycle=1)
def storm(world: World) -> None:
    """429 and 503 with absurd Retry-After for beats, then nine in ten: no lease is lost, and retries are paced."""
    ids = world.held("first", "second")
    since = time.monotonic()
    for number, after in enumerate(RETRY_AFTER):
        world.proxy.answer(429 if number % 2 else 503, "POST", BEATS, retry_after=after)
    wait_for(lambda: world.proxy.fired["answer 429"] >= 4 and world.proxy.fired["answer 503"] >= 4, what="the storm")
    world.proxy.answer(429, "POST", BEATS, retry_after=1, times=None, chance=0.9)
    time.sleep(2)
    passed = time.monotonic() - since
    beats = [exchange for exchange in world.proxy.log if exchange.path == BEATS and exchange.at >= since]
    assert len(beats) <= 2 * 50 * passed, f"{len(beats)} beats in {passed:.1f} s"
    world.proxy.mend()
    world.finish_unharmed(ids)


@scenario(21, "storm-on-the-rest", faults=("answer 429", "answer 503"), ttl=20, cycle=2)
def storm_on_the_rest(world: World) -> None:
    """429 and 503 with absurd Retry-After for schedules, claims and results: each gets through, once."""
    for path in (TASKS, CLAIMS, RESULTS):
        for number, after in enumerate(RETRY_AFTER):
            world.proxy.answer(503 if number % 2 else 429, "POST", path, retry_after=after)
    scheduler = world.submit("steady", 20, seconds=0.1)
    world.work()
    assert scheduler.popen.wait(100) == 0
    world.until_ended()
    assert [(info.attempt, info.crashes) for info in world.infos()] == [(1, 0)] * 20


NONSENSE = [
    b"",
    b"<html><body>It works!</body></html>",
    b'{"verdicts": [',
    b'{"verdicts": null}',
    b'{"verdicts": [{"id": "nobody", "verdict": "renewed", "ttl": 300}], "tasks": [{"id": "x"}], "waited": 0}',
    b'{"waited": NaN, "tasks": [], "verdicts": [NaN]}',
    b'{"waited": -1e400, "tasks": [], "verdicts": []}',
    b'{"waited": 0, "tasks": "none", "verdicts": "none"}',
    b'{"tasks": [], "verdicts": [], "waited": ' + b"9" * 5000 + b"}",
    b'{"tasks": [], "verdicts": ["\\ud800"], "waited": 0}',
    b'{"tasks": ["\\u0000"], "verdicts": ["\\u0000"], "waited": 0}',
    b'{"a": 1, "a": 2}',
    b"[" * 100_000,
    b"\xff\xfe\x00",
    b"x" * 1_000_000,
    json.dumps({"waited": 0, "tasks": [], "verdicts": [{"id": "x", "verdict": "perhaps"}]}).encode(),
]


@scenario(22, "nonsense", faults=("answer 200",), ttl=20, cycle=1)
def nonsense(world: World) -> None:
    """Invalid answers to all calls: the worker logs them, goes on, and loses nothing."""
    ids = world.held("first")
    for body in NONSENSE[::3]:  # not all: the worker waits longer after each failed call
        world.proxy.answer(200, "POST", CLAIMS, body=body)
        world.proxy.answer(200, "POST", RESULTS, body=body)
    for at in range(0, len(NONSENSE), 3):  # a beat that fails three times is not retried before the next cycle
        for body in NONSENSE[at : at + 3]:
            world.proxy.answer(200, "POST", BEATS, body=body)
        world.until_beaten(ids)
    assert _nonsense(world) == len(NONSENSE), f"{_nonsense(world)} beats got an invalid answer"
    world.finish_unharmed(ids)
    for process in world.processes:
        assert "Traceback" not in process.said, process.said[-3000:]
        assert process.is_alive


@scenario(22, "foreign", faults=("foreign",), ttl=20, cycle=1)
def foreign(world: World) -> None:
    """An ingress, a firewall, a portal answer in the server's place, any call, once and then for long: no task ends."""
    ids = world.held("first", "second")
    for path in (BEATS, CLAIMS, "*"):
        world.proxy.foreign(path=path, times=5)
        world.until_beaten(ids)
    before = world.proxy.fired["foreign"]
    world.finish()
    world.proxy.foreign("POST", RESULTS, times=None)
    wait_for(lambda: world.proxy.fired["foreign"] >= before + 10, what="results that others refuse")
    world.proxy.mend()
    world.finish_unharmed(ids)


def _nonsense(world: World) -> int:
    return sum(it.path == BEATS and bool(it.fault) and it.status == 200 for it in world.proxy.log)


@scenario(23, "slow-server", faults=("slow", "limit"), ttl=6)
def slow_line(world: World) -> None:
    """Connections are slow, and break in the middle of answers: repeats have no effect of their own."""
    world.proxy.slow(0.02, jitter=0.05)
    world.proxy.limit(2000)
    scheduler = world.submit("steady", 100, seconds=0.05)
    world.work("first")
    world.work("second")
    assert scheduler.popen.wait(60) == 0
    world.until_ended()
