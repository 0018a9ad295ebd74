"""Buffer: tasks that wait for a slot, between the driver's thread and an executor's."""

import threading
from collections import deque
from collections.abc import Sequence

from leasekit._worker.claimed_task import ClaimedTask


class Buffer:
    """Claimed tasks, the most urgent first, and of one priority those first whose run has begun before and goes on.

    The code that takes one out, in any thread, must run it, give it back, or end its run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[tuple[int, bool], deque[ClaimedTask]] = {}  # by priority and whether it is new, in order
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._queues.values()))

    def put(self, works: Sequence[ClaimedTask]) -> None:
        """Add a batch, and wake as many waiting threads as there are tasks, under one lock."""
        with self._changed:
            for work in works:
                lane = work.held.task.priority, work.is_new
                if lane not in self._queues:
                    self._queues[lane] = deque()
                    self._queues = dict(sorted(self._queues.items()))
                self._queues[lane].append(work)
            self._changed.notify(len(works))

    def take(self) -> ClaimedTask | None:
        with self._changed:
            return self._pop_most_urgent()

    def wait(self, at_most: float | None = None) -> ClaimedTask | None:
        """Take the most urgent task, as soon as there is one; None after closing, or after `at_most` seconds."""
        with self._changed:
            while (work := self._pop_most_urgent()) is None and not self._closed:
                if not self._changed.wait(at_most):
                    return self._pop_most_urgent()
            return work

    def take_back(self, until: float) -> list[ClaimedTask]:
        """Remove and return all new tasks that came in at `until` or before."""
        with self._changed:
            return [
                queue.popleft()
                for (_, is_new), queue in self._queues.items()
                for _ in range(len(queue) if is_new else 0)
                if queue[0].since <= until
            ]

    def take_begun(self) -> list[ClaimedTask]:
        """Remove and return all tasks whose run has begun before."""
        with self._changed:
            return [
                queue.popleft()
                for (_, is_new), queue in self._queues.items()
                for _ in range(0 if is_new else len(queue))
            ]

    def remove(self, work: ClaimedTask) -> bool:
        """Remove this task; return whether it was here, and not taken before."""
        with self._changed:
            for queue in self._queues.values():
                if work in queue:
                    queue.remove(work)
                    return True
        return False

    def close(self) -> None:
        """Close the buffer: no task will come in, and waiting threads return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pop_most_urgent(self) -> ClaimedTask | None:
        for queue in self._queues.values():
            if queue:
                return queue.popleft()
        return None
