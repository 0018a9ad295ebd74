"""The keeper: beats that go on whatever happens to calls, adapters, hooks and bodies."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from leasekit import Heartbeats
from leasekit._driver.clock import Clock
from leasekit._driver.explaining.recorder import Story
from leasekit._driver.guarding import escalation
from leasekit._driver.guarding.watchdog import UNGUARDED, Watchdog
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit._driver.keeping.keeper import Keeper
from leasekit._driver.reporting.ledger import Ledger, SharedMemory
from leasekit._driver.reporting.outbox import Report
from leasekit._leased_run import LeasedRun
from leasekit.backend import Backend, Capabilities
from leasekit.errors import Cancelled, LeaseLost, NotHeld, Untrusted
from leasekit.hooks import AtRisk, CancelRequested, CapacityExceeded, Event, Hooks, Lost, Renewed, Sent
from leasekit.task import Beat, NewTask, Settlement, Status, Task, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Rig:
    """A keeper in the loop of the test."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        heartbeats: Heartbeats,
        last_resort: Callable[[], None] | None,
        watchdog: Watchdog = UNGUARDED,
    ) -> None:
        self.events: list[Event] = []
        self.keeper = Keeper(
            backend,
            heartbeats,
            clock=clock,
            hooks=Hooks([self.events.append]),
            chance=random.Random(1),
            last_resort=last_resort,
            watchdog=watchdog,
        )
        self.running = asyncio.create_task(self.keeper.run())

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def aclose(self) -> None:
        await self.keeper.aclose()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


Start = Callable[..., Rig]


@pytest.fixture
async def start(faulty: Faulty, clock: FakeClock) -> AsyncIterator[Start]:
    rigs: list[Rig] = []

    def start(
        heartbeats: Heartbeats | None = None,
        last_resort: Callable[[], None] | None = None,
        backend: Backend | None = None,
        watchdog: Watchdog = UNGUARDED,
    ) -> Rig:
        rigs.append(Rig(backend or faulty, clock, heartbeats or Heartbeats(), last_resort, watchdog))
        return rigs[-1]

    yield start
    faulty.clear()
    for rig in rigs:
        await rig.aclose()


async def let_pass(clock: FakeClock, seconds: float, step: float = 1) -> None:
    """Let time pass, the keeper always keeping up: all in this loop, so it has done its work when nothing is ready."""
    end = clock.now() + seconds
    while clock.now() < end:
        clock.advance(min(step, end - clock.now()))
        for _ in range(15):
            await asyncio.sleep(0)


async def take(rig: Rig, backend: Any, count: int = 1, **options: Any) -> list[HeldLease]:
    """So many leases whose bodies run."""
    await backend.schedule([NewTask(kind="k", **options) for _ in range(count)])
    leases = await rig.keeper.claim(["k"], limit=count, wait=0, started=True)
    for held in leases:
        held.begin(None)
    return leases


def end(rig: Rig, held: HeldLease, outcome: Any = "success", **said: Any) -> Report:
    report = Report(Settlement(id=held.task.id, token=held.task.token, outcome=outcome, **said))
    rig.keeper.settle(held, report)
    return report


# Heartbeats


async def test_every_lease_beats_once_in_a_cycle(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start()
    leases = await take(rig, faulty, 250)
    await let_pass(clock, 600)
    beats: dict[str, int] = {}
    for call in faulty.log:
        if call.kind == "beat":
            for beat in call.items:
                beats[beat.id] = beats.get(beat.id, 0) + 1
    assert {beats[held.task.id] for held in leases} <= {5, 6}
    assert not any(held.lost for held in leases)


@pytest.mark.slow
async def test_ten_thousand_leases_are_kept(
    clock: FakeClock, service: MemoryService, record_property: Callable[[str, object], None]
) -> None:
    """With what a renewal costs, for the record: timings decide nothing."""
    spent = 0.0

    class Metered(MemoryBackend):
        async def beat(self, beats: Any) -> list[Verdict]:
            nonlocal spent
            began = time.process_time()
            try:
                return await super().beat(beats)
            finally:
                spent += time.process_time() - began

    backend = Metered(service, worker="w")
    renewed = 0

    def count(event: Event) -> None:
        nonlocal renewed
        if isinstance(event, Renewed):
            renewed += len(event.task_ids)

    heartbeats = Heartbeats(batch=1000).for_ttl(6)
    keeper = Keeper(backend, heartbeats, clock=clock, hooks=Hooks([count]), chance=random.Random(1))
    running = asyncio.create_task(keeper.run())
    began = time.process_time()
    await backend.schedule([NewTask(kind="k", claim_timeout=6, heartbeat_timeout=6) for _ in range(1000)])
    leases: list[HeldLease] = []
    while len(leases) < 10_000:
        if leases:
            await backend.schedule([NewTask(kind="k", claim_timeout=6, heartbeat_timeout=6) for _ in range(1000)])
        leases += await keeper.claim(["k"], limit=1000, wait=0, started=True)
    added = time.process_time() - began
    spent, renewed, began = 0.0, 0, time.process_time()
    for _ in range(5 * 24):  # ten seconds: five cycles
        clock.advance(1 / 12)
        for _ in range(6):
            await asyncio.sleep(0)
    ours = time.process_time() - began - spent
    assert len(keeper) == 10_000
    assert not any(held.lost for held in leases)
    assert renewed >= 4 * 10_000
    record_property("microseconds_per_renewal", round(ours / renewed * 1e6, 2))
    record_property("microseconds_per_claim", round(added / 10_000 * 1e6, 2))
    print(f"\n{ours / renewed * 1e6:.2f} µs a renewal without the service, {added / 1e4 * 1e6:.1f} µs a claim with it")
    await keeper.aclose()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_call_that_hangs_delays_nobody_elses_beats(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start(Heartbeats(batch=1))
    leases = await take(rig, faulty, 3)
    await let_pass(clock, 5)
    faulty.script("beat", faults.hang)
    await let_pass(clock, 130)
    late = [held for held in leases if clock.now() - held.term.granted_at > 60]
    assert len(late) == 1


async def test_trust_counts_from_when_a_beat_was_sent_however_late_its_answer_comes(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    await let_pass(clock, 5)
    answered = len(rig.of(Renewed))
    faulty.script("beat", faults.delay_answer(10.0))
    while len(rig.of(Renewed)) == answered:
        await let_pass(clock, 1)
    renewed = rig.of(Renewed)[-1]
    assert renewed.round_trip >= 10
    assert held.term.granted_at == renewed.at - renewed.round_trip
    assert held.term.trusted_until <= renewed.at - renewed.round_trip + held.term.heartbeats.ttl


async def test_whatever_an_adapter_does_to_a_beat_is_one_failed_try(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    """Not even its own cancellation, or its wish to end the process."""

    def raising(error: BaseException) -> Fault:
        async def act(call: Call) -> Any:
            raise error

        return Fault(type(error).__name__, act)

    async def nonsense(call: Call) -> Any:
        return object()

    rig = start(Heartbeats(in_flight=1))
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    strange = [
        asyncio.CancelledError(), SystemExit(), KeyboardInterrupt(), RuntimeError(), pytest.fail.Exception("no"),
        Untrusted("the certificate has expired"),
    ]  # fmt: skip
    for fault in [*map(raising, strange), Fault("nonsense", nonsense), faults.shorten, faults.shuffle, faults.misspell]:
        faulty.script("beat", fault)
        await let_pass(clock, 140)
        assert not held.lost, fault.name
    assert held.clock.now() - held.term.granted_at < 140


async def test_the_first_strike_puts_a_lease_at_risk_and_the_second_says_nothing_new(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    faulty.always("beat", faults.refuse)
    await let_pass(clock, 130)
    assert held.term.strikes > 1
    assert [event.task_id for event in rig.of(AtRisk)] == [held.task.id]


async def test_a_lease_whose_cancel_is_requested_is_kept_while_its_handler_winds_down(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    await faulty.cancel([held.task.id])
    await let_pass(clock, 300)
    assert len(rig.of(CancelRequested)) == 1
    assert held.stop is Cancelled
    assert not held.lost


async def test_a_verdict_that_names_another_task_is_not_believed(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    async def swapped(call: Call) -> Any:
        first, second = call.items
        return [Verdict(id=second.id, verdict="gone", reason="taken"), Verdict(id=first.id, verdict="renewed")]

    rig = start()
    leases = await take(rig, faulty, 2)
    await let_pass(clock, 1)
    faulty.script("beat", Fault("swapped", swapped))
    before = [held.term.granted_at for held in leases]
    await let_pass(clock, 140)
    assert not any(held.lost for held in leases)
    assert all(held.term.granted_at > at for held, at in zip(leases, before, strict=True))  # the next try's


@pytest.mark.parametrize("ttl", [float("nan"), float("inf"), -1.0, 0.5])
async def test_a_ttl_that_makes_no_sense_is_one_failed_try(
    start: Start, faulty: Faulty, clock: FakeClock, ttl: float
) -> None:
    async def senseless(call: Call) -> Any:
        return [Verdict(id=beat.id, verdict="renewed", ttl=ttl) for beat in call.items]

    rig = start()
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    faulty.script("beat", Fault("senseless", senseless))
    await let_pass(clock, 130)
    assert held.term.heartbeats.ttl == 300
    assert not held.lost


async def test_the_rhythm_follows_the_ttl_that_is_granted(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start()
    [held] = await take(rig, faulty, claim_timeout=300, heartbeat_timeout=30)
    await let_pass(clock, 120, 0.5)
    assert held.term.heartbeats.ttl == 30
    assert not held.lost
    assert 9 <= faulty.calls["beat"] <= 16
    end(rig, held)
    await let_pass(clock, 2)
    assert not rig.keeper._renewal._cycles


async def test_a_keeper_that_had_nothing_to_do_goes_on_with_the_next_lease(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    for _ in range(3):
        [held] = await take(rig, faulty)
        await let_pass(clock, 130)
        assert clock.now() - held.term.granted_at < 120
        end(rig, held)
        await let_pass(clock, 1000, 10)
        assert not len(rig.keeper)


async def test_a_keeper_that_stumbles_goes_on(
    start: Start, faulty: Faulty, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    stumbling = True
    once = Keeper._once

    def stumble(self: Keeper, now: float) -> float:
        if stumbling:
            raise ZeroDivisionError
        return once(self, now)

    monkeypatch.setattr(Keeper, "_once", stumble)
    await let_pass(clock, 100)
    stumbling = False
    await let_pass(clock, 130)
    assert not held.lost
    assert "error in the keeper's loop" in caplog.text


async def test_retries_are_bounded_however_many_leases_fail(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start(Heartbeats(batch=10))
    await take(rig, faulty, 100)
    await let_pass(clock, 120)
    faulty.always("beat", faults.refuse)
    before = faulty.calls["beat"]
    await let_pass(clock, 100)
    assert faulty.calls["beat"] - before <= 101


async def test_two_claims_of_one_task_are_two_leases(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    """The token is that of the claim, not of the task or the process."""
    rig = start()
    [old] = await take(rig, faulty)
    faulty.always("beat", faults.hang)
    clock.advance(301)
    [new] = await rig.keeper.claim(["k"], limit=1, wait=0, started=True)
    assert new is not old
    assert new.task.id == old.task.id
    report = end(rig, old)
    await until(report.answer.done)
    assert report.answer.result().reason == "taken"
    assert rig.keeper.get(new.task) is new
    assert not new.lost


# Progress


async def test_progress_that_the_service_refuses_is_left_out_and_harms_nobody(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    good, bad = await take(rig, faulty, 2)
    await let_pass(clock, 2)
    good.report("kept")
    bad.report("x" * 70_000)
    await let_pass(clock, 140)
    assert clock.now() - good.term.granted_at < 120
    assert clock.now() - bad.term.granted_at < 120
    found = await faulty.get(good.task.id)
    assert found is not None
    assert found.progress == "kept"


async def test_no_progress_slips_between_an_acknowledgement_and_the_next_beat() -> None:
    held = HeldLease(
        Task(id="t", kind="k", token="x", ttl=300),
        Heartbeats(),
        FakeClock(),
        granted_at=0,
        confirmed=True,
        started=True,
    )
    held.begin(None)
    assert held.beat == Beat(id="t", token="x")
    held.report("old")
    sent = held.beat
    held.report("new")
    held.reported(sent)
    assert held.beat.progress == "new"
    assert sent.progress_seq is not None
    assert held.beat.progress_seq == sent.progress_seq + 1
    held.reported(held.beat)
    assert held.beat == Beat(id="t", token="x")
    held.reported(Beat(id="t", token="x"))
    assert held.beat == Beat(id="t", token="x")


class _EndsAtOnce(HeldLease):
    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "ledger":
            self.ledger = None  # by the driver's thread, which has its turn after each read
        return value


def test_a_lease_that_leaves_its_ledger_while_its_code_begins_is_no_error() -> None:
    ledger = Mock()
    task = Task(id="t", kind="k", token="x", ttl=300)
    held = _EndsAtOnce(task, Heartbeats(), FakeClock(), granted_at=0, confirmed=True, started=True)
    held.ledger = ledger
    held.begin(None)
    ledger.begins.assert_called_once_with(0, elsewhere=False)


# Endings


async def test_a_settled_lease_leaves_nothing_behind(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start()
    for held in await take(rig, faulty, 50):
        end(rig, held)
    await let_pass(clock, 2)
    assert not len(rig.keeper)
    assert not rig.keeper._renewal._cycles


async def test_bodies_that_ended_are_not_kept_for_their_idle_time(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    """An hour of idle time must not keep an hour of tasks in memory."""
    rig = start()
    for _ in range(4):
        await faulty.schedule([NewTask(kind="k") for _ in range(100)])
        for held in await rig.keeper.claim(["k"], limit=100, wait=0, started=True):
            held.begin(3600)
            rig.keeper.watch(held)
            end(rig, held)
        await until(lambda: not len(rig.keeper))
    assert len(rig.keeper._idle_watch._heap) < 250


async def test_what_is_given_back_is_beaten_no_more_where_a_late_beat_would_take_it_again(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    faulty.capabilities = Capabilities(refuses_stale=False)
    rig = start()
    back, done = await take(rig, faulty, 2)
    await let_pass(clock, 2)
    faulty.always("settle", faults.refuse)
    end(rig, back, "release", retry_after=60)
    end(rig, done)
    beats = faulty.calls["beat"]
    await let_pass(clock, 150)
    later = [beat.id for call in faulty.log if call.kind == "beat" for beat in call.items][beats:]
    assert done.task.id in later
    assert back.task.id not in later
    faulty.clear()
    await let_pass(clock, 10)


@pytest.mark.parametrize(("refuses_stale", "left"), [(True, 1), (False, 0)])
async def test_where_stale_writes_are_obeyed_a_supervisor_hands_back_no_lease_whose_handler_has_ended(
    start: Start, faulty: Faulty, clock: FakeClock, refuses_stale: bool, left: int
) -> None:
    """No timer guards such a lease: if its process was stopped before it died, the lease may have ended long before."""
    faulty.capabilities = Capabilities(refuses_stale=refuses_stale)
    rig, memory = start(), SharedMemory()
    rig.keeper.note_in(Ledger(memory.fd))
    [done] = await take(rig, faulty, 1)
    faulty.always("settle", faults.refuse)
    end(rig, done)
    assert len(memory.read().leases) == left
    memory.close()
    faulty.clear()
    await let_pass(clock, 10)


async def test_a_loser_and_a_beginner_at_the_same_moment_do_not_miss_one_another(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    await faulty.schedule([NewTask(kind="k")])
    [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=True)
    held.lose("taken", Story("somebody has it"), clock.now())
    with pytest.raises(LeaseLost, match="somebody has it"):
        held.begin(None)
    assert not held.handler_runs


async def test_a_body_does_not_begin_when_its_lease_is_over_by_the_clock_alone(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    await faulty.schedule([NewTask(kind="k")])
    [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=False)
    clock.advance(Heartbeats().slack + 1)  # the keeper has not had its turn
    with pytest.raises(LeaseLost):
        held.begin(None)
    assert not held.handler_runs


async def test_who_was_given_back_cannot_begin(start: Start, faulty: Faulty) -> None:
    rig = start()
    await faulty.schedule([NewTask(kind="k")])
    [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=True)
    rig.keeper.release_if_unstarted(held)
    with pytest.raises(NotHeld):
        held.begin(None)
    await until(lambda: not len(rig.keeper))


async def test_what_has_begun_is_not_given_back(start: Start, faulty: Faulty) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    rig.keeper.release_if_unstarted(held)
    assert not held.settling
    assert not faulty.calls["settle"]


async def test_a_claim_asks_for_no_more_than_the_service_gives(start: Start, faulty: Faulty) -> None:
    faulty.capabilities = Capabilities(max_claim=3)
    rig = start()
    await faulty.schedule([NewTask(kind="k") for _ in range(5)])
    assert len(await rig.keeper.claim(["k"], limit=5, wait=0, started=True)) == 3


async def test_who_is_over_capacity_is_told_once(start: Start, faulty: Faulty) -> None:
    rig = start(Heartbeats(ttl=300, cycle=3, rate=1, batch=1))
    await take(rig, faulty, 6)
    assert [event.held for event in rig.of(CapacityExceeded)] == [4]


async def test_an_overload_ends_with_the_leases_that_were_too_many(start: Start, faulty: Faulty) -> None:
    rig = start(Heartbeats(ttl=300, cycle=3, rate=1, batch=1))
    leases = await take(rig, faulty, 4)
    rig.keeper.drop(leases[0])
    await take(rig, faulty, 1)
    assert [event.held for event in rig.of(CapacityExceeded)] == [4, 4]


async def test_a_buffered_task_says_so_until_its_body_begins(start: Start, faulty: Faulty, clock: FakeClock) -> None:
    rig = start()
    await faulty.schedule([NewTask(kind="k")])
    [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=False)
    await let_pass(clock, 2)
    found = await faulty.get(held.task.id)
    assert found is not None
    assert found.status is Status.CLAIMED
    held.begin(None)
    await let_pass(clock, 120)
    found = await faulty.get(held.task.id)
    assert found is not None
    assert found.status is Status.PROCESSING


# The last rungs


async def test_a_body_that_outlives_its_lease_meets_the_last_resort_once(
    start: Start, faulty: Faulty, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks first; and a last resort that returns does not keep the keeper busy."""
    order: list[str] = []
    monkeypatch.setattr(escalation, "_log_stack", lambda _: order.append("stacks"))
    rig = start(last_resort=lambda: order.append("end"))
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    faulty.always("beat", faults.hang)
    granted = held.term.granted_at
    await let_pass(clock, granted + Heartbeats().slack - clock.now() + 0.5)
    assert held.lost
    assert not order
    await let_pass(clock, granted + Heartbeats().trust - 0.5 - clock.now(), 0.5)
    assert order == ["stacks"]
    await let_pass(clock, 30, 0.5)
    assert order == ["stacks", "end"]


async def test_a_body_that_ends_in_time_meets_no_last_resort(
    start: Start, faulty: Faulty, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(escalation, "_log_stack", lambda _: order.append("stacks"))
    rig = start(last_resort=lambda: order.append("end"))
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    faulty.always("beat", faults.hang)
    await let_pass(clock, held.term.granted_at + Heartbeats().slack - clock.now() + 0.5)
    assert [event.reason for event in rig.of(Lost)] == ["expired"]
    rig.keeper.finish(held)
    await let_pass(clock, 60)
    assert not order
    assert not len(rig.keeper)


async def test_a_body_that_has_ended_meets_no_last_resort_before_the_keeper_hears_of_its_end(
    start: Start, faulty: Faulty, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stop of the whole process: the thread of the code may have its turn first."""
    order: list[str] = []
    monkeypatch.setattr(escalation, "_log_stack", lambda _: order.append("stacks"))
    rig = start(last_resort=lambda: order.append("end"))
    [held] = await take(rig, faulty)
    run = LeasedRun(held.task)
    run._held = held
    await let_pass(clock, 1)
    faulty.always("beat", faults.hang)
    assert run.ended(LeaseLost("lost")) is None
    await let_pass(clock, 300)
    assert [event.reason for event in rig.of(Lost)] == ["expired"]
    assert not order
    rig.keeper.finish(held)
    assert not len(rig.keeper)


async def test_where_nothing_ends_the_process_a_stack_is_shown_once_and_only_when_the_grace_is_over(
    start: Start, faulty: Faulty, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    faulty.always("beat", faults.hang)
    await let_pass(clock, held.term.granted_at + Heartbeats().trust - 0.5 - clock.now(), 0.5)
    assert held.lost
    assert "still runs" not in caplog.text
    await let_pass(clock, 30)
    [record] = [record for record in caplog.records if "still runs" in record.msg]
    assert ", in _log_stack\n" in record.getMessage()  # of this very thread, in which the keeper runs
    assert vars(record)["task_id"] == held.task.id


async def test_the_stacks_of_very_many_lost_leases_do_not_fill_the_log(
    start: Start, faulty: Faulty, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    await take(rig, faulty, 100)
    await let_pass(clock, 1)
    faulty.always("beat", faults.hang)
    await let_pass(clock, 400)
    assert caplog.text.count("still runs") == 20


# The kernel's timer


class Timer:
    """An alarm that ends nothing, and shows for when it is set."""

    at: float | None = None

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = None

    def close(self) -> None: ...


@pytest.fixture
def timer() -> Timer:
    return Timer()


Guarded = Callable[..., Awaitable[tuple[Rig, HeldLease]]]


@pytest.fixture(params=["its own", "another"])
def guarded(start: Start, faulty: Faulty, timer: Timer, request: pytest.FixtureRequest) -> Guarded:
    """A lease whose body runs, in the keeper's process or in another, which `timer` ends."""

    async def guarded(**options: Any) -> tuple[Rig, HeldLease]:
        watchdog = Watchdog("off", timer=timer)
        rig = start(watchdog=watchdog if request.param == "its own" else UNGUARDED)
        await faulty.schedule([NewTask(kind="k", **options)])
        [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=True)
        if request.param == "another":
            held.watchdog = watchdog
        held.begin(None)
        return rig, held

    return guarded


async def test_an_acknowledged_beat_moves_the_timer_and_a_failed_one_leaves_it(
    guarded: Guarded, faulty: Faulty, clock: FakeClock, timer: Timer
) -> None:
    rig, held = await guarded()
    armed_at = timer.at
    await let_pass(clock, 1)
    assert armed_at is not None
    assert timer.at == held.term.trusted_until > armed_at
    armed_at = timer.at
    faulty.always("beat", faults.refuse)
    await let_pass(clock, 200)
    assert faulty.fired["refuse"] > 1
    assert timer.at == held.term.trusted_until == armed_at
    rig.keeper.finish(held)


async def test_a_beat_that_fails_in_a_batch_leaves_its_timer_where_it_was(
    start: Start, faulty: Faulty, clock: FakeClock, timer: Timer
) -> None:
    rig = start(watchdog=Watchdog("off", timer=timer))
    failed, renewed = await take(rig, faulty, 2)
    await let_pass(clock, 1)

    async def fail_one(call: Call) -> Any:
        return [
            Verdict(id=beat.id, verdict="failed", reason="no") if beat.id == failed.task.id else verdict
            for beat, verdict in zip(call.items, await call.send(), strict=True)
        ]

    faulty.always("beat", Fault("fail_one", fail_one))
    await let_pass(clock, 150)
    assert timer.at == failed.term.trusted_until < renewed.term.trusted_until


async def test_the_timer_follows_a_ttl_that_a_beat_is_granted_shorter(
    guarded: Guarded, clock: FakeClock, timer: Timer
) -> None:
    """The trust of the claim was longer: a timer that stays there lets the body run past the end of its lease."""
    _, held = await guarded(claim_timeout=300, heartbeat_timeout=30)
    claimed_until = timer.at
    await let_pass(clock, 1, 0.1)
    assert held.term.heartbeats.ttl == 30
    assert claimed_until is not None
    assert timer.at == held.term.trusted_until < claimed_until


# Suspension


async def test_after_suspension_a_lease_that_ran_out_is_lost_at_once_and_not_revived(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    [held] = await take(rig, faulty)
    await let_pass(clock, 1)
    sent = len(rig.of(Sent))
    clock.advance(3600)
    assert held.lost
    for _ in range(20):
        await asyncio.sleep(0)
    assert [event.reason for event in rig.of(Lost)] == ["expired"]
    assert len(rig.of(Sent)) == sent
    rig.keeper.finish(held)


# Early beats


async def test_the_service_soon_hears_that_a_body_has_begun_and_how_far_it_is(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start()
    await faulty.schedule([NewTask(kind="k")])
    [held] = await rig.keeper.claim(["k"], limit=1, wait=0, started=False)
    await let_pass(clock, 5)
    info = await faulty.get(held.task.id)
    assert info is not None
    assert info.status is Status.CLAIMED
    held.begin(None)
    await let_pass(clock, 2)
    info = await faulty.get(held.task.id)
    assert info is not None
    assert info.status is Status.PROCESSING
    held.report(7)
    await let_pass(clock, 2)
    info = await faulty.get(held.task.id)
    assert info is not None
    assert info.progress == 7


async def test_bodies_that_report_all_the_time_cost_one_call_a_second(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start(Heartbeats(rate=50))
    leases = await take(rig, faulty, 80)
    await let_pass(clock, 5)
    faulty.log.clear()
    for number in range(600):
        for held in leases:
            held.report(number)
        await let_pass(clock, 0.1, step=0.1)
    calls = [call for call in faulty.log if call.kind == "beat"]
    assert 55 <= len(calls) <= 62
    assert not any(held.lost for held in leases)


async def test_bodies_that_report_together_wake_the_loop_once_and_an_interrupted_call_delays_nobody_for_long(
    start: Start, faulty: Faulty, clock: FakeClock
) -> None:
    rig = start(Heartbeats(rate=50))
    leases = await take(rig, faulty, 10)
    await let_pass(clock, 5)
    calls: list[Callable[[], object]] = []
    rig.keeper.call_soon = calls.append
    for held in leases:
        held.report(1)
    assert len(calls) == 1
    calls.pop()()
    await let_pass(clock, 3)
    for held in leases:
        held.report(2)
    assert len(calls) == 1  # and this one is never made: a signal handler has raised at that moment
    rig.keeper.watch(leases[0])  # whatever next has the keeper take its turn
    await let_pass(clock, 3)
    infos = [await faulty.get(held.task.id) for held in leases]
    assert [info.progress for info in infos if info is not None] == [2] * 10


async def test_a_service_that_keeps_no_progress_has_no_early_beats(clock: FakeClock, service: MemoryService) -> None:
    class Forgetful(MemoryBackend):
        capabilities = Capabilities(progress=False)
        calls = 0

        async def beat(self, beats: Any) -> list[Verdict]:
            self.calls += 1
            return await super().beat(beats)

    backend = Forgetful(service, worker="w")
    rig = Rig(backend, clock, Heartbeats(), None)
    [held] = await take(rig, backend)
    await let_pass(clock, 5)
    before = backend.calls
    for number in range(30):
        held.report(number)
        await let_pass(clock, 1)
    assert backend.calls == before
    await rig.aclose()
