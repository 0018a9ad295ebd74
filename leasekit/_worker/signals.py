"""Signals: how the process of a worker ends: on request, or at once if the handler of a task does not end.

A process that ends at once tells its supervisor first, if it has one. Then the supervisor does not count the end of
its tasks as crashes, because a user wanted it.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from leasekit._worker.supervisor_link import attached

LOST_EXIT_CODE = 75  # EX_TEMPFAIL: a handler outlived its lease, so the process was ended
_LEFTOVERS = 10.0  # seconds after a signal for threads and tasks that handlers have left behind to end
_LOOK = 0.1  # seconds between two looks at whether a start-up takes too long
_LAST_LOGS = 1.0  # seconds for logs to be written before a process is ended
_HANG_UP = frozenset({number for number in signal.Signals if number.name == "SIGHUP"})  # Windows has none


class Signals:
    """SIGTERM and SIGINT while a worker runs: the first asks it to stop, a second one ends the process.

    SIGHUP (the terminal has gone) asks it to stop too, but never ends the process: it often comes together with one of
    these. If SIGHUP is ignored (nohup) or has a handler (to reload something), that stays in force.
    """

    def __init__(self, stop: Callable[[signal.Signals], None]) -> None:
        self._stop = stop
        self._count = 0
        self._last: signal.Signals | None = None
        self._heard_at = math.inf  # when the first signal came
        self._last_word: threading.Timer | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @contextmanager
    def hearing(self) -> Generator[bool]:
        """Handle signals in the block. Gives False if that is impossible, because this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield False
            return
        heard = {signal.SIGTERM, signal.SIGINT}
        heard |= {number for number in _HANG_UP if signal.getsignal(number) is signal.SIG_DFL}
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield True
        finally:
            if attached() is None:  # else a signal of the supervisor may still come: the process must end well
                for number in self._before:
                    self._restore(number)
                if self._last_word is not None:
                    self._last_word.cancel()

    def _restore(self, number: signal.Signals) -> None:
        handler = self._before[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Stop the worker, or end the process if this is the second SIGTERM or SIGINT. Called by the interpreter."""
        if os.getpid() != self._pid:
            # A child that a handler forked is not a worker, and must end when it is told to.
            self._restore(signal.Signals(number))
            os.kill(os.getpid(), number)
            return
        if self._last is None:
            self._heard_at = time.monotonic()
        self._last = signal.Signals(number)
        if number in _HANG_UP:
            self._stop(self._last)
            return
        self._count += 1
        # The supervisor passes on each of its signals. So one to the whole process group (Ctrl-C) comes twice, or once
        # if the kernel has merged the two: it counts once, in whatever order the processes have received it.
        passed_on = 0 if (ledger := attached()) is None else ledger.signals
        if max(passed_on, self._count - passed_on) > 1:
            self.end_at_once()
        self._stop(self._last)

    def end_soon(self, *, timeout: float) -> None:
        """Have the process ended `timeout` seconds after the signal, or a few seconds from now. Does not wait.

        Python would wait, perhaps for ever, for threads that handlers have left behind: a thread, for example, that a
        cancelled handler waited for.
        """
        if self._last is not None:
            left = self._heard_at + timeout - time.monotonic()
            self._last_word = threading.Timer(min(_LEFTOVERS, max(_LAST_LOGS, left)), self.end_at_once)
            self._last_word.daemon = True
            self._last_word.start()

    @contextmanager
    def bounding(self, timeout: float) -> Generator[None]:
        """Have the process ended if this block goes on `timeout` seconds after a signal."""
        left = threading.Event()

        def watch() -> None:
            while not left.wait(_LOOK):
                if time.monotonic() > self._heard_at + timeout:
                    self.end_at_once()

        threading.Thread(target=watch, name="leasekit-start-up", daemon=True).start()
        try:
            yield
        finally:
            left.set()

    def end_at_once(self) -> NoReturn:
        """End the process, whatever code runs in it. Any thread."""
        _write_logs()
        if (ledger := attached()) is not None:
            ledger.mark_released()
        os._exit(128 + (self._last or signal.SIGTERM))


def end_lost() -> NoReturn:
    """End the process as a last resort: code that outlives its lease could run twice. Its stack is in the log."""
    os._exit(LOST_EXIT_CODE)


def _write_logs() -> None:
    """Flush and close logs, but not for long: a thread that holds a lock of a log may never release it."""

    def flush() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    writer = threading.Thread(target=flush, daemon=True)
    writer.start()
    writer.join(_LAST_LOGS)
