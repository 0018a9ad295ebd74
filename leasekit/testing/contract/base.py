"""The base of the contract: settings of the service under test, and steps that the tests share."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

import anyio
import pytest

from leasekit.backend import Backend, Scheduler
from leasekit.task import Beat, Claimed, NewTask, Outcome, Settlement, Task, TaskInfo, Verdict

__all__ = ["WAIT", "ContractBase", "SchedulerBase", "Service", "ids_of", "is_gone"]

WAIT = 20.0  # seconds for a task that is ready or about to be; a passing test never waits so long

_GONE = {"settled", "taken", "expired", "overdue", "cancelled", "unknown"}


class ContractBase:
    """Settings and fixtures of the service under test, and steps that the tests share."""

    pytestmark = pytest.mark.anyio

    short_ttl: float = 2.0
    """The shortest ttl that the service grants: tests in which a lease expires use it as `claim_timeout`."""

    late_results: bool = True
    """Whether a result is accepted after its lease expired, as long as the task was not granted again."""

    max_payload: int = 1024 * 1024
    """The most bytes of JSON in a payload; only a bound below 50,000 changes a test."""

    counts_releases: bool = False
    """Whether the service counts a released run as an attempt."""

    tells_times: bool = True
    """Whether the service tells when a task was scheduled, its run claimed, begun and heard of, and when it ended."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    async def backend(self) -> Backend:
        """A connection to the service. Define it."""
        raise NotImplementedError(f"{type(self).__name__} has no backend: define the fixture `backend`")

    @pytest.fixture
    async def other(self, backend: Backend) -> Backend:
        """A second connection to the same service, of another worker. Define it if the service can have two."""
        return backend

    @pytest.fixture
    async def out_of_reach(self) -> Backend | None:
        """A connection whose calls never reach the service. Define it if there is a network between."""
        return None

    @pytest.fixture
    def kind(self) -> str:
        return f"contract-{uuid.uuid4().hex[:12]}"

    async def put(self, backend: Backend, task: NewTask) -> str:
        """Put a task into the service and return its id. Override this method if the backend is no `Scheduler`.

        Use the kind, the payload and the two timeouts of `task`; only `SchedulerContract` gives other options.
        """
        assert isinstance(backend, Scheduler), "the backend is no Scheduler: override `put`"
        (answer,) = await backend.schedule([task])
        assert answer.created
        return answer.id

    async def sleep(self, seconds: float) -> None:
        """Let time pass for the service. Override this method if the service's clock can be turned."""
        await anyio.sleep(seconds)

    def now(self) -> datetime:
        """Return the time of the service, as far as its clock is known here."""
        return datetime.now(UTC)

    async def expire(self, *tasks: Task) -> None:
        """Let these leases expire."""
        await self.sleep(max(task.ttl for task in tasks) + 0.1)

    async def interrupt(self, *tasks: Task) -> None:
        """Do nothing. Override this method to cause a restart or a jump of the clock that extends leases."""

    async def claim(
        self,
        backend: Backend,
        kind: str,
        *,
        also: Sequence[str] = (),
        limit: int = 1,
        wait: float = WAIT,
        claim_id: str | None = None,
    ) -> Claimed:
        with anyio.fail_after(WAIT + 10):
            return await backend.claim([kind, *also], limit=limit, wait=wait, claim_id=claim_id or uuid.uuid4().hex)

    @asynccontextmanager
    async def waiting(
        self, backend: Backend, kind: str, *, claims: int = 1, **options: Any
    ) -> AsyncGenerator[list[Claimed]]:
        """Run claims that wait while the block runs; yield the list of their answers, which is full after the block."""
        answers: list[Claimed] = []

        async def ask() -> None:
            answers.append(await self.claim(backend, kind, **options))

        with anyio.fail_after(WAIT - 5):
            async with anyio.create_task_group() as group:
                for _ in range(claims):
                    group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                yield answers

    async def claim_one(self, backend: Backend, kind: str, *, claim_id: str | None = None) -> Task:
        (task,) = (await self.claim(backend, kind, claim_id=claim_id)).tasks
        return task

    async def held(self, backend: Backend, kind: str, payload: Any = None, **options: Any) -> Task:
        """Put a task and claim it, under a lease that outlasts the test."""
        await self.put(backend, NewTask(kind=kind, payload=payload, **options))
        return await self.claim_one(backend, kind)

    async def briefly_held(self, backend: Backend, kind: str, **options: Any) -> Task:
        """Put a task and claim it, under a lease that is short enough to let it expire."""
        ttl = self.short_ttl
        return await self.held(backend, kind, claim_timeout=ttl, heartbeat_timeout=ttl, **options)

    async def beat(self, backend: Backend, task: Task, **options: Any) -> Verdict:
        (verdict,) = await backend.beat([Beat(id=task.id, token=task.token, **options)])
        assert verdict.id == task.id
        return verdict

    async def settle(self, backend: Backend, task: Task, outcome: Outcome = "success", **options: Any) -> Verdict:
        settlement = Settlement(id=task.id, token=task.token, outcome=outcome, **options)
        (verdict,) = await backend.settle([settlement])
        assert verdict.id == task.id
        return verdict

    async def nothing_left(self, backend: Backend, kind: str) -> bool:
        """Whether a claim without a wait gets no task; a task that it gets is taken."""
        return not (await self.claim(backend, kind, wait=0)).tasks

    async def claim_again(self, backend: Backend, task: Task) -> Task | None:
        """Claim a task that must run again; None if the service leaves retries to another system, which is checked."""
        if backend.capabilities.retries:
            again = await self.claim_one(backend, task.kind)
            assert again.id == task.id
            return again
        assert await self.nothing_left(backend, task.kind), "the service hands it out again: declare retries"
        return None


class Service(Backend, Scheduler, Protocol):
    """A connection to a service that takes work by itself."""


class SchedulerBase(ContractBase):
    """Steps for a service that takes work by itself."""

    async def info(self, backend: Service, task_id: str) -> TaskInfo:
        info = await backend.get(task_id)
        assert info is not None
        assert info.id == task_id
        return info


def is_gone(verdict: Verdict, *reasons: str) -> bool:
    """Assert that a write was refused, for one of these reasons (none given: for any that exists); return True."""
    assert verdict.verdict == "gone"
    assert verdict.reason in (reasons or _GONE)
    return True


def ids_of(tasks: Sequence[TaskInfo]) -> list[str]:
    return [task.id for task in tasks]
