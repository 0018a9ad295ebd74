"""Answer: a value or an error that the driver's thread delivers to another thread.

Rule 1: no method that the driver's thread calls waits for a lock. A user's thread may be interrupted at any bytecode
(by an exception out of a signal handler) and then leaves its locks held: the lock of a `concurrent.futures.Future`,
for example, whose `set_result` then blocks for ever.
Rule 2: every write that two threads make is one call into C, which no signal handler interrupts.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """A value or an error that arrives once. The names of its methods are those of `concurrent.futures.Future`."""

    __slots__ = ("_callbacks", "_outcomes", "on_cancel")

    def __init__(self) -> None:
        self._outcomes: list[tuple[T | None, BaseException | None]] = []  # the first outcome counts
        self._callbacks: list[Callable[[Answer[T]], object]] = []
        self.on_cancel: Callable[[], object] | None = None  # ends the work that produces the answer

    def done(self) -> bool:
        return bool(self._outcomes)

    def cancelled(self) -> bool:
        return self.done() and isinstance(self._outcomes[0][1], CancelledError)

    def set_result(self, value: T) -> None:
        self._deliver(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._deliver(None, error)

    def cancel(self) -> None:
        """Make `result` raise CancelledError, and end the work, unless something was delivered before."""
        self._deliver(None, CancelledError())
        if self.cancelled() and self.on_cancel is not None:
            self.on_cancel()

    def _deliver(self, value: T | None, error: BaseException | None) -> None:
        self._outcomes.append((value, error))
        while self._callbacks:
            with contextlib.suppress(IndexError):  # `add_done_callback` took the last callback itself
                self._callbacks.pop()(self)

    def add_done_callback(self, call: "Callable[[Answer[T]], object]") -> None:
        """Call `call(answer)` once, after delivery: in the thread that delivers, or at once if delivered already."""
        self._callbacks.append(call)
        if self.done():
            with contextlib.suppress(ValueError):  # the thread that delivers has called, or is about to
                self._callbacks.remove(call)
                call(self)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value. Raises the error, CancelledError, or TimeoutError."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return self._outcomes[0][0]  # type: ignore[return-value]  # there is a value where there is no error
        finally:
            error = None  # or its traceback would hold this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome and return its error, or None if it is a value. Raises TimeoutError."""
        if not self.done():
            # Each call has a lock of its own, which the delivering thread releases once and never waits for.
            gate = threading.Lock()
            gate.acquire()
            self.add_done_callback(lambda _: gate.release())
            if not gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError
        return self._outcomes[0][1]
