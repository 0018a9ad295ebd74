"""Tail: what has changed in a listing since the last look, without reading pages that can no longer change."""

from collections.abc import Callable

from leasekit.task import Page, Status, TaskInfo

_State = tuple[Status, int, int, str | None]


class Tail:
    """A listing, oldest first, that is read repeatedly; `pages(cursor)` reads one page of it.

    A task that has ended never changes again. So pages at the beginning in which all tasks have ended are not read
    again, and their tasks are not remembered.
    """

    def __init__(self, pages: Callable[[str | None], Page]) -> None:
        self._pages = pages
        self._begin: str | None = None
        self._seen: dict[str, _State] = {}

    def look(self) -> list[TaskInfo]:
        """Return the tasks that are new, or have another status, attempt or holder than at the last look.

        If a page cannot be read, the next look returns what this one would have returned.
        """
        read: list[TaskInfo] = []
        begin, cursor, all_ended = self._begin, self._begin, True
        over: list[str] = []
        while True:
            page = self._pages(cursor)
            read += page.tasks
            all_ended = all_ended and all(task.status.ended for task in page.tasks)
            if page.cursor is None:
                break
            cursor = page.cursor
            if all_ended:
                begin = cursor
                over += [task.id for task in page.tasks]
        changed = [task for task in read if self._seen.get(task.id) != _state(task)]
        self._seen = {task.id: _state(task) for task in read}
        for task_id in over:
            self._seen.pop(task_id, None)
        self._begin = begin
        return changed


def _state(task: TaskInfo) -> _State:
    return (task.status, task.attempt, task.fence, task.worker)
