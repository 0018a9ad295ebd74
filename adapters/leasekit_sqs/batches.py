"""Many items in few calls: SQS takes ten items of one queue at once, and answers for each."""

import asyncio
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasekit.errors import BackendError, ProtocolError, Throttled, Unavailable
from leasekit_sqs.calls import Answer, Calls, mappings, of_entry
from leasekit_sqs.messages import MOST_BYTES
from leasekit_sqs.receipts import Receipt

_MOST = 10
_AT_ONCE = 20  # calls of one `in_batches` at the same time


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a batch call, without its id in the batch."""

    url: str  # of the queue
    entry: dict[str, Any]
    size: int = 0  # bytes that are sent
    receipt: Receipt | None = None
    leaves_by: float = math.inf  # later its call is not made: another receiver may have the message


Started = Callable[[Item, "asyncio.Future[Answer]"], None]


async def in_batches(
    calls: Calls,
    operation: str,
    items: Sequence[Item],
    *,
    started: Started | None = None,
    in_turn: bool = False,
    within: float | None = None,
) -> list[BackendError | None]:
    """Send items in batches; return None or the error for each item, in order. Raises nothing.

    `in_turn`: one batch after the other, and none after an error that is worth a repeat, which keeps their order.
    `within`: the seconds that several calls have together: one without an answer by then fails, and the others count.
    `started` is called, before the answer, with each item and its call, which outlives a cancelled coroutine; calls
    that have not started then are not made.
    """
    parts, at_once = list(_group(items)), asyncio.Semaphore(1 if in_turn else _AT_ONCE)
    until = None if within is None or len(parts) < 2 else asyncio.get_running_loop().time() + within
    stopped_by: BackendError | None = None

    async def send(part: Sequence[int]) -> Sequence[BackendError | None]:
        nonlocal stopped_by
        async with at_once:
            if stopped_by is not None:
                return [stopped_by] * len(part)
            errors = await _send_batch(calls, operation, [items[n] for n in part], started)
            if in_turn:
                stopped_by = next((error for error in errors if isinstance(error, (Throttled, Unavailable))), None)
            return errors

    async def send_in_time(part: Sequence[int]) -> Sequence[BackendError | None]:
        try:
            async with asyncio.timeout_at(until):
                return await send(part)
        except TimeoutError:
            return [Unavailable(f"no answer within {within:g} s")] * len(part)

    ended = await asyncio.gather(*map(send_in_time, parts))
    found: list[BackendError | None] = [None] * len(items)
    for part, errors in zip(parts, ended, strict=True):
        for position, error in zip(part, errors, strict=True):
            found[position] = error
    return found


def _group(items: Sequence[Item]) -> Iterable[list[int]]:
    """Group the positions of items into calls: of one queue, with ten items or 1 MiB at most, or one larger item."""
    open_parts: dict[str, tuple[list[int], int]] = {}
    for position, item in enumerate(items):
        part, size = open_parts.get(item.url, ([], 0))
        if len(part) == _MOST or (part and size + item.size > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(position)
        open_parts[item.url] = part, size + item.size
    yield from (part for part, _ in open_parts.values())


async def _send_batch(
    calls: Calls, operation: str, items: Sequence[Item], started: Started | None
) -> Sequence[BackendError | None]:
    # Ids that no other call has: an answer that a proxy delivers twice must not acknowledge this call.
    name = secrets.token_hex(8)
    ids = [f"{name}-{number}" for number in range(len(items))]
    entries = [{"Id": entry_id, **item.entry} for entry_id, item in zip(ids, items, strict=True)]
    leaves_by = min(item.leaves_by for item in items)
    call = calls.start(operation, leaves_by=leaves_by, QueueUrl=items[0].url, Entries=entries)
    if started is not None:
        for item in items:
            started(item, call)
    try:
        answer = await asyncio.shield(call)
    except BackendError as error:
        return [error] * len(items)
    done = {str(entry.get("Id")) for entry in mappings(answer, "Successful")}
    failed = {str(entry.get("Id")): entry for entry in mappings(answer, "Failed")}
    return [_error_of(entry_id, operation, done, failed) for entry_id in ids]


def _error_of(
    entry_id: str, operation: str, done: set[str], failed: Mapping[str, Mapping[str, Any]]
) -> BackendError | None:
    if entry_id in failed:
        return of_entry(failed[entry_id], operation)
    return None if entry_id in done else ProtocolError("SQS has answered without a verdict on this message")
