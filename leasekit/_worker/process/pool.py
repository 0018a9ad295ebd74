"""Process pool: the executor of a kind that runs in processes of its own, with a thread for each process.

Tasks go to the first place with a free slot. So processes that are not needed stay idle, and end.

Rule 1: a process runs tasks of one kind alone.
Rule 2: the first place always has a process. So a kind whose processes cannot start claims nothing.
Rule 3: another place has a process while all places before it are full: a process is ready before its first task is
claimed. It ends once it has been idle for a minute.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from msgspec import structs

from leasekit._driver.connection import Connection
from leasekit._worker.around import Lifespan
from leasekit._worker.buffer import Buffer
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.handlers import Handler
from leasekit._worker.process import handler_import
from leasekit._worker.process.place import Place
from leasekit.errors import ConfigError

logger = logging.getLogger("leasekit")

_STEADY = 0.1  # seconds: places that are full for a shorter time need no other process
_IDLE = 60.0  # seconds after which a process that is not needed ends


class ProcessExecutor:
    """Run the handler of one kind `count` times at once, in guarded processes with up to `handler.threads` runs each.

    `changed` is called when one more process is ready for tasks; `failed`, if none will ever be. Leaving the `with`
    block waits for running handlers.

    Raises `ConfigError` if executors would not find the handler.
    """

    def __init__(
        self,
        count: int,
        handler: Handler,
        connection: Connection,
        *,
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
        lifespans: Sequence[Lifespan] = (),
    ) -> None:
        self.buffer = Buffer()
        self._now = connection.clock.now
        self._changed = changed
        self._failed = failed
        self._was_ready = False
        setup = handler_import.setup(handler, connection, lifespans)
        self._places = [
            Place(
                structs.replace(setup, threads=min(handler.threads, count - first)),
                self._now,
                take=self.buffer.take,
                filled=self._call_next,
            )
            for first in range(0, count, handler.threads)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=[index], name=f"leasekit-executor-{index}", daemon=True)
            for index in range(len(self._places))
        ]

    @property
    def slots(self) -> int:
        """The number of handlers that the processes that live can run at once. Any thread."""
        return sum(place.slots for place in self._places)

    def put(self, works: Sequence[ClaimedTask]) -> None:
        self.buffer.put(works)
        self._call()

    def end_all(self, now: float) -> None:
        """Stop running tasks: kill every executor in which a handler runs at `now`, and give the tasks back.

        Each task is released, with its latest progress, once its executor is known to be dead. This does not wait. Any
        thread may call it, but only to leave the block afterwards.
        """
        for place in self._places:
            place.end(now)

    def __enter__(self) -> "ProcessExecutor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for place in self._places:
            place.close()
        self.buffer.close()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        """Wake as many places as the tasks in the buffer need."""
        left = len(self.buffer)
        for place in self._places:
            if left > 0 and (free := place.free):
                place.ring()
                left -= free

    def _call_next(self) -> None:
        """Wake what follows a place that is full: places for the tasks that are left, and the next to start."""
        self._call()
        for index, place in enumerate(self._places):
            if not place.has_executor and not place.full:
                if self._is_needed(index):
                    place.ring()
                return

    def _is_needed(self, index: int) -> bool:
        return all(place.full for place in self._places[:index])

    def _serve(self, index: int) -> None:
        place = self._places[index]
        used_at = self._now()
        try:
            while not place.over:
                is_used = place.busy or self._is_needed(index)
                if is_used:
                    used_at = self._now()
                if place.has_executor:
                    if self._now() - used_at < _IDLE:
                        place.step()
                    else:
                        place.end_executor()
                        self._call()  # it may have been called a moment ago
                elif is_used:
                    if index:
                        place.sleep(_STEADY)
                    if self._is_needed(index):
                        self._start_executor(place)
                else:
                    place.wait()
        except ConfigError as error:
            self._failed(error)
        except BaseException as error:
            logger.critical("the thread of an executor has ended: the worker stops", exc_info=error)
            self._failed(error)
        finally:
            place.finish()

    def _start_executor(self, place: Place) -> None:
        try:
            is_ready = place.start()
        except ConfigError as error:
            if not self._was_ready:
                raise
            logger.error("no executor can be started any longer, it is tried again: %s", error)
            place.pause()
            return
        if is_ready:
            self._was_ready = True
            self._changed()
