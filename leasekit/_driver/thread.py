"""One daemon thread for each process, with an event loop of its own: nothing on the user's side can hold it up.

It is started by the first client that needs it and stopped by the last one that is closed. A forked child begins
with none: threads do not survive a fork, and neither does the right to a lease.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["NAME", "Driver", "acquire"]

T = TypeVar("T")
NAME = "leasekit-driver"


class Driver:
    """The thread and its loop. `acquire` gives it, `release` lets go of it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self.loop = asyncio.new_event_loop()
        # A daemon: it must not keep alive a process whose main thread has ended (PITFALLS 40).
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            leftover = asyncio.all_tasks(self.loop)
            for task in leftover:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    @property
    def here(self) -> bool:
        """True on the driver's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the driver's loop; the future is for any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call it in the driver's loop. After the loop has ended that is a no-op: nobody is kept there any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, *args)

    def release(self) -> None:
        """One user less; the last one ends the thread."""
        global _driver  # noqa: PLW0603 - one for each process
        with _lock:
            self.users -= 1
            if self.users or self.pid != os.getpid():
                return
            if _driver is self:
                _driver = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.here:
            self._thread.join()


_lock = threading.Lock()
_driver: Driver | None = None


def acquire() -> Driver:
    """This process's driver, started if need be. Each call wants one `release`."""
    global _driver  # noqa: PLW0603 - one for each process
    with _lock:
        if _driver is None:
            _driver = Driver()
        _driver.users += 1
        return _driver


def _forget() -> None:
    """In a forked child: the parent's thread is not here, and its lock may have been held by a thread that is not."""
    global _driver, _lock  # noqa: PLW0603 - one for each process
    _lock = threading.Lock()
    _driver = None


os.register_at_fork(after_in_child=_forget)
