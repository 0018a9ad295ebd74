"""Tests of redrives: a new life of a task that has ended, never a second outcome of the old one."""

from datetime import timedelta
from typing import Any, Protocol

import pytest

from leasekit.backend import DeadLetters
from leasekit.errors import Refused
from leasekit.task import FixedDelays, NewTask, Outcome, Settlement, Status, Task, Verdict
from leasekit.testing.contract.base import SchedulerBase, Service, is_gone


class RedrivingService(Service, DeadLetters, Protocol):
    """A connection to a service whose dead tasks can be redriven."""


class Redriving(SchedulerBase):
    """The promises of `DeadLetters`."""

    async def dead(self, backend: RedrivingService, kind: str, task_id: str | None = None, **options: Any) -> Task:
        """Let a task end as *dead* after one run, and return its last claim."""
        task = await self.held(backend, kind, id=task_id, max_attempts=1, **options)
        await self.settle(backend, task, "retry", error={"type": "E"})
        return task

    async def verdict(self, backend: RedrivingService, task: Task, **options: Any) -> Verdict:
        (verdict,) = (await backend.redrive([task.id], **options)).tasks
        assert verdict.id == task.id
        return verdict

    async def test_a_dead_task_is_ready_again(self, backend: RedrivingService, kind: str) -> None:
        task = await self.dead(backend, kind, payload=[1])
        await self.settle(backend, task, "retry")
        assert (await self.verdict(backend, task)).verdict == "redriven"
        info = await self.info(backend, task.id)
        assert (info.status, info.reason, info.crashes, info.worker) == (Status.ENQUEUED, None, 0, None)
        again = await self.claim_one(backend, kind)
        assert (again.id, again.payload, again.attempt) == (task.id, [1], 2)
        assert again.fence > task.fence

    async def test_a_task_that_has_failed_for_good_is_ready_again(self, backend: RedrivingService, kind: str) -> None:
        task = await self.held(backend, kind)
        await self.settle(backend, task, "fatal")
        assert (await self.verdict(backend, task)).verdict == "redriven"
        assert (await self.claim_one(backend, kind)).id == task.id

    async def test_the_history_tells_both_lives(self, backend: RedrivingService, kind: str) -> None:
        task = await self.dead(backend, kind)
        await backend.redrive([task.id])
        await self.settle(backend, await self.claim_one(backend, kind))
        info = await self.info(backend, task.id)
        assert [entry.outcome for entry in info.history] == ["retry", "redriven", "success"]
        fences = [entry.fence for entry in info.history]
        assert fences == sorted(set(fences))
        assert info.history[1].worker

    @pytest.mark.parametrize(("outcome", "limit"), [("retry", "max_attempts"), ("crash", "max_crashes")])
    async def test_failures_and_crashes_count_from_none(
        self, backend: RedrivingService, kind: str, outcome: Outcome, limit: str
    ) -> None:
        most = 2 if outcome == "retry" else 1
        task = await self.held(backend, kind, retry=FixedDelays(waits=[0]), **{limit: most})
        await self.settle(backend, task, outcome)
        await self.settle(backend, await self.claim_one(backend, kind), outcome)
        assert (await self.info(backend, task.id)).status is Status.DEAD
        await backend.redrive([task.id])
        await self.settle(backend, await self.claim_one(backend, kind), outcome)
        again = await self.claim_one(backend, kind)
        assert again.attempt == 4
        await self.settle(backend, again, outcome)
        assert (await self.info(backend, task.id)).status is Status.DEAD

    async def test_the_holder_of_the_old_life_writes_nothing_to_the_new_one(
        self, backend: RedrivingService, kind: str
    ) -> None:
        old = await self.briefly_held(backend, kind, max_crashes=0)
        await self.expire(old)
        assert await self.nothing_left(backend, kind)
        await backend.redrive([old.id])
        assert is_gone(await self.beat(backend, old, progress=["old"]), "taken")
        assert is_gone(await self.settle(backend, old, result="old"), "taken")
        new = await self.claim_one(backend, kind)
        assert new.progress is None
        assert is_gone(await self.settle(backend, old), "taken")
        assert (await self.settle(backend, new)).verdict == "settled"

    async def test_a_repeated_report_of_the_old_life_is_answered_as_before(
        self, backend: RedrivingService, kind: str
    ) -> None:
        task = await self.dead(backend, kind)
        await backend.redrive([task.id])
        repeat = Settlement(id=task.id, token=task.token, outcome="retry", error={"type": "E"})
        assert [verdict.verdict for verdict in await backend.settle([repeat])] == ["settled"]
        assert (await self.info(backend, task.id)).status is Status.ENQUEUED

    async def test_a_repeated_redrive_changes_nothing(self, backend: RedrivingService, kind: str) -> None:
        task = await self.dead(backend, kind)
        first = await backend.redrive([task.id], redrive_id="r1")
        assert await backend.redrive([task.id], redrive_id="r1") == first
        again = await self.claim_one(backend, kind)
        assert await backend.redrive([task.id], redrive_id="r1") == first
        await self.settle(backend, again, "retry")
        assert await backend.redrive([task.id], redrive_id="r1") == first
        assert (await self.info(backend, task.id)).status is Status.DEAD
        assert (await self.verdict(backend, task, redrive_id="r2")).verdict == "redriven"

    async def test_a_bad_task_fails_alone(self, backend: RedrivingService, kind: str) -> None:
        done = await self.held(backend, kind)
        await self.settle(backend, done)
        running, dead = await self.held(backend, kind), await self.dead(backend, kind)
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-new")])
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-off")])
        await backend.cancel([f"{kind}-off"])
        ids = [done.id, running.id, f"{kind}-new", f"{kind}-off", f"{kind}-nobody", dead.id]
        verdicts = (await backend.redrive(ids)).tasks
        assert [verdict.id for verdict in verdicts] == ids
        assert [verdict.verdict for verdict in verdicts] == ["failed"] * 4 + ["gone", "redriven"]
        assert "success" in (verdicts[0].reason or "")
        assert verdicts[3].reason == "it is cancelled: schedule it anew under another id"
        assert (await self.beat(backend, running)).verdict == "renewed"

    async def test_a_dry_run_says_what_a_redrive_would_do(self, backend: RedrivingService, kind: str) -> None:
        task, running = await self.dead(backend, kind), await self.held(backend, kind)
        before = await self.info(backend, task.id)
        verdicts = (await backend.redrive([task.id, running.id], dry_run=True)).tasks
        assert [verdict.verdict for verdict in verdicts] == ["redrivable", "failed"]
        assert await self.info(backend, task.id) == before
        assert (await self.verdict(backend, task)).verdict == "redriven"

    async def test_filters_select_a_page_at_a_time(self, backend: RedrivingService, kind: str) -> None:
        for n in range(3):
            await self.dead(backend, kind, f"{kind}-{n}", collection="blue" if n else "red")
        await self.settle(backend, await self.held(backend, kind), "fatal")
        page = await backend.redrive(kind=kind, limit=2, dry_run=True)
        assert [(v.id, v.verdict) for v in page.tasks] == [(f"{kind}-{n}", "redrivable") for n in (0, 1)]
        rest = await backend.redrive(kind=kind, limit=2, cursor=page.cursor)
        assert ([(v.id, v.verdict) for v in rest.tasks], rest.cursor) == ([(f"{kind}-2", "redriven")], None)
        blue = await backend.redrive(kind=kind, collection="blue")
        assert [verdict.id for verdict in blue.tasks] == [f"{kind}-1"]
        failed = await backend.redrive(kind=kind, status=Status.FATAL_FAILURE)
        assert [verdict.verdict for verdict in failed.tasks] == ["redriven"]
        assert (await self.info(backend, f"{kind}-0")).status is Status.DEAD

    async def ids_of(self, backend: RedrivingService, kind: str, **wanted: Any) -> list[str]:
        """Return the ids of all dead tasks of this kind that match, page by page, without the kind."""
        ids: list[str] = []
        cursor: str | None = None
        while True:
            page = await backend.list_dead(kind=kind, cursor=cursor, **wanted)
            ids += [task.id.removeprefix(f"{kind}-") for task in page.tasks]
            cursor = page.cursor
            if cursor is None:
                return ids

    async def died(self, backend: RedrivingService, kind: str, name: str, type_: str, message: str) -> None:
        task = await self.held(backend, kind, id=f"{kind}-{name}", max_attempts=1)
        await self.settle(backend, task, "retry", error={"type": type_, "message": message})

    @pytest.mark.parametrize(
        ("wanted", "names"),
        [
            ({}, ["a", "b", "c"]),
            ({"error": "NO SUCH month"}, ["a", "b"]),
            ({"error_type": "ValueError"}, ["a"]),
            ({"error": "month", "error_type": "KeyError"}, ["b"]),
            ({"error_type": "valueerror"}, []),
            ({"reason": "MAX_ATTEMPTS is 1"}, ["a", "b", "c"]),
            ({"reason": "max_crashes"}, []),
            ({"min_attempts": 1}, ["a", "b", "c"]),
            ({"min_attempts": 2}, []),
            ({"status": Status.FATAL_FAILURE}, ["d"]),
            ({"status": Status.FATAL_FAILURE, "error": "month"}, []),
        ],
        ids=str,
    )
    async def test_dead_tasks_are_selected_by_all_that_is_given(
        self, backend: RedrivingService, kind: str, wanted: dict[str, Any], names: list[str]
    ) -> None:
        await self.died(backend, kind, "a", "ValueError", "no such month: 13")
        await self.died(backend, kind, "b", "KeyError", "no such month: x")
        await self.died(backend, kind, "c", "OSError", "the disk is full")
        await self.settle(backend, await self.held(backend, kind, id=f"{kind}-d"), "fatal", error={"message": "no"})
        await backend.schedule([NewTask(kind=kind, id=f"{kind}-new")])
        assert await self.ids_of(backend, kind, **wanted) == names
        if wanted:
            found = (await backend.redrive(kind=kind, dry_run=True, **wanted)).tasks
            assert [verdict.id.removeprefix(f"{kind}-") for verdict in found] == names
        of_status: dict[str, Any] = {"status": Status.DEAD, **wanted}
        counted = await backend.purge(kind=kind, dry_run=True, **of_status)
        assert sum(counted.kinds.get(kind, {}).values()) == len(names)

    async def test_dead_tasks_are_selected_by_when_they_died(self, backend: RedrivingService, kind: str) -> None:
        await self.dead(backend, kind, f"{kind}-a")
        at = (await self.info(backend, f"{kind}-a")).ended_at
        assert at is not None
        later = at + timedelta(seconds=1)
        assert await self.ids_of(backend, kind, since=at, until=later) == ["a"]
        assert await self.ids_of(backend, kind, since=later) == []
        assert await self.ids_of(backend, kind, until=at) == []

    async def test_each_page_goes_on_where_the_one_before_ended(self, backend: RedrivingService, kind: str) -> None:
        for n in range(5):
            await self.dead(backend, kind, f"{kind}-{n}")
        first = await backend.list_dead(kind=kind, limit=2)
        assert [task.id for task in first.tasks] == [f"{kind}-0", f"{kind}-1"]
        assert first.tasks[0].error == {"type": "E"}
        # Neither what is redriven, and dies again, nor what is removed moves a page.
        await backend.redrive([f"{kind}-0"])
        await self.settle(backend, await self.claim_one(backend, kind), "retry")
        await backend.purge([f"{kind}-1", f"{kind}-2"])
        rest = await backend.list_dead(kind=kind, limit=5, cursor=first.cursor)
        assert [task.id for task in rest.tasks] == [f"{kind}-3", f"{kind}-4"]
        assert rest.cursor is None

    async def test_a_walk_through_all_pages_takes_no_task_twice_that_dies_again(
        self, backend: RedrivingService, kind: str
    ) -> None:
        for n in range(4):
            await self.died(backend, kind, str(n), "E", "always")
        taken: list[str] = []
        cursor: str | None = None
        while True:
            answer = await backend.redrive(kind=kind, error="always", limit=1, cursor=cursor)
            for verdict in answer.tasks:
                taken.append(verdict.id)
                again = await self.claim_one(backend, kind)
                await self.settle(backend, again, "retry", error={"type": "E", "message": "always"})
            cursor = answer.cursor
            if cursor is None:
                break
        assert taken == [f"{kind}-{n}" for n in range(4)]

    async def test_a_redrive_that_was_cut_off_goes_on_with_what_is_left(
        self, backend: RedrivingService, kind: str
    ) -> None:
        for n in range(3):
            await self.died(backend, kind, str(n), "E", "boom")
        await backend.redrive(kind=kind, error="boom", limit=2)
        rest = await backend.redrive(kind=kind, error="boom")
        assert [(verdict.id, verdict.verdict) for verdict in rest.tasks] == [(f"{kind}-2", "redriven")]

    async def test_a_purge_removes_what_it_names_or_selects_and_nothing_else(
        self, backend: RedrivingService, kind: str
    ) -> None:
        for name in ("a", "b", "c"):
            await self.died(backend, kind, name, "E", f"boom {name}")
        running = await self.held(backend, kind)
        assert (await backend.purge(kind=kind, error="boom b")).kinds == {kind: {"dead": 1}}
        assert await self.ids_of(backend, kind) == ["a", "c"]
        named = await backend.purge([f"{kind}-c", running.id, f"{kind}-nobody"])
        assert named.kinds == {kind: {"dead": 1}}
        assert await self.ids_of(backend, kind) == ["a"]
        assert (await self.settle(backend, running)).verdict == "settled"

    @pytest.mark.parametrize(
        "bad",
        [{"status": "success"}, {"limit": 0}, {"cursor": "made up"}, {"error": "\n"}, {"min_attempts": 0}],
        ids=str,
    )
    async def test_a_list_of_dead_tasks_refuses_what_selects_none(
        self, backend: RedrivingService, kind: str, bad: dict[str, Any]
    ) -> None:
        await self.dead(backend, kind)
        with pytest.raises(Refused):
            await backend.list_dead(kind=kind, **bad)

    async def test_keys_select_dead_tasks_where_there_are_keys(self, backend: RedrivingService, kind: str) -> None:
        if not backend.capabilities.keys:
            with pytest.raises(Refused):
                await backend.list_dead(kind=kind, key="a")
            return
        for name in ("a", "b"):
            await self.dead(backend, kind, f"{kind}-{name}", key=f"key-{name}")
        assert await self.ids_of(backend, kind, key="key-b") == ["b"]

    async def test_a_task_whose_dedupe_key_was_taken_stays_dead(self, backend: RedrivingService, kind: str) -> None:
        old = await self.dead(backend, kind, dedupe_key="key", dedupe_window=0.0)
        new = await self.held(backend, kind, dedupe_key="key")
        verdict = await self.verdict(backend, old)
        assert (verdict.verdict, new.id in (verdict.reason or "")) == ("failed", True)
        assert (await self.verdict(backend, old, dry_run=True)).verdict == "failed"
        await self.settle(backend, new, "fatal")
        verdicts = (await backend.redrive([old.id, new.id])).tasks
        assert [verdict.verdict for verdict in verdicts] == ["redriven", "failed"]
        (scheduled,) = await backend.schedule([NewTask(kind=kind, dedupe_key="key")])
        assert (scheduled.id, scheduled.created) == (old.id, False)

    async def test_a_new_life_can_be_cancelled(self, backend: RedrivingService, kind: str) -> None:
        task = await self.dead(backend, kind)
        await backend.redrive([task.id])
        assert [verdict.verdict for verdict in await backend.cancel([task.id])] == ["cancelled"]
        assert (await self.verdict(backend, task)).verdict == "failed"
        assert await self.nothing_left(backend, kind)

    async def test_successors_of_the_old_life_stay(self, backend: RedrivingService, kind: str) -> None:
        task = await self.held(backend, kind)
        then = [NewTask(kind=f"{kind}-then")]
        await self.settle(backend, task, "fatal", then=then)
        await backend.redrive([task.id])
        await self.settle(backend, await self.claim_one(backend, kind), then=then)
        first, second = [await self.claim_one(backend, f"{kind}-then") for _ in range(2)]
        assert first.id != second.id

    @pytest.mark.parametrize(
        "bad", [{}, {"kind": "k", "task_ids": ["a"]}, {"status": "success"}, {"kind": "k", "limit": 0}]
    )
    async def test_a_redrive_says_which_tasks_it_is_for(self, backend: RedrivingService, bad: dict[str, Any]) -> None:
        with pytest.raises(Refused):
            await backend.redrive(**bad)
