"""Tests of dedupe keys that end with their task, and of submissions that replace what waits."""

import pytest

from leasekit.errors import Refused
from leasekit.task import NewTask
from leasekit.testing.contract.base import SchedulerBase, Service


class Debouncing(SchedulerBase):
    """The promises of `NewTask.debounce` and `dedupe_scope`, for a service that has them; the others refuse them."""

    @pytest.fixture
    def debouncing(self, backend: Service) -> Service:
        if not backend.capabilities.debounce:
            pytest.skip("the service has no debounce")
        return backend

    async def test_a_replacement_is_refused_where_there_are_none(self, backend: Service, kind: str) -> None:
        if backend.capabilities.debounce:
            pytest.skip("the service has debounce")
        for field, task in (
            ("debounce", NewTask(kind=kind, dedupe_key="k", debounce=60.0)),
            ("dedupe_scope", NewTask(kind=kind, dedupe_key="k", dedupe_scope="live")),
        ):
            with pytest.raises(Refused, match=field) as refused:
                await backend.schedule([NewTask(kind=kind), task])
            assert [(error["item"], error["field"]) for error in refused.value.errors] == [(1, field)]

    async def test_a_submission_replaces_what_waits(self, debouncing: Service, kind: str) -> None:
        tasks = [NewTask(kind=kind, payload=n, dedupe_key="k", delay=3600 * (2 - n), debounce=7200.0) for n in (1, 2)]
        first, second = [(await debouncing.schedule([task]))[0] for task in tasks]
        assert (second.id, second.created, second.replaced) == (first.id, False, True)
        assert (await self.claim_one(debouncing, kind)).payload == 2

    async def test_a_live_key_is_free_once_its_task_has_ended(self, debouncing: Service, kind: str) -> None:
        new = NewTask(kind=kind, dedupe_key="k", dedupe_scope="live")
        (first,) = await debouncing.schedule([new])
        task = await self.claim_one(debouncing, kind)
        (second,) = await debouncing.schedule([new])
        assert (second.id, second.created) == (first.id, False)
        await self.settle(debouncing, task)
        (third,) = await debouncing.schedule([new])
        assert third.created
