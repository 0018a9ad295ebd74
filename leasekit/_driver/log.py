"""Log: what the driver's thread logs is written by a thread of its own, because a log may hold up whoever writes to it.

A pipe that nobody reads is full one day, a terminal is stopped (Ctrl-S), and an exception out of a signal handler may
leave the lock of a log held for ever. Nothing of that may delay a heartbeat.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread, get_ident  # by name: gevent may replace them later
from typing import Any

__all__ = ["LogThread", "write"]

_PATIENCE = 0.2  # seconds: what is logged just before the process ends itself should be written
_MOST = 1000  # records that wait; more are dropped

_Call = tuple[Lock, Callable[..., object], tuple[Any, ...]]
_of_thread: dict[int, "LogThread"] = {}


class LogThread:
    """Writes what another thread logs. For that thread, and in a `with` block of it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._stuck = False

    def __enter__(self) -> "LogThread":
        Thread(target=self._run, name="leasekit-log", daemon=True).start()
        _of_thread[get_ident()] = self
        return self

    def __exit__(self, *error: object) -> None:
        del _of_thread[get_ident()]
        self._calls.put(None)

    def call(self, write: Callable[..., object], *args: Any) -> None:
        """Have `write(*args)` called; wait for that, but not long, and not at all while an earlier call is stuck."""
        if self._calls.qsize() >= _MOST:
            return
        written = Lock()
        written.acquire()
        self._calls.put((written, write, args))
        if not self._stuck:
            self._stuck = not written.acquire(timeout=_PATIENCE)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            written, write, args = call
            with suppress(Exception):  # of a handler or filter of the user's
                write(*args)
            self._stuck = False
            written.release()


class _Relay(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Return False in a thread that must not wait, after the record was handed to that thread's log thread."""
        log = _of_thread.get(get_ident())
        if log is None:
            return True
        log.call(_handle, record)
        return False


def _handle(record: logging.LogRecord) -> None:
    logging.getLogger(record.name).handle(record)


_relay = _Relay()


def write(call: Callable[..., object], *args: Any) -> None:
    """Call `call(*args)`, which writes to a stream: in the driver's thread, by its log thread."""
    log = _of_thread.get(get_ident())
    if log is None:
        call(*args)
    else:
        log.call(call, *args)


# All that log in the driver's thread; httpx logs every request.
for _name in ("leasekit", "leasekit.server", "asyncio", "httpx", "httpcore.connection", "httpcore.http11"):
    logging.getLogger(_name).addFilter(_relay)
