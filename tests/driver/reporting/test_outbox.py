"""The outbox: whoever puts something in gets one answer, and nobody waits for the bad luck of another."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest

from leasekit._driver.context import Context
from leasekit._driver.reporting.outbox import Outbox, Report
from leasekit.errors import Refused, Unavailable
from leasekit.hooks import Event, Hooks, ReportDelayed
from leasekit.task import NewTask, Settlement, Status, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.faults import Call, Fault, Faulty, Gate
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
async def outbox(faulty: Faulty, clock: FakeClock, events: list[Event]) -> AsyncIterator[Outbox]:
    outbox = Outbox(
        Context(faulty, clock=clock, hooks=Hooks([events.append]), chance=Mock(random=lambda: 0.5)), call_timeout=0.2
    )
    yield outbox
    await outbox.aclose()
    await faulty.aclose()


async def reports(faulty: Faulty, count: int, **said: Any) -> list[Report]:
    await faulty.schedule([NewTask(kind="k") for _ in range(count)])
    claimed = await faulty.claim(["k"], limit=count, wait=0, claim_id="c")
    said = {"outcome": "success"} | said
    return [Report(Settlement(id=task.id, token=task.token, **said)) for task in claimed.tasks]


async def answers(clock: FakeClock, reports: Iterable[Report]) -> list[str]:
    """What they were answered, time passing as fast as the outbox keeps up."""
    async with asyncio.timeout(20):
        while not all(report.answer.done() for report in reports):
            await asyncio.sleep(0.001)
            clock.advance(0.5)
    return [report.answer.result().verdict for report in reports]


def breaks(bad: Report, error: Callable[[], Exception]) -> Fault:
    """Every call with this report in it fails."""

    async def act(call: Call) -> Any:
        if bad.settlement in call.items:
            raise error()
        return await call.send()

    return Fault("breaks", act)


async def test_a_report_is_answered_with_its_verdict(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    [report] = await reports(faulty, 1)
    outbox.put(report)
    assert await answers(clock, [report]) == ["settled"]
    stale = Report(Settlement(id=report.settlement.id, token="other", outcome="success"))
    outbox.put(stale)
    assert await answers(clock, [stale]) == ["gone"]


async def test_a_report_is_not_repeated_once_its_lease_is_over(
    outbox: Outbox, faulty: Faulty, clock: FakeClock
) -> None:
    [made] = await reports(faulty, 1)
    report = Report(made.settlement, is_over=lambda: faulty.calls["settle"] > 0)
    faulty.script("settle", faults.refuse)
    outbox.put(report)
    assert await answers(clock, [report]) == ["gone"]
    assert (report.answer.result().reason, faulty.calls["settle"]) == ("unreported", 1)


async def test_while_calls_are_under_way_the_next_batch_gathers(
    outbox: Outbox, faulty: Faulty, clock: FakeClock
) -> None:
    gate = Gate()
    faulty.script("settle", faults.delay(gate), faults.delay(gate))
    several = await reports(faulty, 10)
    for report in several:
        outbox.put(report)
        await asyncio.sleep(0)
    gate.open()
    await answers(clock, several)
    assert [len(call.items) for call in faulty.log if call.kind == "settle"] == [1, 1, 8]


async def test_reports_with_too_many_successors_together_are_sent_apart(
    outbox: Outbox, faulty: Faulty, clock: FakeClock
) -> None:
    several = await reports(faulty, 5, then=[NewTask(kind="next")] * 400)
    for report in several:
        outbox.put(report)
    assert await answers(clock, several) == ["settled"] * 5
    assert (await faulty.stats()).kinds["next"] == {"new": 2000}


async def test_a_batch_is_no_bigger_than_the_service_takes(faulty: Faulty, clock: FakeClock) -> None:
    faulty.capabilities = type(faulty.capabilities)(max_batch=4)
    outbox = Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0)), call_timeout=1)
    several = await reports(faulty, 10)
    for report in several:
        outbox.put(report)
    assert await answers(clock, several) == ["settled"] * 10
    assert max(len(call.items) for call in faulty.log if call.kind == "settle") == 4
    await outbox.aclose()


@pytest.mark.parametrize(
    "fault",
    [
        faults.lose_answer, faults.refuse, faults.drop, faults.garble, faults.shorten, faults.lengthen, faults.shuffle,
        faults.misspell, faults.throttle(), faults.throttle(1e9), faults.hang, faults.throttle_items(1.0),
        faults.fail_items(1.0), faults.throttle_items(1.0, retry_after=1e9),
    ],
    ids=lambda fault: fault.name,
)  # fmt: skip
async def test_whatever_happens_to_a_call_each_report_is_settled_once(
    outbox: Outbox, faulty: Faulty, clock: FakeClock, fault: Fault, events: list[Event]
) -> None:
    faulty.script("settle", fault, fault)
    several = await reports(faulty, 3)
    for report in several:
        outbox.put(report)
    assert await answers(clock, several) == ["settled"] * 3
    assert any(isinstance(event, ReportDelayed) for event in events)
    for report in several:
        found = await faulty.get(report.settlement.id)
        assert found is not None
        assert [entry.outcome for entry in found.history] == ["success"]


async def test_what_an_adapter_lets_through_is_no_end(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    """Neither its bugs nor a cancellation of its own."""

    def stumbling(error: BaseException) -> Fault:
        async def act(call: Call) -> Any:
            raise error

        return Fault(type(error).__name__, act)

    async def nonsense(call: Call) -> Any:
        return None

    faulty.script("settle", *map(stumbling, (ZeroDivisionError(), asyncio.CancelledError(), SystemExit())))
    faulty.script("settle", Fault("nonsense", nonsense))
    [report] = await reports(faulty, 1)
    outbox.put(report)
    assert await answers(clock, [report]) == ["settled"]


async def test_one_that_is_refused_harms_nobody(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    several = await reports(faulty, 9)
    bad = Report(Settlement(id=several[4].settlement.id, token="x" * 200, outcome="success"))
    for report in [*several[:4], bad, *several[5:]]:
        outbox.put(report)
    assert await answers(clock, [*several[:4], *several[5:]]) == ["settled"] * 8
    await until(bad.answer.done)
    assert isinstance(bad.answer.exception(), Refused)


async def test_one_that_breaks_every_call_holds_up_nobody(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    """A payload on which a service stumbles every time looks like a service that is away."""
    several = await reports(faulty, 20)
    bad = several[7]
    faulty.always("settle", breaks(bad, lambda: Unavailable("500")))
    for report in several:
        outbox.put(report)
    others = [report for report in several if report is not bad]
    assert await answers(clock, others) == ["settled"] * 19
    assert not bad.answer.done()
    more = Report(Settlement(id="t", token="t", outcome="success"))
    outbox.put(more)
    assert await answers(clock, [more]) == ["gone"]
    faulty.clear()
    assert await answers(clock, [bad]) == ["settled"]


async def test_the_log_and_the_hook_say_why_a_report_failed(
    outbox: Outbox, faulty: Faulty, clock: FakeClock, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(call: Call) -> Any:
        return [Verdict(id=item.id, verdict="failed", reason="AccessDenied") for item in call.items]

    faulty.script("settle", Fault("not_allowed", refuse))
    [report] = await reports(faulty, 1)
    outbox.put(report)
    assert await answers(clock, [report]) == ["settled"]
    assert [event.why for event in events if isinstance(event, ReportDelayed)] == ["AccessDenied"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"how tasks ended could not be reported, and is tried again ({report.settlement.id}): AccessDenied",
        "how tasks ended is reported again",
    ]


async def test_those_that_are_put_off_hold_up_nobody(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    """More of them than there are calls at a time."""
    several = await reports(faulty, 9)
    bad = {report.settlement.id for report in several[:5]}

    async def act(call: Call) -> Any:
        verdicts = await call.send([item for item in call.items if item.id not in bad])
        settled = {verdict.id: verdict for verdict in verdicts}
        return [settled.get(item.id) or Verdict(id=item.id, verdict="failed") for item in call.items]

    faulty.always("settle", Fault("put_off", act))
    for report in several[:5]:
        outbox.put(report)
    await until(lambda: faulty.calls["settle"] == 1)
    before = clock.now()
    for report in several[5:]:
        outbox.put(report)
    await until(lambda: all(report.answer.done() for report in several[5:]))
    assert clock.now() == before
    assert not any(report.answer.done() for report in several[:5])
    faulty.clear()
    assert await answers(clock, several) == ["settled"] * 9


async def test_a_service_that_is_away_is_not_asked_all_the_time(
    outbox: Outbox, faulty: Faulty, clock: FakeClock
) -> None:
    """Two calls at a time, and waits that grow, up to a bound."""
    faulty.always("settle", faults.refuse)
    several = await reports(faulty, 50)
    for report in several:
        outbox.put(report)
    for _ in range(120):
        await asyncio.sleep(0.001)
        clock.advance(1)
    assert 120 / 5 <= faulty.calls["settle"] <= 2 * 120 / 2.5 + 20
    faulty.clear()
    assert await answers(clock, several) == ["settled"] * 50


async def test_after_an_outage_batches_grow_again(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    faulty.always("settle", faults.refuse)
    several = await reports(faulty, 300)
    for report in several:
        outbox.put(report)
    for _ in range(60):
        await asyncio.sleep(0.001)
        clock.advance(1)
    faulty.clear()
    before = faulty.calls["settle"]
    await answers(clock, several)
    assert faulty.calls["settle"] - before < 30


async def test_it_says_what_is_kept_also_where_only_the_log_listens(
    faulty: Faulty, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(Context(faulty, clock=clock, hooks=Hooks(), chance=Mock(random=lambda: 0)), call_timeout=1)
    faulty.script("settle", faults.refuse)
    [report] = await reports(faulty, 1)
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        outbox.put(report)
        await answers(clock, [report])
    assert "could not be reported, and is tried again" in caplog.text
    await outbox.aclose()


async def test_it_is_empty_when_all_is_answered_and_not_before(
    outbox: Outbox, faulty: Faulty, clock: FakeClock
) -> None:
    await outbox.empty()
    faulty.script("settle", faults.throttle_items(1.0, retry_after=3))
    [report] = await reports(faulty, 1)
    outbox.put(report)
    waiting = asyncio.create_task(outbox.empty())
    await until(lambda: clock.sleepers)
    assert not waiting.done()
    clock.advance(3)
    await asyncio.wait_for(waiting, 20)
    assert report.answer.result().verdict == "settled"


async def test_closing_ends_the_tries_and_answers_nobody(outbox: Outbox, faulty: Faulty) -> None:
    faulty.always("settle", faults.refuse)
    several = await reports(faulty, 3)
    for report in several:
        outbox.put(report)
    await until(lambda: faulty.calls["settle"])
    await outbox.aclose()
    await outbox.empty()
    assert all(report.answer.cancelled() for report in several)
    calls = faulty.calls["settle"]
    late = Report(several[0].settlement)
    outbox.put(late)
    assert late.answer.cancelled()
    await asyncio.sleep(0)
    assert faulty.calls["settle"] == calls


async def test_closing_names_the_successes_that_were_not_reported(
    outbox: Outbox, faulty: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.always("settle", faults.refuse)
    [done] = await reports(faulty, 1)
    outbox.put(done)
    await until(lambda: faulty.calls["settle"])
    await outbox.aclose()
    assert f"success of tasks could be reported, so they may run again: {done.settlement.id}" in caplog.text


async def test_what_was_answered_is_not_unsaid_by_closing(outbox: Outbox, faulty: Faulty, clock: FakeClock) -> None:
    [report] = await reports(faulty, 1, outcome="release")
    outbox.put(report)
    await answers(clock, [report])
    await outbox.aclose()
    assert report.answer.result().verdict == "settled"
    found = await faulty.get(report.settlement.id)
    assert found is not None
    assert found.status is Status.ENQUEUED
