"""The contract holds modest services to their modesty, and finds what breaks it."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import pytest
from msgspec import UNSET, structs

from leasekit._lifecycle.rows import Trigger
from leasekit._lifecycle.states import WAITING
from leasekit.backend import Backend, Capabilities
from leasekit.task import Beat, Claimed, NewTask, Settlement, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import BackendContract, SchedulerContract
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

pytestmark = pytest.mark.anyio


class Modest:
    """A service that can do no more than it must, and takes no work by itself."""

    capabilities = Capabilities(
        max_batch=10,
        max_claim=2,
        fences=False,
        tells_waited=False,
        remembers_claims=False,
        cancel_requests=False,
        progress=False,
    )

    def __init__(self, memory: MemoryBackend) -> None:
        self.memory = memory

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        claimed = await self.memory.claim(kinds, limit=min(limit, 2), wait=wait, claim_id=uuid.uuid4().hex)
        return Claimed(tasks=[structs.replace(task, fence=0, progress=None) for task in claimed.tasks], waited=None)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        return await self.memory.beat(beats)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        return await self.memory.settle(settlements)

    async def aclose(self) -> None:
        await self.memory.aclose()


class TestModest(BackendContract):
    @pytest.fixture(autouse=True)
    def _service(self, clock: FakeClock, memory: MemoryBackend) -> None:
        self.clock, self.memory = clock, memory

    @pytest.fixture
    async def backend(self) -> Backend:
        return Modest(self.memory)

    async def put(self, backend: Backend, task: NewTask) -> str:
        return (await self.memory.schedule([task]))[0].id

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


class Contract(SchedulerContract):
    """The contract on a service in memory, to be called by hand."""

    __test__ = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def now(self) -> datetime:
        return self.clock.later(0)


@pytest.mark.parametrize(
    ("kind", "fault", "test"),
    [
        ("beat", faults.shuffle, "test_verdicts_come_in_order_with_one_bad_among_good"),
        ("beat", faults.shorten, "test_the_largest_batch_is_taken"),
        ("beat", faults.misspell, "test_a_beat_after_the_end_is_gone"),
        ("settle", faults.lengthen, "test_results_come_in_order_with_one_bad_among_good"),
        ("settle", faults.fail_items(1.0), "test_a_repeated_result_is_settled_again"),
        ("cancel", faults.shuffle, "test_what_has_ended_or_is_unknown_cannot_be_cancelled"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_the_contract_finds(memory: MemoryBackend, clock: FakeClock, kind: str, fault: Fault, test: str) -> None:
    faulty = Faulty(memory)
    await _call(Contract(clock), test, faulty)
    faulty.always(kind, fault)
    with pytest.raises((AssertionError, ValueError)):
        await _call(Contract(clock), test, faulty)


@pytest.mark.parametrize(
    ("capability", "test"),
    [
        ("fences", "test_a_fence_grows_with_every_claim"),
        ("tells_waited", "test_waited_is_told_where_the_capability_says_so"),
        ("remembers_claims", "test_a_repeated_claim_gets_the_same_again"),
        ("refuses_stale", "test_stale_writes_are_refused"),
        ("cancel_requests", "test_a_running_task_is_asked_to_wind_down"),
        ("progress", "test_progress_outlives_a_holder_that_vanished"),
        ("retries", "test_a_lease_without_beats_expires"),
    ],
)
async def test_a_trait_that_is_declared_wrongly_is_found(
    memory: MemoryBackend, clock: FakeClock, capability: str, test: str
) -> None:
    faulty = Faulty(memory)
    await _call(Contract(clock), test, faulty)
    faulty.capabilities = replace(memory.capabilities, **{capability: False})
    with pytest.raises(AssertionError):
        await _call(Contract(clock), test, faulty)


async def test_a_service_that_hands_out_twice_is_found(memory: MemoryBackend, clock: FakeClock) -> None:
    async def remember_everything(call: Call) -> Claimed:
        return await memory.claim(call.args[0], limit=6, wait=0, claim_id="always")

    twice = Faulty(memory)
    await _call(Contract(clock), "test_a_task_goes_to_one_claimer", twice)
    twice.always("claim", Fault("twice", remember_everything))
    with pytest.raises(AssertionError):
        await _call(Contract(clock), "test_a_task_goes_to_one_claimer", twice)


def _untrue(**changes: Any) -> Callable[[Call], Awaitable[Any]]:
    """Answer a claim or a batch of beats with these fields changed in each task or verdict, as functions say."""

    async def act(call: Call) -> Any:
        def changed(item: Any) -> Any:
            told = {name: value for name in changes if (value := getattr(item, name)) is not None}
            return structs.replace(item, **{name: changes[name](value) for name, value in told.items()})

        answer = await call.send()
        return Claimed(tasks=list(map(changed, answer.tasks))) if call.kind == "claim" else list(map(changed, answer))

    return act


async def _say_it_waited(call: Call) -> Any:
    return structs.replace(await call.send(), waited=5.0)


async def _block_the_loop(call: Call) -> Any:
    for _ in range(8):
        time.sleep(0.2)  # noqa: ASYNC251 - the fault
        if (answer := await call.faulty.backend.claim(*call.args, **{**call.options, "wait": 0})).tasks:
            break
    return answer


async def _raise_a_foreign_error(call: Call) -> Any:
    raise OSError("a library's own")


def _grant_to_all_under_way() -> Callable[[Call], Awaitable[Any]]:
    """What one claim is granted is granted to another that is under way, too."""
    granted: list[Claimed] = []

    async def act(call: Call) -> Any:
        answer = await call.send()
        granted.append(answer)
        return granted[0] if len(granted) % 2 == 0 else answer

    return act


def _count_tokens() -> Callable[[Call], Awaitable[Any]]:
    numbers = itertools.count(1_000_000_000)
    return _untrue(token=lambda _: f"token-{next(numbers)}")


async def _newest_first(call: Call) -> Any:
    answer = await call.faulty.backend.claim(call.args[0], limit=100, wait=0, claim_id=uuid.uuid4().hex)
    releases = [Settlement(id=task.id, token=task.token, outcome="release") for task in answer.tasks[:-1]]
    await call.faulty.backend.settle(releases)
    return Claimed(tasks=answer.tasks[-1:], waited=0.0)


async def _end_no_claim(call: Call) -> Any:
    return await call.send() if call.options["limit"] else Claimed(tasks=[], waited=0.0)


async def _retry_at_once(call: Call) -> Any:
    return await call.send([structs.replace(end, retry_after=0.0) for end in call.items])


@pytest.mark.parametrize(
    ("kind", "act", "test"),
    [
        ("claim", _untrue(ttl=lambda ttl: ttl * 2), "test_a_claim_lasts_no_less_than_it_says"),
        ("beat", _untrue(ttl=lambda ttl: ttl * 2), "test_a_renewal_lasts_no_less_than_it_says"),
        ("claim", _say_it_waited, "test_waited_is_never_more_than_the_claim_took"),
        ("claim", _untrue(attempt=lambda _: 1), "test_attempts_grow_with_failures"),
        ("claim", _untrue(attempt=lambda n: n + 1), "test_a_release_is_counted_as_declared"),
        ("settle", _retry_at_once, "test_a_retry_is_due_when_its_wait_is_over"),
        ("settle", _retry_at_once, "test_a_retry_waits_by_its_policy"),
        ("claim", _raise_a_foreign_error, "test_a_service_out_of_reach_raises_backend_errors"),
        ("beat", _raise_a_foreign_error, "test_a_service_out_of_reach_raises_backend_errors"),
        ("settle", _raise_a_foreign_error, "test_a_service_out_of_reach_raises_backend_errors"),
        ("claim", _block_the_loop, "test_a_waiting_claim_lets_the_event_loop_run"),
        ("claim", _count_tokens(), "test_a_token_cannot_be_guessed_from_another"),
        ("claim", _newest_first, "test_of_the_equally_urgent_the_oldest_goes_first"),
        ("claim", _grant_to_all_under_way(), "test_each_task_goes_to_one_of_many_that_wait"),
        ("claim", _end_no_claim, "test_a_claim_that_was_ended_is_granted_nothing_however_late_it_arrives"),
        ("claim", _end_no_claim, "test_a_claim_that_is_ended_is_told_again_what_it_was_granted"),
        ("claim", _end_no_claim, "test_a_claim_that_waits_is_granted_nothing_once_it_was_ended"),
    ],
)  # fmt: skip
async def test_the_contract_finds_a_service_that_is_not_as_it_says(
    memory: MemoryBackend, clock: FakeClock, kind: str, act: Callable[[Call], Awaitable[Any]], test: str
) -> None:
    faulty = Faulty(memory)
    contract = Contract(clock)
    if "out_of_reach" in test:
        for call in ("claim", "beat", "settle"):
            faulty.always(call, faults.drop)
    await _call(contract, test, faulty)
    faulty.always(kind, Fault("untrue", act))
    with pytest.raises((AssertionError, OSError)):
        await _call(contract, test, faulty)


# Services that mix up who holds what, and which item of a batch is which -----------------------------------------

_Act = Callable[[Call], Awaitable[Any]]


def _service(call: Call) -> MemoryService:
    return cast("MemoryBackend", call.faulty.backend).service


def _row(call: Call, task_id: str) -> Trigger:
    with _service(call)._turn() as turn:
        return turn.tx.triggers([task_id])[task_id]


def _put(call: Call, row: Trigger) -> None:
    with _service(call)._turn() as turn:
        turn.tx.save([row])


def _asked(change: Callable[[int, Any, Any], Any]) -> _Act:
    """Change each item of a batch before it is sent: by its place, itself, and the batch."""

    async def act(call: Call) -> Any:
        items = call.items
        return await call.send([change(n, item, items) for n, item in enumerate(items)])

    return act


def _told(change: Callable[[Any, Any, list[Any]], Any]) -> _Act:
    """Change each verdict of a batch before it is told: by its item, itself, and all verdicts."""

    async def act(call: Call) -> Any:
        verdicts = await call.send()
        return [change(item, verdict, verdicts) for item, verdict in zip(call.items, verdicts, strict=True)]

    return act


def _ends_whoever_runs(outcome: str) -> _Act:
    """A result of this outcome ends the newest run of its task, whoever sent it."""

    async def act(call: Call) -> Any:
        answer = await call.send()
        for end in call.items:
            newest = _row(call, end.id).token
            if newest and end.outcome == outcome:
                await call.send([structs.replace(end, token=newest)])
        return answer

    return act


def _is_late(call: Call, end: Any) -> bool:
    row = _row(call, end.id)
    return row.token == end.token and row.status in WAITING


def _refuses_late(outcome: str) -> _Act:
    """What comes after the end of its lease is thrown away, though nobody else has the task."""

    async def act(call: Call) -> Any:
        (end,) = call.items
        await call.faulty.backend.beat([Beat(id=end.id, token=end.token)])  # so that it notices what has run out
        if end.outcome == outcome and _is_late(call, end):
            return [Verdict(id=end.id, verdict="gone", reason="expired")]
        return await call.send()

    return act


def _forgets_late() -> _Act:
    """The repeat of what came after the end of its lease is refused."""
    late: set[str] = set()

    async def act(call: Call) -> Any:
        (end,) = call.items
        await call.faulty.backend.beat([Beat(id=end.id, token=end.token)])
        if end.token in late:
            return [Verdict(id=end.id, verdict="gone", reason="expired")]
        late.update([end.token] if _is_late(call, end) else [])
        return await call.send()

    return act


async def _says_settled(call: Call) -> Any:
    await call.send()
    return [Verdict(id=end.id, verdict="settled") for end in call.items]


def _anew_where_nothing_is_live() -> _Act:
    async def act(call: Call) -> Any:
        answer = await call.send()
        if answer.tasks:
            return answer
        return await call.faulty.backend.claim(*call.args, **{**call.options, "claim_id": uuid.uuid4().hex})

    return act


def _counts_each_retry() -> _Act:
    """A retry that is repeated while the task waits for its next holder is another attempt."""

    async def act(call: Call) -> Any:
        for end in call.items:
            row = _row(call, end.id)
            if end.outcome == "retry" and row.status in WAITING:
                _put(call, structs.replace(row, attempt=row.attempt + 1))
        return await call.send()

    return act


async def _ends_early(call: Call) -> Any:
    answer = await call.send()
    for item in answer.tasks if call.kind == "claim" else answer:
        end = _service(call)._clock() + 0.8 * item.ttl
        _put(call, structs.replace(_row(call, item.id), next_trigger_at=end))
    return answer


async def _beats_ten(call: Call) -> Any:
    verdicts = await call.send(call.items[:10])
    return verdicts + [structs.replace(verdicts[0], id=beat.id) for beat in call.items[10:]]


def _requests_cancel_once() -> _Act:
    told: set[str] = set()

    def change(beat: Any, verdict: Any, _: list[Any]) -> Any:
        knows = beat.token in told
        told.update([beat.token] if verdict.cancel_requested else [])
        return structs.replace(verdict, cancel_requested=False) if knows else verdict

    return _told(change)


def _same_fence_after_expiry(call: Call) -> Awaitable[Any]:
    def fence(task: Any) -> int:
        info = _service(call).get(task.id)
        return 1 + sum(run.outcome != "expired" for run in info.history) if info else 1

    async def act() -> Any:
        return Claimed(tasks=[structs.replace(task, fence=fence(task)) for task in (await call.send()).tasks])

    return act()


async def _waited_until_now(call: Call) -> Any:
    answer = await call.send()
    key = ("w1", call.options["claim_id"])
    with _service(call)._turn() as turn:
        claim = turn.tx.claim_memories([key]).get(key)
        asked_at = claim.granted_at - claim.waited if claim else turn.now
        return structs.replace(answer, waited=turn.now - asked_at)


def _tops_up() -> _Act:
    async def act(call: Call) -> Any:
        answer, options = await call.send(), call.options
        missing = options["limit"] - len(answer.tasks)
        if not missing or options["wait"]:
            return answer
        more: dict[str, Any] = {**options, "limit": missing, "claim_id": uuid.uuid4().hex}
        return structs.replace(answer, tasks=answer.tasks + (await call.faulty.backend.claim(*call.args, **more)).tasks)

    return act


async def _limits_each_kind(call: Call) -> Any:
    limit, backend = call.options["limit"], call.faulty.backend
    parts = [await backend.claim([kind], limit=limit, wait=0, claim_id=uuid.uuid4().hex) for kind in call.items]
    return Claimed(tasks=[task for part in parts for task in part.tasks])


async def _listens_to_the_first_kind(call: Call) -> Any:
    await asyncio.sleep(0)
    options: dict[str, Any] = {**call.options, "wait": 0}
    answer = await call.faulty.backend.claim(call.items, **options)
    return answer if answer.tasks or len(call.items) == 1 else Claimed(tasks=[])


def _without_progress(lost: Callable[[Any], bool]) -> _Act:
    return _asked(lambda _n, item, _all: structs.replace(item, progress=UNSET) if lost(item) else item)


@pytest.mark.parametrize(
    ("kind", "act", "test"),
    [
        *[
            ("settle", _ends_whoever_runs(outcome), "test_stale_writes_are_refused")
            for outcome in ("release", "retry", "crash", "fatal", "cancelled")
        ],
        (
            "settle",
            _ends_whoever_runs("success"),
            "test_a_result_that_comes_late_is_refused_where_another_has_the_task",
        ),
        ("settle", _says_settled, "test_a_result_that_comes_late_is_refused_where_another_has_the_task"),
        ("settle", _refuses_late("fatal"), "test_a_result_that_comes_late_is_not_thrown_away"),
        ("settle", _refuses_late("success"), "test_a_result_that_comes_late_is_not_thrown_away"),
        ("settle", _forgets_late(), "test_a_result_that_comes_late_is_not_thrown_away"),
        ("settle", _says_settled, "test_a_result_that_comes_late_does_not_revive_a_dead_task"),
        ("claim", _anew_where_nothing_is_live(), "test_a_repeated_claim_of_which_nothing_is_live_gets_nothing"),
        ("settle", _ends_whoever_runs("release"), "test_a_repeated_result_is_settled_though_a_later_run_is_under_way"),
        ("settle", _counts_each_retry(), "test_a_repeated_result_is_settled_though_a_later_run_is_under_way"),
        (
            "beat",
            _told(lambda b, v, _: v if b.started else Verdict(id=b.id, verdict="renewed", ttl=60.0)),
            "test_a_beat_of_an_expired_lease_is_gone",
        ),
        (
            "beat",
            _told(lambda b, _, vs: {v.id: v for v in vs}[b.id]),
            "test_stale_writes_are_refused_beside_fresh_ones",
        ),
        (
            "settle",
            _told(lambda b, _, vs: {v.id: v for v in vs}[b.id]),
            "test_stale_writes_are_refused_beside_fresh_ones",
        ),
        ("claim", _same_fence_after_expiry, "test_a_fence_grows_with_every_claim"),
        ("claim", _waited_until_now, "test_a_repeated_claim_gets_the_same_again"),
        ("claim", _tops_up(), "test_a_repeated_claim_gets_only_what_is_still_live"),
        ("claim", _limits_each_kind, "test_a_claim_gets_no_more_than_its_limit_of_all_its_kinds"),
        ("claim", _listens_to_the_first_kind, "test_a_claim_that_waits_is_woken_by_any_of_its_kinds"),
        ("claim", _ends_early, "test_a_claim_lasts_no_less_than_it_says"),
        ("beat", _ends_early, "test_a_renewal_lasts_no_less_than_it_says"),
        (
            "beat",
            _told(lambda _b, v, vs: structs.replace(v, ttl=vs[0].ttl)),
            "test_claims_and_beats_grant_what_the_task_says",
        ),
        ("beat", _beats_ten, "test_a_lease_lasts_for_what_a_beat_said_though_a_claim_grants_less"),
        ("beat", _requests_cancel_once(), "test_a_running_task_is_asked_to_wind_down"),
        (
            "beat",
            _told(lambda _b, v, vs: structs.replace(v, cancel_requested=vs[0].cancel_requested)),
            "test_a_running_task_is_asked_to_wind_down",
        ),
        (
            "beat",
            _told(lambda b, v, _: v if b.started else structs.replace(v, cancel_requested=False)),
            "test_a_running_task_is_asked_to_wind_down",
        ),
        (
            "cancel",
            _told(lambda _i, v, vs: structs.replace(v, verdict=vs[-1].verdict)),
            "test_a_repeated_cancel_is_answered_alike",
        ),
        (
            "settle",
            _asked(lambda n, i, all_: structs.replace(i, result=all_[-1 - n].result)),
            "test_each_result_of_a_batch_counts_for_its_own_task",
        ),
        (
            "settle",
            _asked(lambda _n, i, all_: structs.replace(i, outcome=all_[0].outcome)),
            "test_each_result_of_a_batch_counts_for_its_own_task",
        ),
        (
            "settle",
            _asked(lambda n, i, _: structs.replace(i, then=[]) if n else i),
            "test_each_result_of_a_batch_counts_for_its_own_task",
        ),
        (
            "beat",
            _asked(lambda n, b, all_: structs.replace(b, progress=all_[-1 - n].progress)),
            "test_each_progress_of_a_batch_goes_to_its_own_task",
        ),
        (
            "beat",
            _without_progress(lambda beat: not beat.progress),
            "test_progress_is_kept_whatever_it_is_and_however_it_came",
        ),
        (
            "beat",
            _without_progress(lambda beat: not beat.started),
            "test_progress_is_kept_whatever_it_is_and_however_it_came",
        ),
        (
            "settle",
            _without_progress(lambda end: end.outcome == "release"),
            "test_progress_is_kept_whatever_it_is_and_however_it_came",
        ),
    ],
)
async def test_the_contract_finds_a_service_that_mixes_things_up(
    memory: MemoryBackend, clock: FakeClock, kind: str, act: _Act, test: str
) -> None:
    faulty = Faulty(memory)
    await _call(Contract(clock), test, faulty)
    faulty.always(kind, Fault("mixed up", act))
    with pytest.raises(AssertionError):
        await _call(Contract(clock), test, faulty)


async def _call(contract: Contract, test: str, backend: Faulty) -> None:
    """One test of the contract, with the fixtures that it asks for."""
    method = getattr(contract, test)
    fixtures = {
        "backend": backend,
        "other": backend,
        "out_of_reach": backend,
        "kind": uuid.uuid4().hex,
    }
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    await method(**{name: fixtures[name] for name in names})
