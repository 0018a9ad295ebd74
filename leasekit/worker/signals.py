"""How the process of a worker ends: asked to by signals, or at once because a body does not end.

Whoever ends at once says so to its supervisor first, if it has one: bodies that end with the process because somebody
wanted that are no crashes.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from leasekit.worker.supervisor_link import attached

__all__ = ["LOST_EXIT_CODE", "Signals", "end_lost"]

LOST_EXIT_CODE = 75  # EX_TEMPFAIL: a body outlived its lease, so the process was ended
_LEFTOVERS = 10.0  # seconds for what bodies have left behind to end, after a signal
_LAST_LOGS = 1.0  # seconds for logs to be written before a process is ended
_HANG_UP = frozenset({number for number in signal.Signals if number.name == "SIGHUP"})  # Windows has none


class Signals:
    """SIGTERM and SIGINT while a worker runs: the first asks it to stop, a second one ends the process.

    So does SIGHUP, whose terminal has gone, but for the end of the process: it often comes together with one of these.
    Whoever ignores it (nohup) or has a handler for it (to load something anew) is left with that.
    """

    def __init__(self, stop: Callable[[signal.Signals], None]) -> None:
        self._stop = stop
        self._count = 0
        self._last: signal.Signals | None = None
        self._last_word: threading.Timer | None = None
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @contextmanager
    def hearing(self) -> Generator[bool]:
        """False where none can be heard, because this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield False
            return
        heard = {signal.SIGTERM, signal.SIGINT} | {number for number in _HANG_UP if _is_default(number)}
        self._before = {number: signal.signal(number, self._heard) for number in heard}
        try:
            yield True
        finally:
            if attached() is None:  # else one may still be on its way from the supervisor: the process ends well
                for number in self._before:
                    self._unhear(number)
                if self._last_word is not None:
                    self._last_word.cancel()

    def _unhear(self, number: signal.Signals) -> None:
        handler = self._before[number]
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child that a handler forked: it is no worker, and has to end when it is told to.
            self._unhear(signal.Signals(number))
            os.kill(os.getpid(), number)
            return
        self._last = signal.Signals(number)
        if number in _HANG_UP:
            self._stop(self._last)
            return
        self._count += 1
        # One that went to a whole group may come twice, then from the supervisor: it is one all the same.
        passed_on = 0 if (ledger := attached()) is None else ledger.signalled(self._count)
        if max(passed_on, self._count - passed_on) > 1:
            self.end_at_once()
        self._stop(self._last)

    def end_soon(self) -> None:
        """All is reported, and a signal wants the process to end: what bodies have left behind does not hold it up.

        A thread that one of them still waited for when it was cancelled, say: Python waits for those, maybe for ever.
        """
        if self._last is not None:
            self._last_word = threading.Timer(_LEFTOVERS, self.end_at_once)
            self._last_word.daemon = True
            self._last_word.start()

    def end_at_once(self) -> NoReturn:
        """End the process, whatever runs in it. From any thread."""
        _write_logs()
        if (ledger := attached()) is not None:
            ledger.forgive()
        os._exit(128 + (self._last or signal.SIGTERM))


def _is_default(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL


def end_lost() -> NoReturn:
    """The last resort: what runs on after its lease could run twice. All stacks are in stderr by now."""
    os._exit(LOST_EXIT_CODE)


def _write_logs() -> None:
    """Whoever holds a lock of a log may never let go of it: do not wait for long."""

    def flush() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    writer = threading.Thread(target=flush, daemon=True)
    writer.start()
    writer.join(_LAST_LOGS)
