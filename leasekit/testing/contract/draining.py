"""Tests of drains: a worker that finishes what it holds, and is granted nothing new."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from leasekit.backend import WorkerDrainer
from leasekit.errors import Refused
from leasekit.task import NewTask
from leasekit.testing.contract.base import WAIT, SchedulerBase, Service


class DrainingService(Service, WorkerDrainer, Protocol):
    """A connection to a service that also drains workers."""


class Draining(SchedulerBase):
    """The promises of `WorkerDrainer`, for a service that is one."""

    @pytest.fixture
    async def drainer(self, backend: Any) -> AsyncIterator[DrainingService]:
        if not isinstance(backend, WorkerDrainer):
            pytest.skip(f"{type(backend).__name__} is no WorkerDrainer")
        self.names: list[str] = []
        yield backend  # type: ignore[misc]  # it is a `Service` too
        for name in self.names:  # other tests may have a worker of this name
            await backend.undrain_worker(name)

    async def name_of(self, service: Service, kind: str) -> str:
        """Return the name of the worker of a connection, which holds a task then."""
        task = await self.held(service, kind)
        worker = (await self.info(service, task.id)).worker
        assert worker is not None
        self.names.append(worker)
        return worker

    async def test_a_worker_that_drains_is_granted_nothing_until_that_is_taken_back(
        self, drainer: DrainingService, other: Service, kind: str
    ) -> None:
        name = await self.name_of(drainer, kind)
        await drainer.schedule([NewTask(kind=kind, id=f"{kind}-{number}") for number in range(2)])
        info = await drainer.drain_worker(name)
        assert info.name == name
        assert info.running >= 1
        assert info.draining_since is not None
        for wait in (0.0, WAIT):
            claimed = await self.claim(drainer, kind, wait=wait)
            assert (claimed.tasks, claimed.draining) == ([], True)
        assert (await self.claim_one(other, kind)).id == f"{kind}-0"
        for _ in range(2):
            await drainer.undrain_worker(name)
        assert (await self.claim_one(drainer, kind)).id == f"{kind}-1"

    async def test_a_worker_that_drains_keeps_what_it_holds(self, drainer: DrainingService, kind: str) -> None:
        name = await self.name_of(drainer, kind)
        await self.put(drainer, NewTask(kind=kind, id=kind))
        task = await self.claim_one(drainer, kind)
        await drainer.drain_worker(name)
        assert (await self.beat(drainer, task, progress=1)).verdict == "renewed"
        assert (await self.settle(drainer, task)).verdict == "settled"

    async def test_a_claim_of_the_worker_that_waits_is_answered_at_once(
        self, drainer: DrainingService, kind: str
    ) -> None:
        name = await self.name_of(drainer, kind)
        async with self.waiting(drainer, kind, claims=2) as answers:
            await drainer.drain_worker(name)
        assert [(answer.tasks, answer.draining) for answer in answers] == [([], True)] * 2

    async def test_a_repeated_claim_gets_what_it_was_granted_before_the_drain(
        self, drainer: DrainingService, kind: str
    ) -> None:
        name = await self.name_of(drainer, kind)
        await drainer.schedule([NewTask(kind=kind, id=kind)])
        first = await self.claim(drainer, kind, claim_id=kind)
        await drainer.drain_worker(name)
        assert (await self.claim(drainer, kind, claim_id=kind)).tasks == first.tasks

    async def test_a_worker_that_is_not_known_is_refused(self, drainer: DrainingService, kind: str) -> None:
        with pytest.raises(Refused, match=kind):
            await drainer.drain_worker(kind)
        await drainer.undrain_worker(kind)
