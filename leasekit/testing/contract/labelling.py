"""Tests of labels: a task that requires or prefers some is granted to workers that have them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import pytest

from leasekit.errors import Refused
from leasekit.task import Claimed, NewTask
from leasekit.testing.contract.base import SchedulerBase, Service

_NONE: Mapping[str, str] = {}


class LabelService(Service, Protocol):
    """A connection to a service that knows labels of workers."""

    async def claim(
        self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, labels: Mapping[str, str] = ...
    ) -> Claimed: ...


class Labelling(SchedulerBase):
    """The promises of `NewTask.requires` and `prefers`, for a service that takes labels; others refuse such tasks."""

    @pytest.fixture
    def labelling(self, backend: Any) -> LabelService:
        if not backend.capabilities.labels:
            pytest.skip("the service takes no labels")
        return cast("LabelService", backend)

    async def test_requirements_are_refused_where_there_are_no_labels(self, backend: Service, kind: str) -> None:
        if backend.capabilities.labels:
            pytest.skip("the service takes labels")
        with pytest.raises(Refused, match="requires") as refused:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, requires={"gpu": "a100"})])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "requires")]

    async def test_preferences_are_refused_where_there_are_no_labels(self, backend: Service, kind: str) -> None:
        if backend.capabilities.labels:
            pytest.skip("the service takes labels")
        with pytest.raises(Refused, match="prefers") as refused:
            await backend.schedule([NewTask(kind=kind, prefers={"zone": "eu"})])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(0, "prefers")]

    async def test_a_preferred_worker_gets_the_task_and_others_get_it_later(
        self, labelling: LabelService, kind: str
    ) -> None:
        eu, kept, soon = {"zone": "eu"}, f"{kind}-kept", f"{kind}-soon"
        await labelling.schedule(
            [
                NewTask(kind=kind, id=kept, prefers=eu, prefer_for=3600),
                NewTask(kind=kind, id=soon, prefers=eu, prefer_for=2.0),
            ]
        )
        assert await self.granted_with(labelling, kind, {"zone": "us"}) == []
        async with self.waiting(labelling, kind) as answers:
            await self.sleep(2.1)
        assert [task.id for claimed in answers for task in claimed.tasks] == [soon]
        info = await self.info(labelling, kept)
        assert (info.prefers, info.prefer_for) == ({"zone": "eu"}, 3600)
        assert await self.granted_with(labelling, kind, {"zone": "eu"}) == ["kept"]

    async def test_a_claim_that_waits_gets_a_task_that_prefers_its_labels(
        self, labelling: LabelService, kind: str
    ) -> None:
        claiming = asyncio.create_task(
            labelling.claim([kind], limit=1, wait=30, claim_id=f"{kind}-w", labels={"zone": "eu"})
        )
        await labelling.schedule([NewTask(kind=kind, id=kind, prefers={"zone": "eu"}, prefer_for=3600)])
        assert [task.id for task in (await claiming).tasks] == [kind]

    async def test_preferences_that_cannot_be_are_refused(self, labelling: LabelService, kind: str) -> None:
        eu = {"zone": "eu"}
        wrong: dict[str, dict[str, Any]] = {
            "prefers": {"kind": kind, "prefers": {"a b": "x"}},
            "prefer_for": {"kind": kind, "prefer_for": 5.0},
            "is in `requires` and in `prefers`": {"kind": kind, "prefers": eu, "requires": {"zone": "us"}},
            "`key` cannot prefer": {"kind": kind, "prefers": eu, "key": "a"},
        }
        for message, options in wrong.items():
            with pytest.raises((Refused, ValueError), match=message):
                await labelling.schedule([NewTask(**options)])
        for seconds in (0.0, 0.05, 86_401.0):
            with pytest.raises(Refused, match="prefer_for"):
                await labelling.schedule([NewTask(kind=kind, prefers=eu, prefer_for=seconds)])

    async def test_only_a_worker_with_all_labels_is_granted_a_task(self, labelling: LabelService, kind: str) -> None:
        gpu, eu = {"gpu": "a100"}, {"zone": "eu"}
        await labelling.schedule(
            [
                NewTask(kind=kind, id=f"{kind}-both", requires=gpu | eu),
                NewTask(kind=kind, id=f"{kind}-gpu", requires=gpu, key="tenant"),
                NewTask(kind=kind, id=f"{kind}-any"),
            ]
        )
        assert (await self.info(labelling, f"{kind}-both")).requires == gpu | eu
        assert await self.granted_with(labelling, kind) == ["any"]
        assert await self.granted_with(labelling, kind, {"gpu": "t4", "zone": "eu"}) == []
        assert await self.granted_with(labelling, kind, gpu | {"os": "linux"}) == ["gpu"]
        assert await self.granted_with(labelling, kind, gpu | eu) == ["both"]

    async def test_what_no_worker_can_have_is_listed(self, labelling: LabelService, kind: str) -> None:
        await labelling.schedule([NewTask(kind=kind, requires={"gpu": "t4"}), NewTask(kind=kind, requires={"x": "y"})])
        assert (await labelling.stats()).unmet[kind] == [{"gpu": "t4"}, {"x": "y"}]
        await self.granted_with(labelling, kind, {"gpu": "t4"})
        assert (await labelling.stats()).unmet[kind] == [{"x": "y"}]

    async def test_a_claim_waits_for_a_task_that_its_labels_fit(self, labelling: LabelService, kind: str) -> None:
        claiming = asyncio.create_task(
            labelling.claim([kind], limit=1, wait=30, claim_id=f"{kind}-w", labels={"gpu": "a100"})
        )
        await labelling.schedule([NewTask(kind=kind, id=f"{kind}-other", requires={"gpu": "t4"})])
        await labelling.schedule([NewTask(kind=kind, id=kind, requires={"gpu": "a100"})])
        assert [task.id for task in (await claiming).tasks] == [kind]

    async def test_labels_out_of_bounds_are_refused(self, labelling: LabelService, kind: str) -> None:
        for requires in (
            {"": "x"},
            {"x": ""},
            {"a b": "x"},
            {"x": "a,b"},
            {"x": "a=b"},
            {f"n{n}": "x" for n in range(5)},
        ):
            with pytest.raises(Refused, match="requires"):
                await labelling.schedule([NewTask(kind=kind, requires=requires)])
        for labels in ({"x": "a\nb"}, {"a b": "x"}, {f"n{n}": "x" for n in range(17)}):
            with pytest.raises(Refused, match=r"does not fit.*labels") as refused:
                await labelling.claim([kind], limit=1, wait=0, claim_id=kind, labels=labels)
            assert [error["field"] for error in refused.value.errors] == ["labels"]

    async def granted_with(self, service: LabelService, kind: str, labels: Mapping[str, str] = _NONE) -> list[str]:
        claim_id = f"{kind}-{len(labels)}-{'-'.join(labels.values())}"
        claimed = await service.claim([kind], limit=10, wait=0, claim_id=claim_id, labels=labels)
        return [task.id.removeprefix(f"{kind}-") for task in claimed.tasks]
