"""Blocking calls in threads of their own.

The threads are daemons: a poll may take a minute, and the end of the process must not wait for a poll (it would join
the threads of a `ThreadPoolExecutor`). The callers of `in_thread` bound the number of threads, or use `CallThreads`.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from leasekit_aws.errors import Unreached

T = TypeVar("T")

MOST_CALLS = 200
"""The threads of one connection for calls, at most."""


class CallThreads:
    """The threads of one connection for calls, bounded with those of calls that were given up.

    An answer that comes byte by byte has its thread for as long as bytes come: no timeout of botocore ends that.
    """

    def __init__(self) -> None:
        self._free = threading.Semaphore(MOST_CALLS)

    def start(self, call: Callable[[], T], *, missed: Callable[[T], object] | None = None) -> "Future[T]":
        """Do what `in_thread` does; the future raises `Unreached` at once if no thread is free."""
        if not self._free.acquire(blocking=False):
            refused: Future[T] = Future()
            what = f"{MOST_CALLS} calls of this connection have no end yet, so no other begins"
            refused.set_exception(Unreached(f"{what}: does the service, or a proxy, answer byte by byte?"))
            return refused

        def run() -> T:
            try:
                return call()
            finally:
                self._free.release()

        return in_thread(run, missed=missed)


def in_thread(call: Callable[[], T], *, missed: Callable[[T], object] | None = None) -> "Future[T]":
    """Run `call` in a thread; return a future for its result or error.

    Cancelling the future gives up the result, but the call goes on: its result is then passed to `missed`, in the
    thread of the call. Either the future or `missed` gets the result, never both and never neither.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the future carries any error
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(result)
        except InvalidStateError:
            if missed is not None:
                missed(result)

    threading.Thread(target=run, name="leasekit-aws", daemon=True).start()
    return future
