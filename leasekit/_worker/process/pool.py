"""Process pool: the executor of handlers that run in processes of their own, with a thread for each slot."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from leasekit._driver.connection import Connection
from leasekit._worker.buffer import Buffer
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.handlers import Handler
from leasekit._worker.process import handler_import
from leasekit._worker.process.slot import Slot
from leasekit.errors import ConfigError

logger = logging.getLogger("leasekit")

_LOOK = 1.0  # seconds after which the death of an executor without a task is noticed


class ProcessExecutor:
    """Run handlers in `count` guarded processes. Leaving the `with` block waits for running handlers.

    `changed` is called when one more process is ready for tasks; `failed`, if none will ever be.

    Raises `ConfigError` if executors would not find one of the handlers.
    """

    def __init__(
        self,
        count: int,
        handlers: Mapping[str, Handler],
        connection: Connection,
        *,
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.buffer = Buffer()
        self._changed = changed
        self._failed = failed
        self._was_ready = False
        self._closed = False
        setup = handler_import.setup(handlers, connection)
        self._slots = [Slot(setup, connection.clock.now) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=[slot], name=f"leasekit-executor-{number}", daemon=True)
            for number, slot in enumerate(self._slots)
        ]

    @property
    def slots(self) -> int:
        """The number of slots whose processes live, with a running handler or without. Any thread."""
        return sum(slot.ready for slot in self._slots)

    def put(self, works: Sequence[ClaimedTask]) -> None:
        self.buffer.put(works)

    def end_all(self, now: float) -> None:
        """Stop running tasks: kill every executor in which a handler runs at `now`, and give the tasks back.

        Each task is released, with its latest progress, once its executor is known to be dead. This does not wait. Any
        thread may call it, but only to leave the block afterwards.
        """
        for slot in self._slots:
            slot.end(now)

    def __enter__(self) -> "ProcessExecutor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        for slot in self._slots:
            slot.close()
        self.buffer.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, slot: Slot) -> None:
        try:
            while not self._closed:
                if self._ensure_executor(slot) and (work := self.buffer.wait(_LOOK)) is not None and not slot.run(work):
                    self.buffer.put([work])
        except ConfigError as error:
            self._failed(error)
        except BaseException as error:
            logger.critical("the slot of an executor has ended: the worker stops", exc_info=error)
            self._failed(error)
        finally:
            slot.finish()

    def _ensure_executor(self, slot: Slot) -> bool:
        was_ready = slot.ready
        try:
            is_ready = slot.start()
        except ConfigError as error:
            if not self._was_ready:
                raise
            logger.error("no executor can be started any longer, it is tried again: %s", error)
            slot.pause()
            return False
        if is_ready and not was_ready:
            self._was_ready = True
            self._changed()
        return is_ready
