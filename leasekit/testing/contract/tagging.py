"""Tests of tags, by which tasks are found."""

from typing import Any, Protocol, cast

import pytest

from leasekit.backend import BulkChanger, Purger
from leasekit.errors import Refused
from leasekit.task import NewTask, Page, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class TaggingService(Service, Protocol):
    """A connection to a service that finds tasks by their tags."""

    async def list_tasks(self, **filters: Any) -> Page: ...


class Tagging(SchedulerBase):
    """The promises of `NewTask.tags`, for a service that keeps tags; the others refuse them."""

    @pytest.fixture
    def tagging(self, backend: Any) -> TaggingService:
        if not backend.capabilities.tags:
            pytest.skip("the service keeps no tags")
        return cast("TaggingService", backend)

    async def test_tags_are_refused_where_there_are_none(self, backend: Service, kind: str) -> None:
        if backend.capabilities.tags:
            pytest.skip("the service keeps tags")
        with pytest.raises(Refused, match="tags") as refused:
            await backend.schedule([NewTask(kind=kind), NewTask(kind=kind, tags=["red"])])
        assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, "tags")]

    async def test_tasks_are_found_that_have_all_tags(self, tagging: TaggingService, kind: str) -> None:
        red, blue = f"{kind}:red", f"{kind}/blue"
        for name, tags in (
            ("a", [red]),
            ("b", [red, blue, red]),
            ("c", [blue]),
            ("d", list[str]()),
            ("e", [blue, red]),
        ):
            await tagging.schedule([NewTask(kind=kind, id=f"{kind}-{name}", tags=tags)])
        assert (await self.info(tagging, f"{kind}-b")).tags == sorted([red, blue])
        assert (await self.info(tagging, f"{kind}-d")).tags == []
        assert await self.found(tagging, kind, tags=[red]) == ["a", "b", "e"]
        assert await self.found(tagging, kind, tags=[red, blue]) == ["b", "e"]
        assert await self.found(tagging, kind, tags=[red, blue], newest=True) == ["e", "b"]
        assert await self.found(tagging, kind, tags=[red, blue], status=Status.DEAD) == []
        assert await self.found(tagging, kind, tags=[f"{kind}:green"]) == []

    async def test_a_listing_by_tags_has_pages(self, tagging: TaggingService, kind: str) -> None:
        await tagging.schedule(
            [NewTask(kind=kind, id=f"{kind}-{n}", tags=[kind] + [f"{kind}:even"] * (n % 2 == 0)) for n in range(7)]
        )
        found: list[str] = []
        page = await tagging.list_tasks(tags=[kind, f"{kind}:even"], limit=2)
        found += [task.id for task in page.tasks]
        while page.cursor is not None:
            page = await tagging.list_tasks(tags=[kind, f"{kind}:even"], limit=2, cursor=page.cursor)
            found += [task.id for task in page.tasks]
        assert found == [f"{kind}-{n}" for n in (0, 2, 4, 6)]

    async def test_a_known_id_keeps_its_tags(self, tagging: TaggingService, kind: str) -> None:
        await tagging.schedule([NewTask(kind=kind, id=kind, tags=["first"])])
        (again,) = await tagging.schedule([NewTask(kind=kind, id=kind, tags=["second"])])
        assert (again.created, again.conflict) == (False, False)
        assert (await self.info(tagging, kind)).tags == ["first"]

    async def test_tags_out_of_bounds_are_refused(self, tagging: TaggingService, kind: str) -> None:
        for tags in ([""], ["x" * 65], ["line\nbreak"], ["ä"], [f"t{n}" for n in range(21)]):
            with pytest.raises(Refused, match="tags"):
                await tagging.schedule([NewTask(kind=kind, tags=tags)])

    async def test_tags_select_what_is_changed_and_removed(self, tagging: TaggingService, kind: str) -> None:
        if not isinstance(tagging, BulkChanger) or not isinstance(tagging, Purger):
            pytest.skip("the service changes tasks one by one")
        both = cast("Any", tagging)
        await tagging.schedule([NewTask(kind=kind, id=f"{kind}-{n}", tags=[kind] * (n < 2)) for n in range(3)])
        tried = await both.cancel_matching(tags=[kind], dry_run=True)
        assert tried.kinds == {kind: {"new": 2}}
        await both.cancel_matching(tags=[kind], token=tried.token)
        assert (await both.purge(tags=[kind])).kinds == {kind: {"cancelled": 2}}
        assert await self.found(tagging, kind, tags=[kind]) == []
        assert [task.id for task in (await tagging.list_tasks(kind=kind)).tasks] == [f"{kind}-2"]

    async def found(self, service: TaggingService, kind: str, **wanted: Any) -> list[str]:
        page = await service.list_tasks(**wanted)
        return [task.id.removeprefix(f"{kind}-") for task in page.tasks]
