"""The lease through its blocking door: what the end of a block means, and when it is refused, lost or interrupted."""

# ruff: noqa: PT012 - what a whole block raises is what is tested here

import contextlib
import functools
import gc
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

import leasekit
from leasekit import Cancelled, Client, Fatal, Heartbeats, IdleTimeout, LeaseLost, NotHeld, NotYet, Task
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.reporting import encoding
from leasekit._driver.reporting.outbox import Report
from leasekit.backend import Capabilities
from leasekit.errors import LeasekitError, Refused
from leasekit.hooks import CancelRequested, Event, Lost, Renewed, ReportDelayed, Running, Sent, Settled, Tracer
from leasekit.task import Beat, NewTask, Status, TaskInfo, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually, interrupting, turns


def reaches(count: int, number: Callable[[], int]) -> None:
    eventually(lambda: number() >= count)


def meanwhile(*calls: Callable[[], object]) -> threading.Thread:
    """What another thread does, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def claimed(client: Client, **options: Any) -> Task:
    """A task that was scheduled and claimed, and whose first beat was acknowledged."""
    task = buffered(client, **options)
    eventually(lambda: status(client, task) is Status.PROCESSING)
    return task


def buffered(client: Client, **options: Any) -> Task:
    """A task that was scheduled and claimed: a second one beats a second later."""
    scheduled = client.schedule("k", **options)
    task = next(client.tasks("k"))
    assert task.id == scheduled.id
    return task


def let_pass(client: Client, clock: FakeClock, seconds: float) -> None:
    """Let time pass second by second, the keeper always keeping up."""
    until = clock.now() + seconds
    while clock.now() < until:
        clock.advance(min(1, until - clock.now()))
        client.__connection__().run(turns())


def let_pass_until(client: Client, clock: FakeClock, fact: Callable[[], Any]) -> None:
    def passing() -> Any:
        let_pass(client, clock, 1)
        return fact()

    eventually(passing)


def info(client: Client, task: Task) -> TaskInfo:
    found = client.get(task.id)
    assert found is not None
    return found


def status(client: Client, task: Task) -> Status:
    return info(client, task).status


def of(kind: type[Event], events: list[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# How a block ends


def test_leaving_the_block_is_a_success(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task):
        pass
    assert info(client, task).status is Status.SUCCESS
    assert info(client, task).result is None


def test_complete_says_the_result(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.complete({"pages": [1, 2]})
    assert info(client, task).result == {"pages": [1, 2]}


def test_an_exception_is_a_retriable_failure_that_is_described_and_goes_on_its_way(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ZeroDivisionError), leasekit.lease(task):
        _ = 1 / 0
    found = info(client, task)
    assert found.status is Status.RETRIABLE_FAILURE
    assert found.error["type"] == "ZeroDivisionError"
    assert found.error["message"] == "division by zero"
    assert "1 / 0" in found.error["traceback"]


def test_an_exception_that_python_cannot_show_is_described_as_far_as_it_can_be(client: Client) -> None:
    """It ends its task like any other: a lease is not beaten for a body that is gone."""

    class Unshowable(SyntaxError):
        @property
        def lineno(self) -> int:  # type: ignore[override]
            raise AttributeError("lineno")

    task = claimed(client)
    with pytest.raises(SyntaxError), leasekit.lease(task):
        raise Unshowable
    assert info(client, task).error["type"].endswith("Unshowable")
    assert "AttributeError" in info(client, task).error["traceback"]


class BrokenTracer(Tracer):
    """Fails in these of its methods."""

    listening = True

    def __init__(self, *broken: str) -> None:
        self._broken = broken

    def __call__(self, event: Event) -> None: ...

    def scheduling(self, tasks: Sequence[NewTask]) -> AbstractContextManager[Sequence[NewTask]]:
        return contextlib.nullcontext(tasks)

    def running(self, task: Task) -> Running:
        if "running" in self._broken:
            raise RuntimeError("broken")
        running = Mock(spec=Running)
        for name in self._broken:
            getattr(running, name).side_effect = RuntimeError("broken")
        return running


@pytest.mark.parametrize("broken", ["running", "enter", "leave", "end"])
@pytest.mark.parametrize("fails", [False, True])
def test_whoever_traces_a_body_and_fails_does_not_keep_its_lease(client: Client, broken: str, fails: bool) -> None:
    client.listen(BrokenTracer(broken))
    task = claimed(client)
    with contextlib.suppress(ZeroDivisionError), leasekit.lease(task):
        _ = 1 / (0 if fails else 1)
    assert status(client, task) is (Status.RETRIABLE_FAILURE if fails else Status.SUCCESS)


def test_fatal_is_a_fatal_failure(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(Fatal), leasekit.lease(task):
        raise Fatal("no such page")
    assert info(client, task).status is Status.FATAL_FAILURE
    assert info(client, task).error["message"] == "no such page"


def test_fatal_in_an_exception_group_is_a_fatal_failure(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ExceptionGroup), leasekit.lease(task):
        raise ExceptionGroup("outer", [ValueError(), ExceptionGroup("inner", [Fatal()])])
    assert status(client, task) is Status.FATAL_FAILURE


def test_our_lease_lost_settles_nothing(client: Client, faulty: Faulty) -> None:
    task = claimed(client)
    with pytest.raises(LeaseLost), leasekit.lease(task):
        raise LeaseLost("somebody else said so")
    assert status(client, task) is Status.PROCESSING
    assert faulty.calls["settle"] == 0


def test_our_lease_lost_in_an_exception_group_settles_nothing(client: Client, faulty: Faulty) -> None:
    task = claimed(client)
    with pytest.raises(ExceptionGroup), leasekit.lease(task):
        raise ExceptionGroup("", [LeaseLost("", task_id=task.id)])
    assert faulty.calls["settle"] == 0


def test_the_loss_of_an_inner_lease_is_a_failure_of_the_outer_one(client: Client) -> None:
    """It is not the outer task that was lost: it must be tried again, not lie about until its lease has run out."""
    outer, inner = claimed(client, id="outer"), buffered(client, id="inner")
    with pytest.raises(LeaseLost), leasekit.lease(outer), leasekit.lease(inner):
        raise LeaseLost("", task_id=inner.id)
    assert not info(client, inner).history
    assert status(client, outer) is Status.RETRIABLE_FAILURE


def test_the_cancellation_of_an_inner_task_does_not_cancel_the_outer_one(client: Client, clock: FakeClock) -> None:
    outer, inner = claimed(client, id="outer"), buffered(client, id="inner")
    with pytest.raises(Cancelled), leasekit.lease(outer), leasekit.lease(inner) as held:
        client.cancel(inner.id)
        clock.advance(120)
        eventually(lambda: told(held))
        held.check()
    assert status(client, inner) is Status.CANCELLED
    assert status(client, outer) is Status.RETRIABLE_FAILURE


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interruption_releases_the_task_and_the_attempt_is_not_counted(
    client: Client, interruption: type[BaseException]
) -> None:
    task = claimed(client)
    with pytest.raises(interruption), leasekit.lease(task):
        raise interruption
    assert status(client, task) is Status.ENQUEUED
    assert next(client.tasks("k")).attempt == 1


def test_an_error_without_a_text_is_reported_all_the_same(client: Client) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    task = claimed(client)
    with pytest.raises(Silent), leasekit.lease(task):
        raise Silent
    assert status(client, task) is Status.RETRIABLE_FAILURE
    assert "Silent" in info(client, task).error["type"]


def test_an_error_that_utf8_cannot_say_is_reported_all_the_same(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(OSError, match="file"), leasekit.lease(task):
        raise OSError("file \udcff")
    assert info(client, task).error["message"] == "file ?"


# What a body says of it


def test_fail_is_tried_again_with_what_it_said(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.fail({"code": 7})
    assert info(client, task).status is Status.RETRIABLE_FAILURE
    assert info(client, task).error == {"code": 7}


def test_fail_describes_an_exception(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.fail(ValueError("odd"))
    assert info(client, task).error["message"] == "odd"


def test_fail_for_good_is_fatal(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.fail("never", retry=False)
    assert status(client, task) is Status.FATAL_FAILURE


def test_fail_in_so_many_seconds_is_due_then(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.fail("later", retry=90)
    assert info(client, task).at == clock.later(90)


def test_fail_in_zero_seconds_is_tried_again_at_once(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.fail("now", retry=0)
    assert next(client.tasks("k")).attempt == 2


def test_release_gives_the_task_back_untried(client: Client) -> None:
    """Nobody waits for the rest of its lease."""
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.release()
    assert next(client.tasks("k")).attempt == 1


def test_release_after_so_many_seconds_is_due_then(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.release(after=30)
    assert info(client, task).at == clock.later(30)


@pytest.mark.parametrize("wait", [-1, math.nan, math.inf, 1e308, "30"])
def test_a_wait_that_makes_no_sense_is_refused_where_it_is_said(client: Client, wait: Any) -> None:
    """Refused by the service it would become a fatal failure."""
    task = claimed(client)
    with leasekit.lease(task) as held:
        with pytest.raises(ValueError, match="must be a number of seconds from 0"):
            held.fail("", retry=wait)
        with pytest.raises(ValueError, match="must be a number of seconds from 0"):
            held.release(after=wait)
    assert status(client, task) is Status.SUCCESS


def test_an_exception_after_complete_is_a_failure(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ValueError, match="late"), leasekit.lease(task) as held:
        held.complete(1)
        raise ValueError("late")
    assert info(client, task).status is Status.RETRIABLE_FAILURE
    assert info(client, task).result is None


def test_an_exception_after_fail_leaves_what_fail_said(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ValueError, match="late"), leasekit.lease(task) as held:
        held.fail("known", retry=False)
        raise ValueError("late")
    assert info(client, task).status is Status.FATAL_FAILURE
    assert info(client, task).error == "known"


def test_not_yet_gives_the_task_back_until_then_and_counts_no_attempt(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with pytest.raises(NotYet), leasekit.lease(task) as held:
        held.progress("asked once")
        raise NotYet("the VM boots", after=30)
    assert info(client, task).status is Status.ENQUEUED
    assert info(client, task).progress == "asked once"
    assert list(client.tasks("k", until_idle=0)) == []
    let_pass(client, clock, 31)
    again = next(client.tasks("k"))
    assert (again.attempt, again.progress) == (1, "asked once")


def test_not_yet_without_a_time_is_a_second(client: Client, clock: FakeClock) -> None:
    with pytest.raises(NotYet), leasekit.lease(claimed(client)):
        raise NotYet
    assert list(client.tasks("k", until_idle=0)) == []
    let_pass(client, clock, 1.1)
    assert next(client.tasks("k")).attempt == 1


def test_of_several_not_yet_in_a_group_the_longest_wait_counts(client: Client, clock: FakeClock) -> None:
    with pytest.raises(ExceptionGroup), leasekit.lease(claimed(client)):
        raise ExceptionGroup("of a task group", [NotYet(after=1), NotYet(after=30)])
    let_pass(client, clock, 29)
    assert list(client.tasks("k", until_idle=0)) == []
    let_pass(client, clock, 2)
    assert next(client.tasks("k")).attempt == 1


def test_beside_another_error_not_yet_counts_for_nothing(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ExceptionGroup), leasekit.lease(task):
        raise ExceptionGroup("of a task group", [NotYet(after=30), ValueError("broken")])
    assert info(client, task).status is Status.RETRIABLE_FAILURE


def test_not_yet_after_a_cancel_request_is_cancelled(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with pytest.raises(NotYet), leasekit.lease(task) as held:
        client.cancel(task.id)
        let_pass_until(client, clock, lambda: told(held))
        raise NotYet(after=30)
    assert info(client, task).status is Status.CANCELLED


@pytest.mark.parametrize("after", [-1, math.nan, math.inf, "3", True])
def test_not_yet_is_after_a_number_of_seconds(after: Any) -> None:
    with pytest.raises(leasekit.ConfigError, match="after must be a number of seconds from 0"):
        NotYet(after=after)


def test_an_exception_after_release_leaves_it_released(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(ValueError, match="late"), leasekit.lease(task) as held:
        held.release()
        raise ValueError("late")
    assert status(client, task) is Status.ENQUEUED


def test_the_last_word_counts(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        before = held.decided
        held.fail("no")
        held.complete("yes")
        assert (before, held.decided) == (False, True)
    assert info(client, task).result == "yes"


def test_a_result_that_is_no_json_is_refused_where_it_is_said(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held, pytest.raises(ValueError, match="not JSON"):
        held.complete(object())
    assert status(client, task) is Status.SUCCESS


@dataclass
class Measured:
    """A value with a number in it."""

    value: float


@pytest.mark.parametrize("value", [math.nan, {"a": [1, -math.inf]}, (None, Measured(math.inf))])
@pytest.mark.parametrize("say", ["complete", "progress", "fail", "then", "schedule"])
def test_a_number_that_json_does_not_have_is_refused_where_it_is_said(client: Client, say: str, value: Any) -> None:
    """msgspec writes null for it: the task would succeed with a result that nobody has returned."""
    task = claimed(client)
    with leasekit.lease(task) as held, pytest.raises((ValueError, Refused), match="NaN or an infinity"):
        match say:
            case "then":
                held.then("next", value)
            case "schedule":
                client.schedule("next", value)
            case _:
                getattr(held, say)(value)
    assert status(client, task) is Status.SUCCESS


@pytest.mark.parametrize("value", [None, [None, "null", "NaN"], Measured(1e308), {1.5: None}, [{}, None]])
def test_null_is_a_value_like_others(client: Client, value: Any) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        held.complete(value)
    assert info(client, task).result == msgspec.json.decode(msgspec.json.encode(value))


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("say", ["complete", "progress", "fail", "then"])
def test_a_value_that_is_nested_too_deep_is_refused_where_it_is_said(client: Client, say: str) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        speak = functools.partial(held.then, "next") if say == "then" else getattr(held, say)
        with pytest.raises(ValueError, match="nested too deep: 64 levels at most"):
            speak(nested(65))
        speak(nested(64))
        held.complete("done")
    assert info(client, task).result == "done"


@pytest.fixture
def unlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not look at values, as one of another version may not."""
    monkeypatch.setattr(encoding, "value_fault", lambda value, most: None)


@pytest.mark.usefixtures("unlooked")
def test_a_result_that_the_service_refuses_ends_as_a_fatal_failure_and_raises(client: Client) -> None:
    task = claimed(client)
    with pytest.raises(leasekit.Refused), leasekit.lease(task) as held:
        held.complete(nested(65))
    eventually(lambda: status(client, task) is Status.FATAL_FAILURE)
    assert "refused" in info(client, task).error["message"]


@pytest.mark.usefixtures("unlooked")
def test_an_error_that_the_service_refuses_still_ends_the_task(client: Client) -> None:
    """Otherwise a failure for good would run again and again."""
    task = claimed(client)
    with pytest.raises(leasekit.Refused), leasekit.lease(task) as held:
        held.fail(nested(65), retry=False)
    eventually(lambda: status(client, task) is Status.FATAL_FAILURE)


# Whose lease it is


def test_a_lease_is_used_once(client: Client) -> None:
    held = leasekit.lease(claimed(client))
    with held:
        pass
    with pytest.raises(NotHeld, match="used before"), held:
        pass


def test_a_body_is_not_begun_twice(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task), pytest.raises(NotHeld, match="begun"), leasekit.lease(task):
        pytest.fail("it began")
    assert status(client, task) is Status.SUCCESS


def test_a_task_that_was_settled_cannot_be_leased_again(client: Client) -> None:
    task = claimed(client)
    with leasekit.lease(task):
        pass
    eventually(lambda: not len(client.__connection__().keeper))
    with pytest.raises(NotHeld, match="ended"), leasekit.lease(task):
        pytest.fail("it began")


def test_a_task_that_no_client_claimed_cannot_be_leased() -> None:
    with pytest.raises(NotHeld, match=r"client\.tasks"), leasekit.lease(Task(id="a", kind="k", token="t", ttl=300)):
        pytest.fail("it began")


def test_a_lease_that_has_not_begun_says_so(client: Client) -> None:
    held = leasekit.lease(claimed(client))
    for ask in (held.check, held.remaining, lambda: held.lost, lambda: held.progress(1)):
        with pytest.raises(NotHeld, match="not begun"):
            ask()


def test_after_its_block_a_lease_is_held_no_more(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        pass
    for say in (held.check, lambda: held.progress(1), held.complete, held.release, lambda: held.fail("")):
        with pytest.raises(NotHeld, match="has ended"):
            say()


def test_a_task_is_not_leased_after_its_client_was_closed(faulty: Faulty, clock: FakeClock) -> None:
    client = Client(faulty, clock=clock)
    task = claimed(client)
    client.close()
    with pytest.raises(NotHeld), leasekit.lease(task):
        pytest.fail("it began")


def test_a_lease_that_was_made_before_its_client_was_closed_does_not_begin_after() -> None:
    client = Client("memory://")
    client.schedule("k")
    held = leasekit.lease(next(client.tasks("k")))
    client.close()
    with pytest.raises(NotHeld), held:
        pytest.fail("it began")


def test_a_lease_that_is_dropped_unused_is_given_back_and_the_log_says_so(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    task = claimed(client)
    leasekit.lease(task)
    gc.collect()
    eventually(lambda: status(client, task) is Status.ENQUEUED)
    eventually(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"the block of task {task.id} was never entered: it is given back" in record.getMessage()
    assert (vars(record)["task_id"], vars(record)["token_start"]) == (task.id, task.token[:6])


def test_a_task_of_which_no_lease_was_made_is_given_back_without_a_line_about_its_block(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    task_id = task.id
    del task
    gc.collect()
    eventually(lambda: (found := client.get(task_id)) is not None and found.status is Status.ENQUEUED)
    client.schedule("k")
    with leasekit.lease(next(client.tasks("k"))):  # one turn of the driver's thread later
        pass
    assert "never entered" not in caplog.text


def test_what_a_body_knows_of_its_task(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        held.fail("", retry=0)
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert (held.fence, held.attempt, held.checkpoint, held.lost) == (2, 2, None, False)


# Trust


def test_remaining_counts_down_to_when_the_lease_is_lost(client: Client, clock: FakeClock) -> None:
    with leasekit.lease(claimed(client)) as held:
        assert held.remaining() == pytest.approx(Heartbeats().slack)
        clock.advance(9)
        assert held.remaining() == pytest.approx(Heartbeats().slack - 9)


def test_an_acknowledged_beat_moves_trust_on(client: Client, clock: FakeClock, events: list[Event]) -> None:
    with leasekit.lease(claimed(client)) as held:
        for count in range(2, 6):
            clock.advance(120)
            reaches(count, lambda: len(of(Renewed, events)))
            assert held.remaining() == pytest.approx(Heartbeats().slack)


def test_a_slow_answer_buys_nothing(client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]) -> None:
    """Trust counts from when the beat left, not from when its answer came."""
    answered = Gate()
    with leasekit.lease(claimed(client)) as held:
        faulty.script("beat", faults.delay_answer(answered))
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        clock.advance(50)
        answered.open()
        eventually(lambda: len(of(Renewed, events)) == 2)
        assert held.remaining() == pytest.approx(Heartbeats().slack - 50)


def test_failed_beats_move_nothing(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    """A beat that failed resets no timer."""
    with leasekit.lease(claimed(client)) as held:
        faulty.always("beat", faults.refuse)
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        clock.advance(10)
        eventually(lambda: faulty.calls["beat"] >= 3)
        assert held.remaining() == pytest.approx(Heartbeats().slack - 130)
        faulty.clear()


def test_the_first_failed_beat_ends_nothing(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    """An error is no loss, and the next try comes within the cycle."""
    with leasekit.lease(claimed(client)) as held:
        faulty.script("beat", faults.lose_answer, faults.garble, faults.drop)
        clock.advance(120)
        let_pass_until(client, clock, lambda: faulty.calls["beat"] >= 5)
        eventually(lambda: held.remaining() > Heartbeats().slack - 60)
        held.check()
    assert faulty.fired["drop"] == 1


def test_hooks_hear_of_a_loss_that_the_code_notices_first(
    client: Client, clock: FakeClock, events: list[Event]
) -> None:
    task, busy = claimed(client), threading.Event()
    with pytest.raises(LeaseLost), leasekit.lease(task) as held:
        reaches(1, lambda: len(of(Renewed, events)))
        client.__connection__().driver.call_soon(busy.wait, 30)
        clock.advance(Heartbeats().slack)
        held.check()
    busy.set()
    reaches(1, lambda: len(of(Lost, events)))


def test_a_lease_is_lost_before_the_end_of_trust_and_says_why(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    task = claimed(client)
    why = r"no beat was sent for 273 s because the process was stopped for 153 s .*; trust ended at 00:21:14 UTC"
    with pytest.raises(LeaseLost, match=why) as caught, leasekit.lease(task) as held:
        faulty.always("beat", faults.hang)
        clock.advance(Heartbeats().slack - 1)
        held.check()
        reaches(2, lambda: len(of(Sent, events)))
        clock.advance(1)
        assert held.lost
        assert held.remaining() == 0
        assert clock.now() < 1000 + Heartbeats().trust
        held.check()
    assert (caught.value.reason, caught.value.task_id) == ("expired", task.id)
    assert faulty.calls["settle"] == 0


def test_a_body_that_runs_longer_than_it_may_is_told_so_within_a_second(
    client: Client, clock: FakeClock, events: list[Event]
) -> None:
    """The service is asked as soon as the limit is over, not with the next regular heartbeat."""
    task = claimed(client, max_runtime=60, max_crashes=0)
    with pytest.raises(LeaseLost, match="its max_runtime is over") as lost, leasekit.lease(task) as held:
        assert held.remaining_runtime() == 60
        reaches(1, lambda: len(of(Renewed, events)))
        clock.advance(59)
        assert (held.remaining_runtime(), held.lost) == (1, False)
        clock.advance(2)
        assert held.remaining_runtime() == 0
        eventually(lambda: held.lost)
        held.check()
    assert lost.value.reason == "overdue"
    eventually(lambda: info(client, task).status is Status.DEAD)  # at once: the lease would have gone on for minutes
    assert "its max_runtime is over" in info(client, task).error["message"]


def test_a_limit_is_counted_on_from_each_answer(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    async def renewed(call: Call) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="renewed", ttl=300, remaining_runtime=5) for beat in call.items]

    with leasekit.lease(claimed(client, max_runtime=60)) as held:
        faulty.always("beat", Fault("renewed", renewed))
        reaches(1, lambda: len(of(Renewed, events)))
        for count, seconds in enumerate((61, 6, 6), 2):
            clock.advance(seconds)
            reaches(count, lambda: len(of(Renewed, events)))
        assert held.remaining_runtime() == 5


def test_a_run_without_a_limit_has_no_remaining_runtime(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        assert held.remaining_runtime() is None


def test_code_that_reports_nothing_hears_of_a_cancel_without_waiting_for_its_next_heartbeat(
    service: MemoryService, clock: FakeClock, events: list[Event]
) -> None:
    with Client(MemoryBackend(service, worker="w"), clock=clock, hooks=[events.append]) as client:
        task = claimed(client)
        with pytest.raises(Cancelled), leasekit.lease(task) as held:
            client.cancel(task.id)
            clock.advance(1)  # no more than one early heartbeat in a second
            reaches(1, lambda: len(of(CancelRequested, events)))
            held.check()


def test_what_is_no_task_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"not of dict: what boto3 returned has leasekit_sqs\.lease"):
        leasekit.lease({"Body": "7", "ReceiptHandle": "x"})  # type: ignore[arg-type]


def test_a_reason_that_is_none_of_ours_is_unknown_and_stands_in_the_message(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    async def gone(call: Call) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="gone", reason="eclipsed") for beat in call.items]

    task = claimed(client)
    with pytest.raises(LeaseLost, match="eclipsed") as caught, leasekit.lease(task) as held:
        faulty.always("beat", Fault("gone", gone))
        clock.advance(120)
        eventually(lambda: held.lost)
        held.check()
    assert caught.value.reason == "unknown"


def test_the_service_says_why_a_lease_is_gone(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    async def taken(call: Call) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="gone", reason="taken") for beat in call.items]

    task = claimed(client)
    with pytest.raises(LeaseLost, match="taken: another worker claimed it") as caught, leasekit.lease(task) as held:
        faulty.always("beat", Fault("taken", taken))
        clock.advance(120)
        eventually(lambda: held.lost)
        held.check()
    assert caught.value.reason == "taken"
    assert faulty.calls["settle"] == 0


def test_a_lost_lease_is_beaten_no_more(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    with pytest.raises(LeaseLost), leasekit.lease(claimed(client)) as held:
        faulty.script("beat", faults.fail_items([0]))
        faulty.always("beat", faults.refuse)
        clock.advance(Heartbeats().trust)
        eventually(lambda: held.lost)
        faulty.clear()
        clock.advance(0)
        beats = faulty.calls["beat"]
        with leasekit.lease(claimed(client, id="other")):  # one beat before time passes, or it would be late by as much
            clock.advance(120)
            eventually(lambda: faulty.calls["beat"] >= beats + 2)
        assert all("other" in [beat.id for beat in call.items] for call in list(faulty.log)[-1:] if call.kind == "beat")
        held.check()


def test_leaving_a_lost_block_without_an_error_raises_what_was_lost(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    task = claimed(client)
    with pytest.raises(LeaseLost), leasekit.lease(task) as held:
        client.cancel("nobody")
        faulty.backend.service.steal(task.id)  # type: ignore[attr-defined]
        clock.advance(120)
        eventually(lambda: held.lost)
    assert faulty.calls["settle"] == 0


def test_an_error_in_a_lost_block_is_the_cause_of_what_is_raised(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    with pytest.raises(LeaseLost) as caught, leasekit.lease(claimed(client)):
        faulty.always("beat", faults.refuse)
        clock.advance(Heartbeats().slack)
        raise ValueError("the database was gone too")
    assert isinstance(caught.value.__cause__, ValueError)


def test_finished_work_is_reported_though_its_lease_ran_out(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    """A result outranks a late beat."""
    task = claimed(client)
    with leasekit.lease(task) as held:
        faulty.always("beat", faults.hang)
        clock.advance(301)
        assert held.lost
        held.complete("done")
    assert info(client, task).result == "done"


def test_finished_work_whose_task_was_given_to_another_is_lost(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    other = MemoryBackend(faulty.backend.service, worker="other")  # type: ignore[attr-defined]
    with Client(other, clock=clock) as elsewhere:
        task = claimed(client)
        with (
            pytest.raises(LeaseLost, match=r"refused its result: taken; .*; trust ended") as caught,
            leasekit.lease(task) as held,
        ):
            faulty.always("beat", faults.hang)
            clock.advance(301)
            assert next(elsewhere.tasks("k")).id == task.id
            held.complete("too late")
        assert caught.value.reason == "taken"
        assert status(client, task) is not Status.SUCCESS


def test_late_work_is_not_reported_to_a_service_that_would_take_it_from_anyone(clock: FakeClock) -> None:
    faulty = Faulty(MemoryBackend(MemoryService(now=clock), worker="w"), sleep=clock.sleep)
    faulty.capabilities = Capabilities(refuses_stale=False)
    with Client(faulty, clock=clock) as client:
        with pytest.raises(LeaseLost), leasekit.lease(claimed(client)):
            faulty.always("beat", faults.hang)
            clock.advance(301)
        faulty.clear()
        assert faulty.calls["settle"] == 0


def test_check_judges_by_the_clock_while_the_keeper_is_stuck(faulty: Faulty, clock: FakeClock) -> None:
    """Whatever holds up the driver's thread, a body stops believing in time."""
    stuck, free = threading.Event(), threading.Event()

    async def block(call: Call) -> Any:
        stuck.set()
        free.wait(20)
        return await call.send()

    with Client(faulty, clock=clock) as client:
        task = claimed(client)
        with (
            pytest.raises(LeaseLost, match=r"1 beat was not answered, .* left 274 s ago") as caught,
            leasekit.lease(task) as held,
        ):
            faulty.script("beat", Fault("block", block))
            clock.advance(120)
            assert stuck.wait(20)
            clock.advance(Heartbeats().slack - 121)
            held.check()
            clock.advance(1)
            try:
                held.check()
            finally:
                free.set()
        assert caught.value.reason == "expired"


def test_strikes_end_a_lease_only_when_no_further_try_could_be_answered(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    with (
        pytest.raises(
            LeaseLost, match=r"\d beats in a row were not answered \(Unavailable: .* left \d+ s ago; trust ended"
        ) as caught,
        leasekit.lease(claimed(client)) as held,
    ):
        faulty.always("beat", faults.refuse)
        while not held.lost:
            let_pass(client, clock, 1)
        assert clock.now() >= 1000 + Heartbeats().strikes_from
        assert clock.now() < 1000 + Heartbeats().slack
        held.check()
    assert caught.value.reason == "strikes"


def test_strike_after_zero_is_three_strikes_to_the_letter(faulty: Faulty, clock: FakeClock) -> None:
    events: list[Event] = []
    with Client(faulty, clock=clock, hooks=[events.append], heartbeats=Heartbeats(strike_after=0)) as client:
        with pytest.raises(LeaseLost), leasekit.lease(claimed(client)) as held:
            faulty.always("beat", faults.refuse)
            clock.advance(120)
            while not held.lost:
                let_pass(client, clock, 1)
            assert faulty.fired["refuse"] == 3
            held.check()
        faulty.clear()


# Before it begins


def test_a_service_that_does_not_say_how_long_it_waited_is_asked_before_the_body_begins(
    client: Client, faulty: Faulty
) -> None:
    async def silent(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=answer.tasks, waited=None)

    acknowledged = Gate()
    faulty.script("claim", Fault("silent", silent))
    faulty.script("beat", faults.delay_answer(acknowledged))
    client.schedule("k")
    task = next(client.tasks("k"))
    began = threading.Event()

    def body() -> None:
        with leasekit.lease(task) as held:
            began.set()
            held.check()

    thread = threading.Thread(target=body)
    thread.start()
    eventually(lambda: faulty.calls["beat"] == 1)
    assert not began.is_set()
    acknowledged.open()
    thread.join(20)
    assert began.is_set()
    assert status(client, task) is Status.SUCCESS


def test_a_body_does_not_begin_under_a_lease_that_was_over_on_arrival(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    arrived = Gate()
    faulty.script("claim", faults.delay_answer(arrived))
    client.schedule("k")
    tasks: list[Task] = []
    thread = threading.Thread(target=lambda: tasks.append(next(client.tasks("k"))))
    thread.start()
    eventually(lambda: status_of_all(client) == ["claimed"])
    clock.advance(301)
    arrived.open()
    thread.join(20)
    with pytest.raises(LeaseLost), leasekit.lease(tasks[0]):
        pytest.fail("it began")


def test_a_lease_that_was_lost_before_it_was_made_says_why(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    task = claimed(client)
    faulty.backend.service.steal(task.id)  # type: ignore[attr-defined]
    let_pass_until(client, clock, lambda: not len(client.__connection__().keeper))
    with pytest.raises(LeaseLost, match="another worker claimed it") as lost, leasekit.lease(task):
        pytest.fail("it began")
    assert (lost.value.task_id, lost.value.reason) == (task.id, "taken")


def test_a_body_does_not_begin_under_a_lease_that_is_gone_when_it_is_asked_for(client: Client, faulty: Faulty) -> None:
    async def silent(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=answer.tasks, waited=None)

    async def taken(call: Call) -> list[Verdict]:
        return [Verdict(id=beat.id, verdict="gone", reason="taken") for beat in call.items]

    asked = Gate()
    faulty.script("claim", Fault("silent", silent))
    faulty.script("beat", faults.delay(asked))
    faulty.always("beat", Fault("taken", taken))
    client.schedule("k")
    held = leasekit.lease(next(client.tasks("k")))
    faulty.backend.service.steal(held.task.id)  # type: ignore[attr-defined]
    asked.open()
    with pytest.raises(LeaseLost, match="the service said"), held:
        pytest.fail("it began")
    assert not len(client.__connection__().keeper)


def test_with_little_trust_left_on_arrival_the_first_beat_decides(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    arrived, acknowledged = Gate(), Gate()
    faulty.script("claim", faults.delay_answer(arrived))
    faulty.script("beat", faults.delay_answer(acknowledged))
    client.schedule("k")
    tasks: list[Task] = []
    thread = meanwhile(lambda: tasks.append(next(client.tasks("k"))))
    eventually(lambda: status_of_all(client) == ["claimed"])
    clock.advance(200)
    arrived.open()
    thread.join(20)
    began = threading.Event()

    def body() -> None:
        with leasekit.lease(tasks[0]) as held:
            assert held.remaining() == pytest.approx(Heartbeats().slack)
            began.set()

    thread = meanwhile(body)
    eventually(lambda: status_of_all(client) == ["processing"])
    assert not began.is_set()
    acknowledged.open()
    thread.join(20)
    assert began.is_set()


def status_of_all(client: Client) -> list[str]:
    return [found.status for found in client.list_tasks().tasks]


def test_a_claim_that_waited_longer_than_the_ttl_runs_its_task(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    tasks: list[Task] = []
    thread = threading.Thread(target=lambda: tasks.append(next(client.tasks("k"))))
    thread.start()
    eventually(lambda: faulty.calls["claim"] == 1)
    for _ in range(3):
        eventually(lambda: clock.sleepers >= 2)  # the keeper, and the claim
        clock.advance(10)
    client.schedule("k", claim_timeout=6, heartbeat_timeout=6)
    thread.join(20)
    with leasekit.lease(tasks[0]) as held:
        held.check()
        assert held.remaining() > 0
    assert status(client, tasks[0]) is Status.SUCCESS


def test_an_order_that_came_before_the_body_began_is_told_to_it(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    client.cancel(task.id)
    clock.advance(120)
    record = client.__connection__().keeper.get(task)
    assert record is not None
    eventually(lambda: record.stop is Cancelled)
    with pytest.raises(Cancelled), leasekit.lease(task) as held:
        held.check()
    assert status(client, task) is Status.CANCELLED


def test_who_is_interrupted_before_the_body_begins_gives_the_task_back(client: Client, faulty: Faulty) -> None:
    async def silent(call: Call) -> Any:
        answer = await call.send()
        return type(answer)(tasks=answer.tasks, waited=None)

    faulty.script("claim", Fault("silent", silent))
    faulty.script("beat", faults.hang)
    client.schedule("k")
    task = next(client.tasks("k"))
    eventually(lambda: faulty.calls["beat"] == 1)
    with pytest.raises(KeyboardInterrupt), interrupting(lambda: True), leasekit.lease(task):
        pytest.fail("it began")
    eventually(lambda: status(client, task) is Status.ENQUEUED)


# Orders


def told(held: leasekit.Lease) -> bool:
    try:
        held.check()
    except leasekit.LeaseError:
        return True
    return False


def test_a_cancelled_task_tells_its_body_and_keeps_the_lease_meanwhile(
    client: Client, clock: FakeClock, events: list[Event]
) -> None:
    task = claimed(client)
    with pytest.raises(Cancelled), leasekit.lease(task) as held:
        assert client.cancel(task.id)[0].verdict == "cancel_requested"
        clock.advance(120)
        eventually(lambda: told(held))
        assert not held.lost
        clock.advance(120)
        eventually(lambda: held.remaining() == pytest.approx(Heartbeats().slack))
        held.check()
    assert status(client, task) is Status.CANCELLED
    assert info(client, task).error["message"] == "was cancelled", "not the order to the handler"
    assert len(of(CancelRequested, events)) == 1


def test_a_cancelled_body_that_finishes_all_the_same_is_a_success(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with leasekit.lease(task) as held:
        client.cancel(task.id)
        clock.advance(120)
        eventually(lambda: told(held))
        held.complete("it was done")
    assert info(client, task).result == "it was done"


def test_cancelled_without_an_order_is_a_failure_like_any_other(client: Client) -> None:
    """Nobody wanted that task to end for good."""
    task = claimed(client)
    with pytest.raises(Cancelled), leasekit.lease(task):
        raise Cancelled
    assert status(client, task) is Status.RETRIABLE_FAILURE


# Progress


def test_progress_is_the_next_holders_checkpoint(client: Client) -> None:
    with leasekit.lease(claimed(client)) as held:
        held.progress({"page": 1})
        held.progress({"page": 2})
        held.fail("", retry=0)
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert held.checkpoint == {"page": 2}


def test_progress_goes_with_the_next_beat_once_and_with_the_settlement_always(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    """It adds no timer of its own."""
    with leasekit.lease(claimed(client)) as held:
        held.progress({"page": 1})
        for count in (2, 3):
            clock.advance(120)
            reaches(count, lambda: len(of(Renewed, events)))
    beats = [call.items[0] for call in faulty.log if call.kind == "beat"]
    [settlement] = [call.items[0] for call in faulty.log if call.kind == "settle"]
    assert [bytes(beat.progress) if beat.progress else None for beat in beats[1:]] == [b'{"page":1}', None]
    assert bytes(settlement.progress) == b'{"page":1}'


def test_progress_whose_beat_failed_goes_with_the_next(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    with leasekit.lease(claimed(client)) as held:
        held.progress(7)
        faulty.script("beat", faults.drop)
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        clock.advance(10)
        eventually(lambda: client.get(held.task.id).progress == 7)  # type: ignore[union-attr]


def test_progress_that_comes_while_a_beat_is_under_way_goes_with_the_next(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    answered = Gate()
    with leasekit.lease(claimed(client)) as held:
        held.progress("old")
        faulty.script("beat", faults.delay_answer(answered))
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        held.progress("new")
        answered.open()
        eventually(lambda: len(of(Renewed, events)) == 2)
        clock.advance(120)
        eventually(lambda: client.get(held.task.id).progress == "new")  # type: ignore[union-attr]


def test_progress_whose_beat_arrives_after_the_next_one_does_not_replace_it(
    client: Client, clock: FakeClock, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, arrived, arrives = faulty.backend.beat, list[Any](), Gate()

    async def noted(beats: Sequence[Beat]) -> list[Verdict]:
        verdicts = await beat(beats)
        arrived.extend(one.progress for one in beats)
        return verdicts

    monkeypatch.setattr(faulty.backend, "beat", noted)
    with leasekit.lease(claimed(client)) as held:
        faulty.script("beat", faults.late(arrives))
        held.progress("old")
        clock.advance(120)
        eventually(lambda: faulty.fired["late"])
        held.progress("new")
        clock.advance(10)
        eventually(lambda: client.get(held.task.id).progress == "new")  # type: ignore[union-attr]
        arrives.open()
        eventually(lambda: b'"old"' in map(bytes, filter(None, arrived)))
        assert client.get(held.task.id).progress == "new"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "why"), [(object(), "not JSON"), ("x" * 65_536, "65,536 at most"), ("\ud800", "not JSON"), ([], "nested")]
)
def test_progress_that_no_service_would_keep_is_refused_where_it_is_said(client: Client, value: Any, why: str) -> None:
    """Refused by the service it would end the task as a fatal failure, its result thrown away."""
    if why == "nested":
        for _ in range(70):
            value = [value]
    task = claimed(client)
    with leasekit.lease(task) as held:
        with pytest.raises(ValueError, match=why):
            held.progress(value)
        held.progress("[" * 100)
    assert status(client, task) is Status.SUCCESS


def test_progress_of_a_lost_lease_is_refused(client: Client, clock: FakeClock, faulty: Faulty) -> None:
    with pytest.raises(LeaseLost), leasekit.lease(claimed(client)) as held:
        faulty.always("beat", faults.hang)
        clock.advance(300)
        held.progress(1)


@pytest.mark.parametrize("how", ["cancelled", "idle"])
def test_the_checkpoint_with_which_a_body_hears_that_it_has_to_end_is_kept(
    client: Client, clock: FakeClock, how: str
) -> None:
    task = claimed(client)
    with pytest.raises(leasekit.LeaseError), leasekit.lease(task, idle_timeout=60 if how == "idle" else None) as held:
        held.progress(1)
        if how == "cancelled":
            client.cancel(task.id)
        clock.advance(120)
        eventually(lambda: told(held))
        held.progress(2)
    assert info(client, task).progress == 2


# The report


def test_a_result_whose_answer_was_lost_is_settled_once(client: Client, faulty: Faulty, clock: FakeClock) -> None:
    faulty.script("settle", faults.lose_answer)
    task = claimed(client)
    other = meanwhile(lambda: let_pass_until(client, clock, lambda: faulty.calls["settle"] == 2))
    with leasekit.lease(task) as held:
        held.complete(1)
    other.join()
    assert [entry.outcome for entry in info(client, task).history] == ["success"]


def test_beats_go_on_until_the_settlement_is_answered_and_not_a_moment_longer(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    answered = Gate()
    task = claimed(client)
    faulty.script("settle", faults.delay(answered))

    def beating() -> None:
        eventually(lambda: faulty.calls["settle"] == 1)
        for count in (2, 3, 4):
            clock.advance(120)
            reaches(count, lambda: len(of(Renewed, events)))
        answered.open()

    thread = meanwhile(beating)
    with leasekit.lease(task) as held:
        held.complete("late, and ours")
    thread.join()
    beats = faulty.calls["beat"]
    with leasekit.lease(buffered(client, id="next")):
        while faulty.calls["beat"] < beats + 2:
            let_pass(client, clock, 1)
    assert info(client, task).result == "late, and ours"
    assert all(task.id not in [b.id for b in call.items] for call in list(faulty.log)[-4:] if call.kind == "beat")
    assert not of(Lost, events)


def test_a_settlement_that_crosses_a_beat_is_no_loss(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    """The beat arrives after the settlement; its *gone* is not told to anybody."""
    arrives = Gate()
    task = claimed(client)
    with leasekit.lease(task) as held:
        faulty.script("beat", faults.delay(arrives))
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        held.release(after=50)
    arrives.open()
    [call] = [call for call in faulty.log if call.kind == "beat" and call.fault == "delay"]
    eventually(lambda: call.is_over)
    assert [verdict.verdict for verdict in call.answer] == ["gone"]
    eventually(lambda: not len(client.__connection__().keeper))
    assert info(client, task).at == clock.later(50)
    assert not of(Lost, events)


def test_a_gone_verdict_while_the_settlement_is_under_way_is_no_loss(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    answered = Gate()
    task = claimed(client)
    faulty.script("settle", faults.delay_answer(answered))

    def beating() -> None:
        eventually(lambda: status(client, task) is Status.SUCCESS)
        clock.advance(120)
        eventually(lambda: faulty.calls["beat"] == 2)
        answered.open()

    thread = meanwhile(beating)
    with leasekit.lease(task):
        pass
    thread.join()
    assert not of(Lost, events)
    assert [event.verdict for event in of(Settled, events)] == ["settled"]


def test_a_block_that_ended_well_says_so_when_its_result_could_not_be_reported(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    task = claimed(client)
    with pytest.raises(LeaseLost, match="could not be reported") as caught, leasekit.lease(task) as held:
        faulty.always("*", faults.refuse)
        held.complete("kept")
        other = meanwhile(lambda: eventually(lambda: faulty.calls["settle"]), lambda: clock.advance(Heartbeats().trust))
    assert caught.value.reason == "unreported"
    other.join()
    reaches(1, lambda: len(of(Lost, events)))
    assert [event.reason for event in of(Lost, events)] == ["unreported"]
    faulty.clear()
    let_pass_until(client, clock, lambda: info(client, task).result == "kept")


def test_a_result_whose_block_was_told_of_its_loss_does_not_reach_a_service_that_obeys_stale_writes(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a result could end the run of the next holder, while the code that ended well does not count."""
    monkeypatch.setattr(faulty, "capabilities", replace(faulty.capabilities, refuses_stale=False))
    task = claimed(client)
    with pytest.raises(LeaseLost, match="could not be reported"), leasekit.lease(task) as held:
        faulty.always("*", faults.refuse)
        held.complete("late")
        other = meanwhile(lambda: eventually(lambda: faulty.calls["settle"]), lambda: clock.advance(Heartbeats().trust))
    other.join()
    reaches(1, lambda: len(of(Settled, events)))
    faulty.clear()
    calls = faulty.calls["settle"]
    let_pass(client, clock, 20)
    assert faulty.calls["settle"] == calls
    assert info(client, task).result is None
    assert [event.verdict for event in of(Settled, events)] == ["gone"]


def test_a_result_does_not_reach_a_service_that_obeys_stale_writes_while_its_block_still_waits(
    client: Client, clock: FakeClock, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may have the task: the block must not end well."""
    monkeypatch.setattr(faulty, "capabilities", replace(faulty.capabilities, refuses_stale=False))
    task = claimed(client, claim_timeout=6, heartbeat_timeout=6)
    ended = threading.Event()

    def end_the_outage() -> None:
        eventually(lambda: faulty.calls["settle"])
        clock.advance(Heartbeats().for_ttl(6).trust)
        faulty.clear()
        faulty.always("beat", faults.refuse)
        let_pass_until(client, clock, ended.is_set)

    other = meanwhile(end_the_outage)
    try:
        with pytest.raises(LeaseLost, match="could not be reported"), leasekit.lease(task) as held:
            faulty.always("*", faults.refuse)
            held.complete("late")
    finally:
        ended.set()
        other.join()
    assert info(client, task).result is None


def test_a_fatal_failure_that_comes_too_late_does_not_reach_a_service_that_obeys_stale_writes(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next holder may have done the task by then."""
    monkeypatch.setattr(faulty, "capabilities", replace(faulty.capabilities, refuses_stale=False))
    task = claimed(client)
    with pytest.raises(Fatal), leasekit.lease(task):
        faulty.always("*", faults.refuse)
        other = meanwhile(lambda: eventually(lambda: faulty.calls["settle"]), lambda: clock.advance(Heartbeats().trust))
        raise Fatal("no such page")
    other.join()
    reaches(1, lambda: len(of(Settled, events)))
    faulty.clear()
    calls = faulty.calls["settle"]
    let_pass(client, clock, 20)
    assert faulty.calls["settle"] == calls
    assert info(client, task).status is not Status.FATAL_FAILURE
    assert [event.reason for event in of(Lost, events)] == ["unreported"]


def test_a_failed_block_does_not_wait_beyond_the_end_of_trust(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    """Its error goes on its way; the report is kept, and made when the service is back."""
    task = claimed(client)
    with pytest.raises(ZeroDivisionError), leasekit.lease(task):
        faulty.always("*", faults.refuse)
        other = meanwhile(lambda: eventually(lambda: faulty.calls["settle"]), lambda: clock.advance(Heartbeats().trust))
        _ = 1 / 0
    eventually(lambda: of(ReportDelayed, events))  # the call was counted before its failure was told
    other.join()
    faulty.clear()
    let_pass_until(client, clock, lambda: info(client, task).error)


def test_closing_the_client_ends_the_wait_for_a_report(faulty: Faulty, clock: FakeClock) -> None:
    client = Client(faulty, clock=clock)
    client.schedule("k")
    task = next(client.tasks("k"))
    connection = client.__connection__()
    with pytest.raises(LeaseLost, match="could not be reported"), leasekit.lease(task):
        faulty.always("settle", faults.refuse)
        other = meanwhile(
            lambda: eventually(lambda: faulty.calls["settle"]),
            lambda: connection.run(connection.keeper.outbox.aclose()),
        )
    other.join()
    client.close()


# Hooks and signals


def test_a_hook_must_not_lease(faulty: Faulty, clock: FakeClock) -> None:
    """It would wait for its own thread."""
    refused: list[BaseException] = []
    tasks: list[Task] = []

    def hook(event: Event) -> None:
        if isinstance(event, Renewed) and tasks and not refused:
            try:
                with leasekit.lease(tasks[0]):
                    pass
            except LeasekitError as error:
                refused.append(error)

    with Client(faulty, clock=clock, hooks=[hook]) as client:
        client.schedule("k")
        tasks.append(next(client.tasks("k")))
        clock.advance(120)
        eventually(lambda: refused)
        assert "hook" in str(refused[0])
        with leasekit.lease(next(client.tasks("k"))):  # given back meanwhile: that block never began
            pass


def test_ctrl_c_in_a_body_releases_the_task(client: Client) -> None:
    task = claimed(client)
    began = threading.Event()
    with pytest.raises(KeyboardInterrupt), interrupting(began.is_set), leasekit.lease(task):
        began.set()
        time.sleep(20)
    assert status(client, task) is Status.ENQUEUED


# While this side is busy


@pytest.fixture
def real() -> Iterator[tuple[Client, MemoryService]]:
    """Real time and a ttl of two seconds."""
    service = MemoryService()
    with Client(MemoryBackend(service, worker="w")) as client:
        yield client, service


def short(client: Client) -> Task:
    client.schedule("k", claim_timeout=2, heartbeat_timeout=2)
    return next(client.tasks("k"))


def test_beats_go_on_while_the_main_thread_sleeps(real: tuple[Client, MemoryService]) -> None:
    client, _ = real
    with leasekit.lease(short(client)) as held:
        time.sleep(2.5)
        held.check()
    assert info(client, held.task).history[0].outcome == "success"


def test_beats_go_on_while_other_threads_spin(real: tuple[Client, MemoryService]) -> None:
    client, _ = real
    until = time.monotonic() + 2.5

    def spin() -> None:
        while time.monotonic() < until:
            pass

    spinning = [threading.Thread(target=spin) for _ in range(3)]
    with leasekit.lease(short(client)) as held:
        for thread in spinning:
            thread.start()
        spin()
        held.check()
        for thread in spinning:
            thread.join()
    assert info(client, held.task).history[0].outcome == "success"


# leased


def test_leased_runs_a_function_under_the_lease_of_its_task(client: Client) -> None:
    @leasekit.leased
    def double(task: Task, factor: int = 2) -> int:
        return int(task.payload) * factor

    task = claimed(client, payload=21)
    assert double(task) == 42
    assert info(client, task).result == 42
    assert double.__name__ == "double"


def test_the_value_of_a_leased_function_that_did_not_heed_its_cancel_is_not_taken(
    client: Client, clock: FakeClock
) -> None:
    @leasekit.leased
    def skips(task: Task, held: leasekit.Lease) -> str:
        client.cancel(task.id)
        clock.advance(120)
        eventually(lambda: told(held))
        for _ in range(2):
            with suppress(Exception):
                held.check()
        return "all rows"

    task = claimed(client)
    with pytest.raises(Cancelled):
        skips(task)  # type: ignore[call-arg]  # it is given the lease
    assert status(client, task) is Status.CANCELLED


def test_leased_gives_the_lease_to_who_has_a_parameter_held(client: Client) -> None:
    @leasekit.leased(idle_timeout=60)
    def run(task: Task, held: Any = None) -> str:
        held.progress(task.id)
        held.release()
        return "not the result: it was released"

    task = claimed(client)
    run(task)
    assert info(client, task).status is Status.ENQUEUED
    assert info(client, task).progress == task.id


def test_leased_settles_an_exception(client: Client) -> None:
    @leasekit.leased
    def run(task: Task) -> None:
        raise Fatal(task.id)

    task = claimed(client)
    with pytest.raises(Fatal):
        run(task)
    assert status(client, task) is Status.FATAL_FAILURE


# Idle time


def test_an_idle_body_is_told_and_its_task_tried_again(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with pytest.raises(IdleTimeout, match="no progress for 60 s"), leasekit.lease(task, idle_timeout=60) as held:
        clock.advance(59)
        held.progress(1)
        clock.advance(59)
        held.check()
        clock.advance(1)
        eventually(lambda: told(held))
        assert not held.lost
        held.check()
    assert status(client, task) is Status.RETRIABLE_FAILURE


def test_an_idle_body_that_does_not_end_loses_its_lease(
    client: Client, clock: FakeClock, faulty: Faulty, events: list[Event]
) -> None:
    """A hung task must not heartbeat for ever."""
    task = claimed(client)
    with pytest.raises(LeaseLost, match="did not end") as caught, leasekit.lease(task, idle_timeout=60) as held:
        clock.advance(60)
        eventually(lambda: told(held))
        clock.advance(Heartbeats().grace)
        eventually(lambda: held.lost)
        held.check()
    assert caught.value.reason == "idle"
    reaches(1, lambda: len(of(Lost, events)))
    assert [event.reason for event in of(Lost, events)] == ["idle"]
    assert faulty.calls["settle"] == 0


def test_what_an_idle_body_ends_with_after_its_lease_was_lost_is_not_reported(
    client: Client, clock: FakeClock, faulty: Faulty
) -> None:
    """It was told to end, and has had its say: the task is tried again when its lease has run out."""
    task = claimed(client)
    with pytest.raises(LeaseLost, match="did not end") as caught, leasekit.lease(task, idle_timeout=60) as held:
        clock.advance(60)
        eventually(lambda: told(held))
        clock.advance(Heartbeats().grace)
        eventually(lambda: held.lost)
        held.complete("late")
    assert caught.value.reason == "idle"
    assert faulty.calls["settle"] == 0
    assert status(client, task) is Status.PROCESSING


def test_an_idle_body_gets_no_more_time_by_what_it_reports_when_it_was_told(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with pytest.raises(LeaseLost, match="did not end"), leasekit.lease(task, idle_timeout=60) as held:
        clock.advance(60)
        eventually(lambda: told(held))
        with pytest.raises(IdleTimeout):
            held.progress("and goes on")
        clock.advance(Heartbeats().grace)
        eventually(lambda: held.lost)
        held.check()


def test_a_body_that_ignores_its_cancellation_loses_its_lease_when_it_is_idle(client: Client, clock: FakeClock) -> None:
    task = claimed(client)
    with pytest.raises(LeaseLost), leasekit.lease(task, idle_timeout=200) as held:
        client.cancel(task.id)
        clock.advance(120)
        eventually(lambda: told(held))
        let_pass(client, clock, 80 + Heartbeats().grace + 1)
        assert held.lost
        held.check()


def test_idleness_is_judged_by_the_clock_not_by_looks(client: Client, clock: FakeClock) -> None:
    with leasekit.lease(claimed(client), idle_timeout=100) as held:
        for _ in range(50):
            clock.advance(0)
            held.check()
        for number in range(4):
            let_pass(client, clock, 90)
            held.progress(number)
    assert status(client, held.task) is Status.SUCCESS


@pytest.mark.parametrize("idle", [0, -1, float("nan"), float("inf")])
def test_an_idle_timeout_that_makes_no_sense_is_refused(client: Client, idle: float) -> None:
    with pytest.raises(ValueError, match="idle_timeout"):
        leasekit.lease(claimed(client), idle_timeout=idle)


# A generator that was not read to its end -------------------------------------------------------------------------


# Nothing of this module is known to the driver: its names would live on with that, and no generator would be closed.
@pytest.mark.parametrize("fails", [False, True])
def test_the_log_has_the_begin_and_the_end_of_a_block_on_request(
    client: Client, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    task = claimed(client)
    outcome = "retry" if fails else "success"
    with caplog.at_level(logging.DEBUG, logger="leasekit"):
        with contextlib.suppress(ZeroDivisionError), leasekit.lease(task):
            print(1 / (not fails))
        eventually(lambda: f"ended: {outcome}" in caplog.text)
    first, last = [record for record in caplog.records if "attempt 1" in record.getMessage()]
    assert first.getMessage() == f"task {task.id} (k) begins, attempt 1"
    assert last.getMessage().startswith(f"task {task.id} (k) ended: {outcome}, attempt 1, ")
    assert (vars(last)["task_id"], vars(last)["outcome"], last.exc_info) == (task.id, outcome, None)
    assert {first.levelno, last.levelno} == {logging.DEBUG}


LEFT_OPEN = """
import functools, os
import leasekit
from leasekit.lease import Lease
from leasekit.testing import faults
from leasekit.testing._faulty_backend import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

def rows(task, write=os.write):
    with leasekit.lease(task):
        try:
            yield "a row"
        finally:
            write(1, b"its block is left, ")

Lease._patience = functools.partial(exec, "write(1, b'it waits')", {"write": os.write})
backend = Faulty(MemoryBackend(MemoryService(), worker="w"))
backend.always("settle", faults.hang)
client = leasekit.connect(backend)
client.schedule("k")
open_rows = rows(next(client.tasks("k")))
next(open_rows)
"""


def test_a_block_that_is_left_as_the_interpreter_ends_waits_for_no_answer() -> None:
    """The driver's thread does not run any more then: the wait would be as long as the lease is trusted."""
    command = [sys.executable, "-c", LEFT_OPEN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "its block is left, "), ended.stderr


def test_a_run_that_is_over_leaves_no_work_to_the_garbage_collector(service: MemoryService) -> None:
    def there() -> int:
        return sum(isinstance(thing, (HeldLease, Report)) for thing in gc.get_objects())

    with Client(MemoryBackend(service, worker="w")) as client:
        gc.collect()
        gc.disable()
        before = there()  # what failed tests have left
        try:
            with client.once("name"):
                pass
            eventually(lambda: there() <= before)
        finally:
            gc.enable()
