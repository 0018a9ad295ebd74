"""Forwarding: a scheduler whose calls all go one way, for a wrapper that treats them alike."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from leasekit.task import (
    Beat,
    Claimed,
    NewTask,
    Page,
    Purged,
    Redriven,
    Scheduled,
    Settlement,
    Stats,
    TaskInfo,
    Verdict,
)


class ForwardingScheduler:
    """A `Backend` and `Scheduler` that passes each call, by its name, to the `_call` of a subclass."""

    async def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def claim(
        self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, labels: Mapping[str, str] | None = None
    ) -> Claimed:
        more = {"labels": labels} if labels else {}
        return cast(
            "Claimed", await self._call("claim", list(kinds), limit=limit, wait=wait, claim_id=claim_id, **more)
        )

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        return cast("list[Verdict]", await self._call("beat", list(beats)))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        return cast("list[Verdict]", await self._call("settle", list(settlements)))

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        return cast("list[Scheduled]", await self._call("schedule", list(tasks)))

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        return cast("list[Verdict]", await self._call("cancel", list(task_ids)))

    async def redrive(self, task_ids: Sequence[str] = (), **options: Any) -> Redriven:
        return cast("Redriven", await self._call("redrive", list(task_ids), **options))

    async def purge(self, task_ids: Sequence[str] = (), **options: Any) -> Purged:
        return cast("Purged", await self._call("purge", list(task_ids), **options))

    async def list_dead(self, **wanted: Any) -> Page:
        return cast("Page", await self._call("list_dead", **wanted))

    async def get(self, task_id: str) -> TaskInfo | None:
        return cast("TaskInfo | None", await self._call("get", task_id))

    async def stats(self) -> Stats:
        return cast("Stats", await self._call("stats"))

    async def list_tasks(self, **filters: Any) -> Page:
        return cast("Page", await self._call("list_tasks", **filters))
