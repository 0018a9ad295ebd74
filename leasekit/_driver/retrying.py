"""Call a backend once, or with a batch, or repeat a call until it is answered (claim, settle, schedule).

Heartbeats are never repeated here: the cycle retries them.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from leasekit.errors import BackendError, Refused, Throttled, Unavailable
from leasekit.task import Beat, Settlement, Verdict

T = TypeVar("T")
Item = TypeVar("Item", Beat, Settlement)
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0  # seconds between two calls, at most
_RETRY_FOR = 30.0  # seconds for which calls of users are repeated while the service is away
_ANSWER = 5.0  # seconds that a service has for its answer where the caller waits for a shorter time


async def call_once(call: Callable[[], Awaitable[T]], *, within: float) -> T:
    """Return the result of a backend's call within `within` seconds; any error becomes a `BackendError`."""
    try:
        async with asyncio.timeout(within):
            return await call()
    except (BackendError, GeneratorExit):  # the latter: nobody waits for this call any more, and its loop may be gone
        raise
    except TimeoutError as error:
        raise Unavailable(f"no answer within {within:g} s") from error
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # this task is cancelled, not a task inside of the adapter
        raise Unavailable(f"{type(error).__name__}: {error}") from error


async def call_by_task(
    call: Callable[[Sequence[Item]], Awaitable[list[Verdict]]], items: Sequence[Item], *, unique_ids: bool = True
) -> list[Verdict]:
    """Return the verdicts on items of one batch; two leases of one task go in two calls.

    A verdict names its task alone: in an answer whose order a service or proxy has changed, the verdict on a lost lease
    could be taken for that on its successor, if both are held in this process. Where a service may hold many tasks of
    one id (not `unique_ids`), its adapter knows them by their tokens, and a call for each would outlast the leases.
    """
    if not unique_ids or len({item.id for item in items}) == len(items):  # nearly always
        return await call(items)
    rounds: dict[int, list[int]] = {}
    seen = Counter[str]()
    for position, item in enumerate(items):
        rounds.setdefault(seen[item.id], []).append(position)
        seen[item.id] += 1
    verdicts: dict[int, Verdict] = {}
    for positions in rounds.values():
        try:
            answer = await call([items[position] for position in positions])
        except Refused as refused:
            errors: list[dict[str, Any]] = [
                {**error, "item": positions[error["item"]]} for error in refused.errors if "item" in error
            ]
            raise Refused(str(refused), errors=errors) from refused
        verdicts.update(zip(positions, answer, strict=True))
    return [verdicts[position] for position in range(len(items))]


async def call_until(
    call: Callable[[], Awaitable[T]], *, for_at_most: float, failing: Callable[[BaseException], None] | None = None
) -> T:
    """Repeat `call` until the service answers, for at most `for_at_most` seconds; then raise the last error.

    Use this only for calls that may be repeated. `Refused` is not retried. `failing` gets each retried error.
    """
    time = asyncio.get_running_loop().time
    until, longest = time() + for_at_most, _FIRST_WAIT
    while True:
        try:
            return await call()
        except (Unavailable, Throttled) as error:
            if (left := until - time()) <= 0:
                raise
            if failing is not None:
                failing(error)
            asked = error.retry_after if isinstance(error, Throttled) else None
        await asyncio.sleep(min(max(_jittered(longest), min(asked or 0.0, _LONGEST_WAIT)), left))
        longest = min(2 * longest, _LONGEST_WAIT)


def _jittered(longest: float) -> float:
    return random.uniform(0, longest)  # noqa: S311 - to spread fleets


async def repeat_until_answered(
    call: Callable[[], Coroutine[Any, Any, T]], retry_for: float | None, at_most: float | None = None
) -> T:
    """Repeat a call of a user for `retry_for` seconds (None: 30), and for no more than `at_most`."""
    for_at_most, within = patience(retry_for, at_most)
    return await call_until(lambda: call_once(call, within=within), for_at_most=for_at_most)


def patience(retry_for: float | None, at_most: float | None = None) -> tuple[float, float]:
    """Return for how many seconds a call of a user is repeated, and within how many each try must be answered."""
    for_at_most = _RETRY_FOR if retry_for is None else retry_for
    if at_most is not None:
        for_at_most = min(for_at_most, at_most)
    elif not for_at_most:
        return 0, _RETRY_FOR  # a caller who wants one try leaves its time to the adapter
    return for_at_most, max(_ANSWER, min(for_at_most, _RETRY_FOR))
