"""Blocking calls in threads of their own.

Daemon threads: a poll may take a minute, and no process is to wait for one at its end (an executor's threads would be
joined there). Whoever makes calls bounds how many there are.
"""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


def in_thread(call: Callable[[], T], *, missed: Callable[[T], object] | None = None) -> "Future[T]":
    """What `call` returns or raises, as a future.

    It is given up by cancelling the future. The call itself goes on: what it returns after all is given to `missed`, in
    its thread. Either the future has the result or `missed` gets it, never both and never neither.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it goes to whoever waits
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
