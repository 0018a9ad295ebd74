"""One call of a backend, and calls that are repeated until they are answered: claim, settle, schedule.

Never a beat: the cycle is its retry.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from leasekit.errors import BackendError, Throttled, Unavailable

__all__ = ["call_once", "call_until"]

T = TypeVar("T")
_LONGEST_WAIT = 5.0
_jittered = tenacity.wait_random_exponential(multiplier=0.2, max=_LONGEST_WAIT)


async def call_once(call: Callable[[], Awaitable[T]], *, within: float) -> T:
    """What a call of a backend returns within so many seconds; whatever escapes from it becomes a `BackendError`."""
    try:
        async with asyncio.timeout(within):
            return await call()
    except BackendError:
        raise
    except TimeoutError as error:
        raise Unavailable(f"no answer within {within:g} s") from error
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # it is we who are cancelled, not something inside of the adapter
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after if isinstance(error, Throttled) else None
    return max(_jittered(state), min(asked or 0.0, _LONGEST_WAIT))


async def call_until(
    call: Callable[[], Awaitable[T]], *, for_at_most: float, failing: Callable[[BaseException], None] | None = None
) -> T:
    """What `call` returns, as soon as the service is there, within `for_at_most` seconds; then its last error.

    Only what may be repeated is to be called so. *Refused* is not tried again. `failing` hears of each failure that is.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if failing is not None and error is not None:
            failing(error)

    time = asyncio.get_running_loop().time
    until = time() + for_at_most
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type((Unavailable, Throttled)),
        wait=_wait,
        stop=lambda _: time() >= until,
        before_sleep=before_sleep,
        sleep=asyncio.sleep,
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError  # `reraise` has raised
