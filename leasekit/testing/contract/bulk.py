"""Tests of bulk acts: a dry run counts, and the act with its token changes what was counted."""

from typing import Any, Protocol

import pytest

from leasekit.backend import BulkChanger
from leasekit.errors import Refused
from leasekit.task import NewTask, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class BulkService(Service, BulkChanger, Protocol):
    """A connection to a service that also has bulk acts."""


class Bulk(SchedulerBase):
    """The promises of `BulkChanger`, for a service that is one."""

    @pytest.fixture
    def bulk(self, backend: Any) -> BulkService:
        if not isinstance(backend, BulkChanger):
            pytest.skip(f"{type(backend).__name__} is no BulkChanger")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def test_a_bulk_cancel_touches_what_its_dry_run_has_counted(self, bulk: BulkService, kind: str) -> None:
        await bulk.schedule([NewTask(kind=kind, id=f"{kind}-{n}", collection="c") for n in range(3)])
        await bulk.schedule([NewTask(kind=kind, id=f"{kind}-x")])
        tried = await bulk.cancel_matching(kind=kind, collection="c", status=Status.NEW, dry_run=True)
        assert (tried.kinds, tried.cursor) == ({kind: {"new": 3}}, None)
        await bulk.schedule([NewTask(kind=kind, id=f"{kind}-late", collection="c")])
        wanted: Any = {"kind": kind, "collection": "c", "status": Status.NEW, "token": tried.token}
        done = await bulk.cancel_matching(**wanted)
        assert (done.kinds, done.cursor) == (tried.kinds, None)
        assert (await bulk.cancel_matching(**wanted)).kinds == {}
        assert (await bulk.stats()).kinds[kind] == {"cancelled": 3, "new": 2}

    async def test_a_bulk_reschedule_touches_what_waits(self, bulk: BulkService, kind: str) -> None:
        await self.held(bulk, kind)
        await bulk.schedule([NewTask(kind=kind, id=kind, delay=3600)])
        tried = await bulk.reschedule_matching(kind=kind, delay=0, priority=0, dry_run=True)
        assert tried.kinds == {kind: {"new": 1}}
        assert await self.nothing_left(bulk, kind)
        assert (await bulk.reschedule_matching(kind=kind, delay=0, priority=0, token=tried.token)).kinds == tried.kinds
        assert (await self.claim_one(bulk, kind)).priority == 0

    async def test_an_act_without_the_token_of_its_own_dry_run_is_refused(self, bulk: BulkService, kind: str) -> None:
        await bulk.schedule([NewTask(kind=kind, id=kind)])
        token = (await bulk.cancel_matching(kind=kind, dry_run=True)).token
        for wanted in ({"kind": kind}, {"kind": f"{kind}-other", "token": token}, {"token": token}):
            with pytest.raises(Refused):
                await bulk.cancel_matching(**wanted)  # type: ignore[arg-type]
        assert (await self.info(bulk, kind)).status is Status.NEW
