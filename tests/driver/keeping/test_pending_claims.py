"""A claim is asked for again under its id, however long it had waited when its answer was lost."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.context import Context
from leasekit._driver.keeping.pending_claims import Claims
from leasekit._driver.reporting.ledger import Ledger, PendingClaim, SharedMemory
from leasekit._driver.reporting.outbox import Delivery
from leasekit.backend import Capabilities
from leasekit.errors import Closed, Refused, Unavailable
from leasekit.hooks import Hooks
from leasekit.task import Claimed, Settlement, Task
from leasekit.wire import MAX_KINDS

pytestmark = pytest.mark.anyio

PATIENCE = 0.01
TASK = Task(id="t", kind="k", token="x", ttl=30, fence=1, attempt=1)


class LongPoll:
    """Its first answer takes longer than the patience for repeats, and is lost."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.began = asyncio.Event()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        if limit:
            self.asked.append(claim_id)
        self.began.set()
        if limit and len(self.asked) == 1:
            await asyncio.sleep(5 * PATIENCE)
            raise Unavailable("the answer was lost")
        return Claimed(tasks=[TASK])


def claims(backend: Any) -> Claims:
    context = Context(backend, clock=BOOT_CLOCK, hooks=Hooks(), chance=random.Random(1))
    return Claims(context, Mock(), patience=PATIENCE)


async def test_the_wait_of_a_long_poll_is_not_taken_from_the_time_for_repeats() -> None:
    backend = LongPoll()
    claimed, _ = await claims(backend).claim(["k"], limit=1, wait=60)
    assert claimed.tasks == [TASK]
    first, second = backend.asked
    assert first == second


@pytest.mark.parametrize("number", [0, MAX_KINDS + 1])
async def test_a_claim_of_too_many_kinds_or_none_is_refused_before_any_service_is_asked(number: int) -> None:
    backend = LongPoll()
    with pytest.raises(Refused, match=f"a claim of {number} kinds: name 1 to {MAX_KINDS}"):
        await claims(backend).claim([f"k{n}" for n in range(number)], limit=1, wait=0)
    assert backend.asked == []


async def test_a_claim_that_does_not_wait_is_repeated_for_no_longer_than_that() -> None:
    backend = LongPoll()
    with pytest.raises(Unavailable):
        await claims(backend).claim(["k"], limit=1, wait=0)
    assert len(backend.asked) == 1


async def test_what_is_asked_for_is_noted_until_what_was_granted_can_be() -> None:
    """Who is killed in between leaves one or the other: the supervisor gives back what nobody heard of."""
    memory, backend = SharedMemory(), LongPoll()
    asking = claims(backend)
    asking.ledger = Ledger(memory.fd)
    claim = asyncio.create_task(asking.claim(["k"], limit=1, wait=60))
    await backend.began.wait()
    assert memory.read().claims == [PendingClaim(backend.asked[0], ["k"])]
    await claim
    await asyncio.sleep(0)  # whoever asked notes what was granted before that
    assert memory.read().is_empty
    memory.close()


class Gone(LongPoll):
    """It never answers anything again."""

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        await super().claim(kinds, limit=limit, wait=wait, claim_id=claim_id)
        raise Unavailable("it is gone")


@pytest.mark.parametrize(("backend", "stays"), [(LongPoll, False), (Gone, True)])
async def test_a_claim_that_was_cancelled_stays_noted_until_it_was_given_back(
    backend: type[LongPoll], stays: bool
) -> None:
    memory, service = SharedMemory(), backend()
    asking = claims(service)
    asking.ledger = Ledger(memory.fd)
    claim = asyncio.create_task(asking.claim(["k"], limit=1, wait=60))
    await service.began.wait()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await asking.abandon()
    assert bool(memory.read().claims) is stays
    memory.close()


# What nobody waits for any more --------------------------------------------------------------------------------------


class Back:
    """An outbox that shows what is given back."""

    def __init__(self) -> None:
        self.settlements: list[Settlement] = []

    def put(self, delivery: Delivery) -> None:
        self.settlements.append(delivery.settlement)


class Late:
    """A service that answers each claim once it is let, and then with the same task."""

    def __init__(self, *, remembers_claims: bool = True) -> None:
        self.capabilities = Capabilities(remembers_claims=remembers_claims)
        self.asked: list[tuple[str, int]] = []
        self.began = asyncio.Event()
        self.answers = asyncio.Event()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        self.asked.append((claim_id, limit))
        self.began.set()
        await self.answers.wait()
        return Claimed(tasks=[TASK])


RELEASED = Settlement(id=TASK.id, token=TASK.token, outcome="release")


class Under:
    """A claim that is under way."""

    def __init__(self, service: Late) -> None:
        self.back = Back()
        self.service = service
        self.asking = claims(service)
        self.asking._outbox = self.back  # type: ignore[assignment]
        self.claim = asyncio.create_task(self.asking.claim(["k"], limit=1, wait=60))

    async def begun(self) -> "Under":
        await self.service.began.wait()
        return self

    async def answered(self) -> None:
        """The answer is there, and the code that waits for it has not had its turn: it comes next in the loop."""
        [waiting] = self.asking._waiting
        self.service.answers.set()
        while not waiting.done():  # noqa: ASYNC110 - it is the very turn of the loop that counts
            await asyncio.sleep(0)
        assert not self.claim.done()


async def test_a_claim_that_is_cancelled_as_its_answer_comes_gives_back_its_tasks() -> None:
    under = await Under(Late()).begun()
    await under.answered()
    under.claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under.claim
    assert under.back.settlements == [RELEASED]


async def test_a_claim_whose_client_is_closed_as_its_answer_comes_gives_back_its_tasks() -> None:
    under = await Under(Late()).begun()
    await under.answered()
    await under.asking.abandon()
    with pytest.raises(Closed):
        await under.claim
    assert under.back.settlements == [RELEASED]


async def test_a_claim_that_is_given_up_is_ended_and_gives_back_its_tasks() -> None:
    under = await Under(Late()).begun()
    under.claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under.claim
    under.service.answers.set()
    await under.asking.abandon()
    [(claim_id, _), ended] = under.service.asked
    assert ended == (claim_id, 0)
    assert under.back.settlements == [RELEASED]


async def test_a_claim_whose_client_is_closed_is_ended_and_gives_back_its_tasks() -> None:
    under = await Under(Late()).begun()
    closing = asyncio.create_task(under.asking.abandon())
    with pytest.raises(Closed):
        await under.claim
    under.service.answers.set()
    await closing
    [(claim_id, _), ended] = under.service.asked
    assert ended == (claim_id, 0)
    assert under.back.settlements == [RELEASED]


async def test_a_claim_that_no_service_remembers_gives_back_its_tasks_when_its_own_answer_comes() -> None:
    under = await Under(Late(remembers_claims=False)).begun()
    under.claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await under.claim
    assert under.back.settlements == []
    under.service.answers.set()
    await under.asking.abandon()
    assert len(under.service.asked) == 1
    assert under.back.settlements == [RELEASED]


class Lossy(Late):
    """A service that is not heard on the first tries, then has nothing, and grants what is asked for at last."""

    def __init__(self, *, lost: int) -> None:
        super().__init__()
        self._lost = lost
        self.answers.set()

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        claimed = await super().claim(kinds, limit=limit, wait=wait, claim_id=claim_id)
        if len(self.asked) <= self._lost:
            raise Unavailable("the answer was lost")
        return claimed if limit == 0 else Claimed(tasks=[])


async def test_a_claim_that_found_nothing_after_a_try_without_an_answer_is_ended() -> None:
    """That try may arrive yet, and be granted tasks."""
    under = Under(Lossy(lost=1))
    claimed, _ = await under.claim
    assert claimed.tasks == []
    await under.asking.abandon()
    [(claim_id, _), again, ended] = under.service.asked
    assert (again, ended) == ((claim_id, 1), (claim_id, 0))
    assert under.back.settlements == [RELEASED]


class Shards(Late):
    """A service of which one server is away; the other tells for whatever kind what the claim was granted."""

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        if limit == 0 and "away" in kinds:
            raise Unavailable("it is away")
        return await super().claim(kinds, limit=limit, wait=wait, claim_id=claim_id)


async def test_what_a_server_says_is_given_back_though_another_of_the_claims_servers_is_away() -> None:
    """It stays noted: a supervisor tries again."""
    memory, service = SharedMemory(), Shards()
    asking = claims(service)
    asking._outbox = back = Back()  # type: ignore[assignment]
    asking.ledger = Ledger(memory.fd)
    claim = asyncio.create_task(asking.claim(["k", "away", "l"], limit=1, wait=60))
    await service.began.wait()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    service.answers.set()
    await asking.abandon()
    assert back.settlements == [RELEASED]
    assert memory.read().claims == [PendingClaim(service.asked[0][0], ["k", "away", "l"])]
    memory.close()


async def test_a_claim_that_found_nothing_at_the_first_try_costs_no_second_call() -> None:
    under = Under(Lossy(lost=0))
    await under.claim
    await under.asking.abandon()
    assert len(under.service.asked) == 1


async def test_a_claim_that_was_never_answered_is_ended_when_it_is_tried_no_more() -> None:
    service = Lossy(lost=1)
    asking = claims(service)
    asking._outbox = back = Back()  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        await asking.claim(["k"], limit=1, wait=-PATIENCE)  # so it has no time for a second try
    await asking.abandon()
    [(claim_id, _), ended] = service.asked
    assert ended == (claim_id, 0)
    assert back.settlements == [RELEASED]
