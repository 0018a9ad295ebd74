"""Calls that are repeated until they are answered: claim, settle, schedule. Never a beat: the cycle is its retry."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from leasekit.errors import Throttled, Unavailable

__all__ = ["persistently"]

T = TypeVar("T")
_LONGEST_WAIT = 5.0
_jittered = tenacity.wait_random_exponential(multiplier=0.2, max=_LONGEST_WAIT)


def _wait(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after if isinstance(error, Throttled) else None
    return max(_jittered(state), min(asked or 0.0, _LONGEST_WAIT))


async def persistently(call: Callable[[], Awaitable[T]], *, for_at_most: float) -> T:
    """What `call` returns, as soon as the service is there, within `for_at_most` seconds; then its last error.

    Only what may be repeated is to be called so. *Refused* is not tried again.
    """
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type((Unavailable, Throttled, OSError)),
        wait=_wait,
        stop=tenacity.stop_after_delay(for_at_most),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await call()
    raise AssertionError  # `reraise` has raised
