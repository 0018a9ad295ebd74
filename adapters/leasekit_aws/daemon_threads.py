"""Blocking calls in threads of their own.

The threads are daemons: a poll may take a minute, and the end of the process must not wait for a poll (it would join
the threads of a `ThreadPoolExecutor`). The callers bound the number of threads.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

T = TypeVar("T")


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
