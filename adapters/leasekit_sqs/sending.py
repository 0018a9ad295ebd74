"""Tasks that are scheduled, as messages: what SQS can do, and what it cannot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from leasekit.errors import Refused
from leasekit.task import Exponential, Name, NewTask
from leasekit_aws.values import json_text
from leasekit_sqs.messages import ID, KIND, MOST_BYTES, RETRY, TRACE, attribute, plain_id, size_of

__all__ = ["Message", "message", "refuse_what_cannot_be"]

_LONGEST_DELAY = 900
_WINDOW = 300.0  # for which a FIFO queue knows a deduplication id
_READER = "who receives decides how long a message is hidden: say ttl=… in the URL"
_NOT_HERE = {
    "priority": "SQS has no priorities: use a queue for each",
    "max_attempts": "the queue decides how often a message is received: maxReceiveCount in its RedrivePolicy",
    "max_crashes": "the queue decides how often a message is received: maxReceiveCount in its RedrivePolicy",
    "max_runtime": "SQS lets every message be held for 12 hours: end the body itself",
    "enqueue_timeout": "a message waits in its queue for as long as the queue's MessageRetentionPeriod says",
    "claim_timeout": _READER,
    "heartbeat_timeout": _READER,
}
_DEFAULTS = {field.encode_name: field.default for field in msgspec.structs.fields(NewTask)}


@dataclass(frozen=True, slots=True)
class Message:
    """An entry of a batch, and how much of it is sent."""

    entry: dict[str, Any]
    size: int


def refuse_what_cannot_be(tasks: Sequence[NewTask], *, is_fifo: bool, now: datetime) -> None:
    """Raises `Refused` that names every item and field that SQS cannot do: then nothing is sent."""
    errors = [
        {"item": item, "field": field, "detail": detail}
        for item, task in enumerate(tasks)
        for field, detail in _complaints(task, is_fifo=is_fifo, now=now)
    ]
    if errors:
        first = errors[0]
        raise Refused(f"task {first['item']}, {first['field']}: {first['detail']}", errors=errors)


def _complaints(task: NewTask, *, is_fifo: bool, now: datetime) -> list[tuple[str, str]]:
    found = [(field, why) for field, why in _NOT_HERE.items() if getattr(task, field) != _DEFAULTS[field]]
    for field in ("kind", "id", "collection"):
        try:
            msgspec.convert(getattr(task, field), Name if field == "kind" else Name | None)
        except msgspec.ValidationError as error:
            found.append((field, str(error)))
    if task.after:
        found.append(("after", "SQS knows no dependencies: have the task before schedule this one"))
    if task.collection is not None and " " in task.collection:
        found.append(("collection", "it becomes the MessageGroupId, which has no spaces"))
    if task.dedupe_key is not None and not is_fifo:
        found.append(("dedupe_key", "a standard queue knows no duplicates: use a FIFO queue"))
    elif (task.dedupe_key is not None or task.dedupe_window is not None) and task.dedupe_window != _WINDOW:
        found.append(("dedupe_window", f"a FIFO queue knows a key for {_WINDOW:.0f} s: say dedupe_window={_WINDOW:g}"))
    delay = _delay(task, now)
    if delay and is_fifo:
        found.append(("at", "a FIFO queue delays no single message"))
    elif delay > _LONGEST_DELAY:
        found.append(("at", f"SQS delays a message by {_LONGEST_DELAY} s at most: schedule it later"))
    return found


def message(task: NewTask, task_id: str, *, item: int, is_fifo: bool, now: datetime) -> Message:
    """The message that this task becomes. Raises `Refused` where it is too big, or no JSON."""
    body = json_text(task.payload, "payload", at_most=MOST_BYTES, item=item, unit="bytes")
    # In XML's set of characters, which SQS has, these two are missing; in JSON they are within strings only.
    body = body.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
    attributes = {ID: task_id, KIND: task.kind}
    if task.traceparent is not None:
        attributes[TRACE] = task.traceparent
    if task.retry != Exponential():
        attributes[RETRY] = msgspec.json.encode(task.retry).decode()
    entry: dict[str, Any] = {
        "MessageBody": body,
        "MessageAttributes": {name: attribute(text) for name, text in attributes.items()},
    }
    if is_fifo:
        # Nobody asked for an order where there is no collection: then each is a group of its own.
        entry["MessageGroupId"] = task.collection or plain_id(task_id)
        entry["MessageDeduplicationId"] = plain_id(f"{task.kind}/{task.dedupe_key}" if task.dedupe_key else task_id)
    elif task.collection is not None:
        entry["MessageGroupId"] = task.collection  # on a standard queue: none of them is starved by another
    if delay := _delay(task, now):
        entry["DelaySeconds"] = delay
    size = size_of(entry)
    if size > MOST_BYTES:
        detail = f"with its attributes it has {size:,} bytes, SQS takes {MOST_BYTES:,}"
        raise Refused(detail, errors=[{"item": item, "field": "payload", "detail": detail}])
    return Message(entry, size)


def _delay(task: NewTask, now: datetime) -> int:
    return 0 if task.at is None else max(0, math.ceil((task.at.astimezone(UTC) - now).total_seconds()))
