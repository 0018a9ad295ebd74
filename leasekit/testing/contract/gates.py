"""Tests of gates: what is not started, and from when to when."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from leasekit.backend import GateDirectory
from leasekit.errors import Refused
from leasekit.task import NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class GatedService(Service, GateDirectory, Protocol):
    """A connection to a service that also has gates."""


class Gates(SchedulerBase):
    """The promises of `GateDirectory`, for a service that is one."""

    @pytest.fixture
    def gated(self, backend: Any) -> GatedService:
        if not isinstance(backend, GateDirectory):
            pytest.skip(f"{type(backend).__name__} is no GateDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    @pytest.fixture(params=["kind", "collection"])
    def closed(self, request: pytest.FixtureRequest, kind: str) -> dict[str, Any]:
        """Return what the gate of a test closes: the tasks of `behind` are behind each."""
        return {request.param: kind if request.param == "kind" else f"{kind} of a-tenant"}

    async def behind(self, service: Service, kind: str, *ids: str) -> None:
        await service.schedule([NewTask(kind=kind, id=task_id, collection=f"{kind} of a-tenant") for task_id in ids])

    async def granted(self, service: Service, kind: str, *also: str) -> list[str]:
        return [task.id for task in (await self.claim(service, kind, also=also, limit=10, wait=0)).tasks]

    async def test_gates_are_listed_until_they_are_opened(
        self, gated: GatedService, kind: str, closed: dict[str, Any]
    ) -> None:
        until = self.now().replace(microsecond=0) + timedelta(days=1)
        gate = await gated.set_gate(**closed, mode="drop", until=until, reason="a \\ 'reason' é")
        assert (gate.mode, gate.until, gate.reason) == ("drop", until, "a \\ 'reason' é")
        assert {"kind": gate.kind, "collection": gate.collection} == {"kind": None, "collection": None} | closed
        assert gate in await gated.gates()
        assert gate == await gated.set_gate(**closed, mode="drop", until=until, reason="a \\ 'reason' é")
        for _ in range(2):
            await gated.open_gate(**closed)
        assert gate not in await gated.gates()

    async def test_no_task_behind_a_closed_gate_is_granted_through_any_connection(
        self, gated: GatedService, other: Service, kind: str, closed: dict[str, Any]
    ) -> None:
        await self.behind(gated, kind, f"{kind}-1", f"{kind}-2")
        gate = await gated.set_gate(**closed, reason="why")
        await self.behind(other, kind, f"{kind}-3")
        await gated.schedule([NewTask(kind=f"{kind}-open", id=f"{kind}-open")])
        for service in (gated, other):
            assert f"{kind}-1" not in await self.granted(service, kind, f"{kind}-open")
        info = await self.info(gated, f"{kind}-1")
        assert (info.status, info.attempt, info.gate) == (Status.NEW, 0, gate)
        await gated.open_gate(**closed)
        assert await self.granted(other, kind) == [f"{kind}-1", f"{kind}-2", f"{kind}-3"]
        assert (await self.info(gated, f"{kind}-1")).attempt == 1

    async def test_a_waiting_task_behind_a_closed_gate_can_be_cancelled(
        self, gated: GatedService, kind: str, closed: dict[str, Any]
    ) -> None:
        await self.behind(gated, kind, kind)
        await gated.set_gate(**closed)
        assert await self.granted(gated, kind) == []
        (verdict,) = await gated.cancel([kind])
        assert verdict.verdict == "cancelled"
        await gated.open_gate(**closed)
        assert await self.granted(gated, kind) == []

    async def test_a_run_goes_on_when_its_gate_is_closed(
        self, gated: GatedService, kind: str, closed: dict[str, Any]
    ) -> None:
        task = await self.held(gated, kind)
        await gated.set_gate(kind=kind)
        assert (await self.beat(gated, task)).verdict == "renewed"
        assert (await self.settle(gated, task)).verdict == "settled"

    async def test_due_tasks_of_a_dropped_kind_or_collection_are_not_granted_and_end(
        self, gated: GatedService, kind: str, closed: dict[str, Any]
    ) -> None:
        await self.behind(gated, kind, kind)
        await gated.set_gate(**closed, mode="drop", reason="why")
        assert await self.granted(gated, kind) == []
        while not (await self.info(gated, kind)).status.ended:
            await self.sleep(0.1)
        info = await self.info(gated, kind)
        assert info.status is Status.CANCELLED
        assert "dropped: why" in (info.reason or "")

    @pytest.mark.parametrize("name", ["named:x", "once:x"])
    async def test_a_kind_of_names_has_no_gate(self, gated: GatedService, name: str) -> None:
        with pytest.raises(Refused, match="stands for the lease of a name"):
            await gated.set_gate(kind=name)

    @pytest.mark.parametrize(
        "wanted",
        [
            {},
            {"kind": "k", "collection": "c"},
            {"kind": "a/b"},
            {"kind": "k", "mode": "x"},
            {"kind": "k", "duration": -1},
        ],
    )
    async def test_what_is_no_gate_is_refused(self, gated: GatedService, wanted: dict[str, Any]) -> None:
        with pytest.raises(Refused):
            await gated.set_gate(**wanted)
