"""Log: a thread that must not be held up has another thread write what it logs, because a log may hold up its writers.

A pipe that nobody reads is full one day, a terminal is stopped (Ctrl-S), a handler is slow or raises, a program that
configures its logs keeps `logging` locked while it opens them, and an exception out of a signal handler may leave a
lock held for ever. Nothing of that may delay a heartbeat: not in the driver's thread, nor in a server's loop, the
writer of its store and the threads that read it.

Rule 1: in such a thread no code of `logging` runs that takes a lock or that a program can replace. So the loggers below
have an `isEnabledFor` and a `_log` of their own, which hand the call to the log thread before a record is made, and
they are found without a lock.
Rule 2: such a thread waits for the log at most 2 % of the time, so that what is logged just before a process ends
itself is written, and what is logged before an answer is seen with it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread, get_ident  # by name: gevent may replace them later
from typing import Any

_PATIENCE = 0.2  # seconds that a thread may wait at a time
_SHARE = 0.02  # of the time may be spent waiting
_MOST = 1000  # calls that wait for the log thread; more are dropped

_Call = tuple[Lock, Callable[..., object], tuple[Any, ...], dict[str, Any]]
_of_thread: dict[int, "LogThread"] = {}


class LogThread:
    """Writes what another thread logs. That thread opens and closes it by `with`, and calls its methods."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="leasekit-log", daemon=True)
        self._spare = _PATIENCE  # seconds that may be waited now
        self._counted_at = time.monotonic()

    def __enter__(self) -> "LogThread":
        self._thread.start()
        _of_thread[get_ident()] = self
        return self

    def __exit__(self, *error: object) -> None:
        del _of_thread[get_ident()]
        self._calls.put(None)
        self._thread.join(_PATIENCE)  # it ends now, unless the log is stuck

    def call(self, write: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Have `write(*args, **kwargs)` called; wait for its end for as long as Rule 2 allows."""
        if self._calls.qsize() >= _MOST:
            return
        written = Lock()
        written.acquire()
        self._calls.put((written, write, args, kwargs))
        began_at = time.monotonic()
        self._spare = min(_PATIENCE, self._spare + _SHARE * (began_at - self._counted_at))
        if self._spare > 0:
            written.acquire(timeout=self._spare)
        self._counted_at = time.monotonic()
        self._spare -= self._counted_at - began_at

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            written, write, args, kwargs = call
            with suppress(BaseException):  # of a handler or filter of the user's, sys.exit() among them
                write(*args, **kwargs)
            written.release()


def write(call: Callable[..., object], *args: Any) -> None:
    """Call `call(*args)`, which writes to a stream: by the log thread of this thread, if it has one."""
    log = _of_thread.get(get_ident())
    if log is None:
        call(*args)
    else:
        log.call(call, *args)


def _is_enabled_for(logger: logging.Logger, level: int) -> bool:
    if get_ident() not in _of_thread:
        return logging.Logger.isEnabledFor(logger, level)
    return not logger.disabled and logger.manager.disable < level >= logger.getEffectiveLevel()


def _log(logger: logging.Logger, level: int, msg: object, args: Any, exc_info: Any = None, **kwargs: Any) -> None:
    make_record = partial(logging.Logger._log, logger)
    log = _of_thread.get(get_ident())
    if log is None:
        make_record(level, msg, args, exc_info, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
        return
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    elif exc_info and not isinstance(exc_info, tuple):
        exc_info = sys.exc_info()
    log.call(make_record, level, msg, args, exc_info, **kwargs)


def _get_logger(manager: logging.Manager, name: str) -> logging.Logger:
    logger = manager.loggerDict.get(name) if get_ident() in _of_thread else None
    return logger if isinstance(logger, logging.Logger) else logging.Manager.getLogger(manager, name)


# All that log in such threads: clients log every request; servers every connection, message and statement, if asked to.
_NAMES = (
    *(
        "leasekit",
        "leasekit.server",
        "leasekit.server.requests",
        "leasekit.server.writes",
        "asyncio",
        "httpx",
        "httpcore.connection",
        "httpcore.http11",
    ),
    *("uvicorn.error", "uvicorn.access", "uvicorn.asgi", "alembic.runtime.migration"),
    *("sqlalchemy.engine.Engine", "sqlalchemy.pool.impl.NullPool", "sqlalchemy.pool.impl.QueuePool"),
)
for _name in _NAMES:
    _logger = logging.getLogger(_name)
    for _method, _function in (("isEnabledFor", _is_enabled_for), ("_log", _log)):
        setattr(_logger, _method, partial(_function, _logger))
setattr(logging.Logger.manager, "getLogger", partial(_get_logger, logging.Logger.manager))  # noqa: B010 - for mypy

os.register_at_fork(after_in_child=_of_thread.clear)  # the numbers of threads come again
