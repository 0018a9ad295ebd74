"""Tests of the settings of kinds: what holds for a task, and from when on."""

from typing import Any, Protocol

import pytest

from leasekit.backend import KindDirectory
from leasekit.errors import Refused
from leasekit.task import FixedDelays, KindSettings, NewTask, Settlement, Status
from leasekit.testing.contract.base import SchedulerBase, Service


class KindService(Service, KindDirectory, Protocol):
    """A connection to a service that also keeps settings of kinds."""


class Kinds(SchedulerBase):
    """The promises of `KindDirectory`, for a service that is one."""

    @pytest.fixture
    def setting(self, backend: Any) -> KindService:
        if not isinstance(backend, KindDirectory):
            pytest.skip(f"{type(backend).__name__} is no KindDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    async def priority(self, service: Service, kind: str, **options: Any) -> int:
        """Schedule a task with these options, and return its priority."""
        (answer,) = await service.schedule([NewTask(kind=kind, **options)])
        return (await self.info(service, answer.id)).priority

    async def test_settings_are_listed_by_kind_until_they_are_deleted(self, setting: KindService, kind: str) -> None:
        first, second = f"{kind}-a", f"{kind}.b ?"
        assert await setting.kind(first) is None
        for name in (second, first):
            info = await setting.set_kind(name, KindSettings(max_attempts=3))
            assert (info.kind, info.settings) == (name, KindSettings(max_attempts=3))
        ours = [info for info in await setting.kinds() if info.kind in (first, second)]
        assert [info.kind for info in ours] == [first, second]
        assert await setting.kind(first) == ours[0]
        for _ in range(2):
            await setting.delete_kind(first)
        assert await setting.kind(first) is None
        assert first not in [info.kind for info in await setting.kinds()]

    async def test_every_setting_comes_back_as_it_was_given(self, setting: KindService, kind: str) -> None:
        settings = KindSettings(
            priority=0,
            max_attempts=None,
            max_crashes=1,
            max_runtime=60.0,
            expiry="retry",
            claim_timeout=None,
            heartbeat_timeout=20.0,
            retry=FixedDelays(waits=[1, 2]),
            dedupe_window=60.0,
            retention=3600.0,
            fair=True,
            concurrency=3,
            key_concurrency=2,
            rate=0.5,
            burst=2,
            key_rate=0.25,
            key_burst=4,
            weight=1.5,
            aging=60.0,
        )
        assert (await setting.set_kind(kind, settings)).settings == settings
        info = await setting.kind(kind)
        assert info is not None
        assert info.settings == settings

    async def test_new_settings_take_the_place_of_all_old_ones(self, setting: KindService, kind: str) -> None:
        await setting.set_kind(kind, KindSettings(priority=0, max_attempts=3))
        await setting.set_kind(kind, KindSettings(max_attempts=4))
        info = await setting.kind(kind)
        assert info is not None
        assert info.settings == KindSettings(max_attempts=4)
        assert await self.priority(setting, kind) == 2

    async def test_a_submission_wins_over_its_kind_and_that_over_the_defaults(
        self, setting: KindService, kind: str
    ) -> None:
        assert await self.priority(setting, kind) == 2
        await setting.set_kind(kind, KindSettings(priority=0))
        assert await self.priority(setting, kind) == 0
        assert await self.priority(setting, kind, priority=1) == 1
        assert await self.priority(setting, kind, priority=2) == 2  # given, though it is the default
        assert await self.priority(setting, f"{kind}-other") == 2
        await setting.delete_kind(kind)
        assert await self.priority(setting, kind) == 2

    async def test_a_change_holds_at_once_through_other_connections_and_for_later_tasks_only(
        self, setting: KindService, other: Service, kind: str
    ) -> None:
        await other.schedule([NewTask(kind=kind, id=kind)])
        for priority in (0, 4, 1):
            await setting.set_kind(kind, KindSettings(priority=priority))
            assert await self.priority(other, kind) == priority
        assert (await self.info(other, kind)).priority == 2

    async def test_leases_and_runs_have_the_limits_of_the_kind(self, setting: KindService, kind: str) -> None:
        await setting.set_kind(kind, KindSettings(claim_timeout=20.0, heartbeat_timeout=40.0, max_runtime=30.0))
        task = await self.held(setting, kind)
        assert (task.ttl, task.max_runtime) == (20, 30)
        assert (await self.beat(setting, task)).ttl == 40

    async def test_failures_count_as_the_kind_says(self, setting: KindService, kind: str) -> None:
        await setting.set_kind(kind, KindSettings(max_attempts=2, retry=FixedDelays(waits=[0])))
        for status in (Status.RETRIABLE_FAILURE, Status.DEAD):
            task = (
                await self.held(setting, kind, id=kind)
                if status is not Status.DEAD
                else await self.claim_one(setting, kind)
            )
            await self.settle(setting, task, "retry")
            assert (await self.info(setting, kind)).status is status

    async def test_a_dedupe_key_counts_for_as_long_as_the_kind_says(self, setting: KindService, kind: str) -> None:
        await setting.set_kind(kind, KindSettings(dedupe_window=0.0))
        for _ in range(2):
            (answer,) = await setting.schedule([NewTask(kind=kind, dedupe_key="key")])
            assert answer.created

    async def test_a_successor_has_the_settings_of_its_kind(self, setting: KindService, kind: str) -> None:
        await setting.set_kind(f"{kind}-next", KindSettings(priority=4))
        task = await self.held(setting, kind)
        then = [NewTask(kind=f"{kind}-next", id=f"{kind}-next")]
        await setting.settle([Settlement(id=task.id, token=task.token, outcome="success", then=then)])
        assert (await self.info(setting, f"{kind}-next")).priority == 4

    async def test_a_repeated_change_changes_nothing(self, setting: KindService, kind: str) -> None:
        first = await setting.set_kind(kind, KindSettings(priority=1))
        await self.sleep(0.01)
        assert await setting.set_kind(kind, KindSettings(priority=1)) == first

    async def test_a_change_that_is_based_on_other_settings_is_refused(self, setting: KindService, kind: str) -> None:
        none, low, high = KindSettings(), KindSettings(priority=4), KindSettings(priority=0, rate=0.5)
        with pytest.raises(Refused) as refused:
            await setting.set_kind(kind, low, was=high)
        assert [error["field"] for error in refused.value.errors] == ["was"]
        assert await setting.kind(kind) is None
        for settings, was in ((high, none), (high, none), (low, high)):  # a repeat is no conflict
            assert (await setting.set_kind(kind, settings, was=was)).settings == settings
        with pytest.raises(Refused, match="priority, rate"):
            await setting.set_kind(kind, none, was=high)
        with pytest.raises(Refused, match="priority, rate"):
            await setting.delete_kind(kind, was=high)
        for _ in range(2):
            await setting.delete_kind(kind, was=low)
            assert await setting.kind(kind) is None

    async def test_settings_that_code_declares_again_change_nothing_that_was_changed_by_hand(
        self, setting: KindService, kind: str
    ) -> None:
        declared = KindSettings(retention=3600.0, concurrency=4)
        info = await setting.set_kind(kind, declared, is_declared=True)
        assert (info.settings, info.declared) == (declared, declared)
        assert info.declared_at is not None
        by_hand = KindSettings(retention=3600.0, concurrency=2, priority=1)
        assert (await setting.set_kind(kind, by_hand)).declared == declared
        assert (await setting.set_kind(kind, declared, is_declared=True)).settings == by_hand
        newer = KindSettings(retention=7200.0, concurrency=4)
        kept = KindSettings(retention=7200.0, concurrency=2, priority=1)
        for said in (newer, declared, newer):
            info = await setting.set_kind(kind, said, is_declared=True)
            assert (info.settings, info.declared) == (kept, newer)
        await setting.delete_kind(kind)
        assert await setting.kind(kind) is None
        assert (await setting.set_kind(kind, newer, is_declared=True)).settings == newer

    @pytest.mark.parametrize(
        "settings",
        [
            {"max_attempts": 0},
            {"priority": 5},
            {"heartbeat_timeout": 1.0},
            {"retention": 59.0},
            {"retention": float("nan")},
            {"retry": [1, 2]},
            {"expiry": "never"},
        ],
        ids=str,
    )
    async def test_settings_out_of_bounds_are_refused_with_their_names(
        self, setting: KindService, kind: str, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(Refused) as refused:
            await setting.set_kind(kind, KindSettings(**settings))
        assert [error["field"].partition(".")[0] for error in refused.value.errors] == [*settings]
        assert await setting.kind(kind) is None

    @pytest.mark.parametrize("name", ["named:leader", "once:message-1", "", "a/b", "é"])
    async def test_what_is_no_kind_of_tasks_is_refused(self, setting: KindService, name: str) -> None:
        with pytest.raises(Refused):
            await setting.set_kind(name, KindSettings(priority=1))
        if name.isascii() and name and "/" not in name:
            assert await setting.kind(name) is None
