"""One call of a backend: what escapes from it, and a call that nobody waits for any more."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from leasekit._driver import retrying
from leasekit._driver.retrying import call_by_task, call_once, repeat_until_answered
from leasekit.errors import Refused, Unavailable
from leasekit.task import Beat, Verdict


@pytest.mark.anyio
async def test_what_escapes_from_a_call_is_unavailable() -> None:
    async def odd() -> None:
        raise KeyError("odd")

    with pytest.raises(Unavailable, match="KeyError: 'odd'"):
        await call_once(odd, within=1)


def test_a_call_that_is_dropped_with_its_loop_ends_in_silence() -> None:
    loop = asyncio.new_event_loop()
    calls = []

    async def start() -> None:
        calls.append(call_once(asyncio.Event().wait, within=60))
        calls[0].send(None)

    loop.run_until_complete(start())
    loop.close()
    calls[0].close()  # on the old code: RuntimeError, for there is no running event loop


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("retry_for", "given_up_after"), [(None, 30), (0, 30), (0.1, 5), (3, 5), (8, 8), (60, 30), (math.inf, 30)]
)
async def test_a_call_that_hangs_takes_no_longer_than_the_patience_but_leaves_time_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, retry_for: float | None, given_up_after: float
) -> None:
    limits: list[float] = []

    async def call() -> str:
        raise AssertionError

    async def note(call: Any, *, within: float) -> str:
        limits.append(within)
        return "answered"

    monkeypatch.setattr(retrying, "call_once", note)
    assert await repeat_until_answered(call, retry_for) == "answered"
    assert limits == [given_up_after]


BEATS = [Beat(id="a", token="old"), Beat(id="b", token="b"), Beat(id="a", token="new")]


@pytest.mark.anyio
async def test_verdicts_on_two_leases_of_one_task_cannot_be_mistaken() -> None:
    """A proxy that reverses an answer gives the verdict on the lost lease to its successor, and the other way round."""
    calls: list[list[str]] = []

    async def call(beats: Sequence[Beat]) -> list[Verdict]:
        calls.append([beat.token for beat in beats])
        return [Verdict(id=beat.id, verdict="gone" if beat.token == "old" else "renewed") for beat in beats]

    assert [verdict.verdict for verdict in await call_by_task(call, BEATS)] == ["gone", "renewed", "renewed"]
    assert calls == [["old", "b"], ["new"]]
    calls.clear()
    await call_by_task(call, BEATS[:2])
    assert calls == [["old", "b"]]


@pytest.mark.anyio
async def test_tasks_that_share_an_id_go_in_one_call_where_ids_do_not_name_tasks() -> None:
    """A hundred calls, one after the other, would take longer than the leases last."""
    calls: list[list[str]] = []

    async def call(beats: Sequence[Beat]) -> list[Verdict]:
        calls.append([beat.token for beat in beats])
        return [Verdict(id=beat.id, verdict="renewed") for beat in beats]

    await call_by_task(call, BEATS, unique_ids=False)
    assert calls == [[beat.token for beat in BEATS]]


@pytest.mark.anyio
async def test_a_refused_item_is_named_by_its_place_among_all() -> None:
    async def call(beats: Sequence[Beat]) -> list[Verdict]:
        if beats[0].token == "new":
            raise Refused("item 0 does not fit", errors=[{"item": 0, "detail": "is too big"}])
        return [Verdict(id=beat.id, verdict="renewed") for beat in beats]

    with pytest.raises(Refused) as refused:
        await call_by_task(call, BEATS)
    assert refused.value.errors == [{"item": 2, "detail": "is too big"}]
