"""The contract holds modest services to their modesty, and finds what breaks it."""

import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from leasekit.backend import Backend, Traits
from leasekit.task import Beat, Claimed, NewTask, Settlement, Verdict
from leasekit.testing import faults
from leasekit.testing.clock import FakeClock
from leasekit.testing.contract import BackendContract, SchedulerContract
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend

pytestmark = pytest.mark.anyio


class Modest:
    """A service that can do no more than it must, and takes no work by itself."""

    traits = Traits(
        max_batch=10,
        max_claim=2,
        fences=False,
        tells_waited=False,
        remembers_claims=False,
        orders=False,
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
    ("trait", "test"),
    [
        ("fences", "test_a_fence_grows_with_every_claim"),
        ("tells_waited", "test_waited_is_told_where_the_trait_says_so"),
        ("remembers_claims", "test_a_repeated_claim_gets_the_same_again"),
        ("refuses_stale", "test_stale_writes_are_refused"),
        ("orders", "test_a_running_task_is_ordered_to_wind_down"),
        ("progress", "test_progress_outlives_a_holder_that_vanished"),
        ("retries", "test_a_lease_without_beats_runs_out"),
    ],
)
async def test_a_trait_that_is_declared_wrongly_is_found(
    memory: MemoryBackend, clock: FakeClock, trait: str, test: str
) -> None:
    faulty = Faulty(memory)
    await _call(Contract(clock), test, faulty)
    faulty.traits = replace(memory.traits, **{trait: False})
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


async def _call(contract: Contract, test: str, backend: Faulty) -> None:
    """One test of the contract, with the fixtures that it asks for."""
    method = getattr(contract, test)
    fixtures = {"backend": backend, "other": backend, "scheduler": backend, "kind": uuid.uuid4().hex}
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    await method(**{name: fixtures[name] for name in names})
