"""The service is said to be lost once and to be back once, whatever number of calls fails meanwhile."""

import logging
from collections.abc import Awaitable, Callable
from typing import Literal, NoReturn

import pytest

from leasekit import Refused, Throttled, Unavailable
from leasekit._driver.reachability import Reachability
from leasekit.errors import BackendError
from leasekit.testing.clock import FakeClock

pytestmark = pytest.mark.anyio

Sort = Literal["claim", "beat", "settle"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def reachability(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> Reachability:
    caplog.set_level(logging.DEBUG, "leasekit")
    return Reachability(clock)


def failing(error: BackendError) -> Callable[[], Awaitable[NoReturn]]:
    async def call() -> NoReturn:
        raise error

    return call


async def answers(reachability: Reachability, sort: Sort) -> None:
    async def call() -> int:
        return 1

    assert await reachability.call(sort, call, within=1) == 1


async def fails(reachability: Reachability, sort: Sort, error: BackendError | None = None) -> None:
    with pytest.raises(BackendError):
        await reachability.call(sort, failing(error or Unavailable("away")), within=1)


async def test_an_outage_is_a_line_at_its_begin_and_one_at_its_end(
    reachability: Reachability, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[Sort] = ["claim", "beat", "claim", "settle"]
    for sort in failed:
        await fails(reachability, sort)
    clock.advance(12)
    for sort in reversed(failed):
        await answers(reachability, sort)
    assert caplog.messages == [
        "the service does not answer, calls are repeated until it does: Unavailable: away",
        "the service answers again, after 12.0 s",
    ]


async def test_calls_of_another_sort_end_no_outage(
    reachability: Reachability, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        await fails(reachability, "settle")
        await answers(reachability, "beat")
    assert len(caplog.messages) == 1


async def test_calls_that_are_not_repeated_any_more_keep_up_no_outage(
    reachability: Reachability, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    await fails(reachability, "beat")
    await fails(reachability, "beat")
    clock.advance(31)
    await answers(reachability, "claim")
    assert "answers again" in caplog.messages[-1]


async def test_a_single_call_that_fails_is_no_outage(
    reachability: Reachability, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await fails(reachability, "beat")
        await answers(reachability, "beat")
    assert caplog.messages == []


@pytest.mark.parametrize("error", [Refused("no"), Throttled("later")], ids=["refused", "throttled"])
async def test_a_service_that_says_no_is_not_away(
    reachability: Reachability, caplog: pytest.LogCaptureFixture, error: BackendError
) -> None:
    await fails(reachability, "claim", error)
    assert caplog.messages == []


async def test_it_is_reached_once_it_has_done_what_it_was_asked(reachability: Reachability) -> None:
    heard: list[str] = []
    reachability.when_reached(lambda: heard.append("first"))
    await fails(reachability, "claim")
    await fails(reachability, "claim", Refused("no"))
    assert (heard, reachability.answers_claims) == ([], False)
    await answers(reachability, "claim")
    await answers(reachability, "claim")
    reachability.when_reached(lambda: heard.append("later"))
    assert (heard, reachability.answers_claims) == (["first", "later"], True)


async def test_claims_wait_for_tasks_though_results_are_not_answered(reachability: Reachability) -> None:
    """They would be repeated without a pause otherwise, for as long as results fail."""
    await answers(reachability, "claim")
    await fails(reachability, "settle")
    assert reachability.answers_claims
    await fails(reachability, "claim")
    assert not reachability.answers_claims
