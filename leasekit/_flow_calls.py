"""The calls of operators on `Client` for flows."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from leasekit._arguments import check_ids
from leasekit._driver.retrying import repeat_until_answered
from leasekit._flows.records import KIND
from leasekit._operating import Operating, require_chains
from leasekit.errors import Refused
from leasekit.flow_info import FlowInfo, flow_info
from leasekit.task import Page, TaskInfo, Verdict
from leasekit.task.words import REDRIVABLE

_PAGE = 100  # tasks that one look brings


class FlowCalls(Operating):
    """The part of `Client` for flows, made of its calls for tasks."""

    def flow(self, flow_id: str) -> FlowInfo | None:
        """Return where a flow is, and its history; None: there is no flow with that id.

        The id of the task of any of its steps will do. Raises `LeasekitError` if the backend knows no chains.
        """
        return _info(self._tasks(flow_id))

    async def aflow(self, flow_id: str) -> FlowInfo | None:
        """Do what `flow` does, from an event loop."""
        return _info(await self._atasks(flow_id))

    def flows(self, name: str, *, cursor: str | None = None, limit: int = 20) -> tuple[list[FlowInfo], str | None]:
        """Return flows of this name, the newest first, and the `cursor` of the next page (None: there is none).

        A page is made of the latest `limit` tasks of their steps, so it may have fewer flows than that, or none.
        """
        page = self._call(self._newest(name, cursor, limit))
        return [info for root in _roots(page) if (info := self.flow(root)) is not None], page.cursor

    def cancel_flow(self, flow_id: str) -> list[Verdict]:
        """Cancel a flow: what waits ends, what runs is told to stop, and no step follows, whatever ends meanwhile.

        Nothing is rolled back. Raises `Refused` if there is no such flow, and `LeasekitError` if the backend knows no
        chains.
        """
        return self.cancel_chain(_known(self._tasks(flow_id), flow_id)[0].id)

    async def acancel_flow(self, flow_id: str) -> list[Verdict]:
        """Do what `cancel_flow` does, from an event loop."""
        return await self.acancel_chain(_known(await self._atasks(flow_id), flow_id)[0].id)

    def resume_flow(self, flow_id: str) -> list[Verdict]:
        """Resume a flow that has failed, from the steps that failed, with as many attempts as at first.

        What has succeeded is not run again. Raises `Refused` if there is no such flow, or nothing of it has failed, and
        `LeasekitError` if the backend knows no chains or no redrives.
        """
        return self.redrive(*_stuck(self._tasks(flow_id), flow_id)).tasks

    async def aresume_flow(self, flow_id: str) -> list[Verdict]:
        """Do what `resume_flow` does, from an event loop."""
        return (await self.aredrive(*_stuck(await self._atasks(flow_id), flow_id))).tasks

    def _tasks(self, flow_id: str) -> list[TaskInfo]:
        return self._session.coding.shown(self._session.connection().run(self._tasks_of(flow_id)))

    async def _atasks(self, flow_id: str) -> list[TaskInfo]:
        return self._session.coding.shown(await self._session.connection().arun(self._tasks_of(flow_id)))

    async def _tasks_of(self, flow_id: str) -> list[TaskInfo]:
        """Return the tasks of the steps of a flow, oldest first; none if there is no such flow."""
        check_ids([flow_id])
        require_chains(self._session.connection().backend)
        info = await repeat_until_answered(partial(self._scheduler.get, flow_id), self._retry_for)
        if info is None or not info.kind.startswith(KIND):
            return []
        listed = self._listing(root=info.root or info.id, kind=info.kind, limit=_PAGE)
        tasks, cursor = list[TaskInfo](), None
        while True:
            page = await repeat_until_answered(partial(listed, cursor=cursor), self._retry_for)
            tasks += page.tasks
            cursor = page.cursor
            if cursor is None:
                return tasks or [info]

    def _newest(self, name: str, cursor: str | None, limit: int) -> Callable[[], Coroutine[Any, Any, Page]]:
        require_chains(self._session.connection().backend)
        return partial(self._scheduler.list_tasks, kind=KIND + name, newest=True, cursor=cursor, limit=limit)


def _info(tasks: list[TaskInfo]) -> FlowInfo | None:
    return flow_info(tasks, root=tasks[0].root or tasks[0].id) if tasks else None


def _roots(page: Page) -> list[str]:
    """Return the flows whose first task is on this page."""
    return [task.id for task in page.tasks if task.root in (None, task.id)]


def _known(tasks: list[TaskInfo], flow_id: str) -> list[TaskInfo]:
    if not tasks:
        raise Refused(f"there is no flow {flow_id!r}: it was never started, or was deleted after its end")
    return tasks


def _stuck(tasks: list[TaskInfo], flow_id: str) -> list[str]:
    """Return the tasks of the steps that failed, and of those that were to follow them."""
    ids = [task.id for task in _known(tasks, flow_id) if task.status in REDRIVABLE]
    if not ids:
        status = flow_info(tasks, root=tasks[0].id).status
        raise Refused(f"flow {flow_id!r} is {status}: no step of it has failed that could be resumed")
    return ids
