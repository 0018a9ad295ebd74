"""What was claimed and has not begun: one queue for each priority, between the driver's thread and an executor's."""

import threading
from collections import deque
from collections.abc import Sequence

from leasekit.worker.work import Work

__all__ = ["Buffer"]


class Buffer:
    """Work, the most urgent first, and first come first served among equals. For any thread.

    Whoever takes something out is answerable for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Work]] = {}  # in the order of priorities
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._queues.values()))

    def put(self, works: Sequence[Work]) -> None:
        """Hand over a batch: as many who wait wake up as there is work, under one lock."""
        with self._changed:
            for work in works:
                priority = work.holding.task.priority
                if priority not in self._queues:
                    self._queues[priority] = deque()
                    self._queues = dict(sorted(self._queues.items()))
                self._queues[priority].append(work)
            self._changed.notify(len(works))

    def take(self) -> Work | None:
        """The best there is; None where there is nothing."""
        with self._changed:
            return self._best()

    def wait(self, at_most: float | None = None) -> Work | None:
        """The best there is, as soon as there is anything; None once the buffer is closed, or after so many seconds."""
        with self._changed:
            while (work := self._best()) is None and not self._closed:
                if not self._changed.wait(at_most):
                    return self._best()
            return work

    def take_back(self, until: float) -> list[Work]:
        """All that has been here since `until` or before."""
        with self._changed:
            return [
                queue.popleft() for queue in self._queues.values() for _ in range(len(queue)) if queue[0].since <= until
            ]

    def close(self) -> None:
        """Nothing will come any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _best(self) -> Work | None:
        for queue in self._queues.values():
            if queue:
                return queue.popleft()
        return None
