"""Scheduled tasks as messages: which fields SQS can carry, and which it cannot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec

from leasekit.errors import Refused
from leasekit.task import DEFAULTS, Name, NewTask, effective
from leasekit_aws.values import json_text
from leasekit_sqs.messages import ID, KIND, MOST_BYTES, RETRY, TRACE, attribute, plain_id, size_of

_LONGEST_DELAY = 900
_WINDOW = 300.0  # seconds for which a FIFO queue remembers a deduplication id
_READER = "the receiver decides how long a message is hidden: set ttl=… in the URL of the workers"
_NOT_HERE = {
    "priority": "SQS has no priorities: use a queue for each priority",
    "max_attempts": "the queue decides how often a message is received: maxReceiveCount in its RedrivePolicy",
    "max_crashes": "the queue decides how often a message is received: maxReceiveCount in its RedrivePolicy",
    "max_runtime": "SQS lets every message be held for 12 hours: limit the time in the handler itself",
    "expiry": "the queue counts how often a message is received, however its runs end",
    "start_deadline": "a message is received however late it is: the queue's MessageRetentionPeriod drops old ones",
    "enqueue_timeout": "a message waits in its queue for as long as the queue's MessageRetentionPeriod says",
    "claim_timeout": _READER,
    "heartbeat_timeout": _READER,
}


@dataclass(frozen=True, slots=True)
class Message:
    """An entry of a batch, and its size in bytes."""

    entry: dict[str, Any]
    size: int

    @property
    def digest(self) -> bytes:
        """Of the body, to tell messages apart."""
        return sha256(self.entry["MessageBody"].encode()).digest()


def refuse_what_cannot_be(tasks: Sequence[NewTask], *, is_fifo: bool, now: datetime) -> None:
    """Raise `Refused`, which names every item and field that SQS cannot carry; then nothing is sent."""
    errors = [
        {"item": item, "field": field, "detail": detail}
        for item, task in enumerate(tasks)
        for field, detail in _complaints(task, is_fifo=is_fifo, now=now)
    ]
    if errors:
        first = errors[0]
        raise Refused(f"task {first['item']}, {first['field']}: {first['detail']}", errors=errors)


def _complaints(task: NewTask, *, is_fifo: bool, now: datetime) -> list[tuple[str, str]]:
    """Return the fields of a task that SQS cannot carry, and why."""
    settings = effective(task)
    found = [(field, why) for field, why in _NOT_HERE.items() if getattr(settings, field) != getattr(DEFAULTS, field)]
    found += _wrong_names(task) + _of_no_queue(task)
    if task.dedupe_key is not None and not is_fifo:
        found.append(("dedupe_key", "a standard queue does not detect duplicates: use a FIFO queue"))
    elif (task.dedupe_key, settings.dedupe_window) != (None, None) and settings.dedupe_window != _WINDOW:
        found.append(("dedupe_window", f"a FIFO queue knows a key for {_WINDOW:.0f} s: set dedupe_window={_WINDOW:g}"))
    delay, field = _delay(task, now), "at" if task.delay is None else "delay"
    if delay and is_fifo:
        found.append((field, "a FIFO queue cannot delay a single message"))
    elif delay > _LONGEST_DELAY:
        found.append((field, f"SQS delays a message by {_LONGEST_DELAY} s at most: schedule it later"))
    return found


def _wrong_names(task: NewTask) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in ("kind", "id", "collection"):
        try:
            msgspec.convert(getattr(task, field), Name if field == "kind" else Name | None)
        except msgspec.ValidationError as error:
            found.append((field, str(error)))
    return found


def _of_no_queue(task: NewTask) -> list[tuple[str, str]]:
    """Return what the task asks for that no queue does, neither a standard one nor a FIFO queue."""
    found: list[tuple[str, str]] = []
    if task.after:
        found.append(("after", "SQS knows no dependencies: schedule this task when the task before it has ended"))
    if task.key is not None:
        found.append(("key", "SQS takes one of each MessageGroupId in turn: give the tenant as `collection`"))
    if task.collection is not None and " " in task.collection:
        found.append(("collection", "a collection becomes the MessageGroupId, which must not contain spaces"))
    if task.requires:
        found.append(
            ("requires", "a queue hands each message to any receiver: use a queue of their own for such tasks")
        )
    if task.prefers:
        found.append(("prefers", "a queue hands each message to any receiver: leave it out"))
    if task.tags:
        found.append(("tags", "a message in a queue cannot be found: put them into the payload"))
    if task.debounce is not None or task.dedupe_scope != "kept":
        name = "dedupe_scope" if task.debounce is None else "debounce"
        found.append((name, "a queue cannot change a message that waits: leave it out"))
    return found


def message(task: NewTask, task_id: str, *, item: int, is_fifo: bool, now: datetime) -> Message:
    """Return a task as a message. Raises `Refused` if it is too large, or cannot be encoded as JSON."""
    body = json_text(task.payload, "payload", at_most=MOST_BYTES, item=item, unit="bytes")
    # SQS takes the characters of XML, which lacks these two; in JSON they occur within strings only.
    body = body.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
    attributes = {ID: task_id, KIND: task.kind}
    if task.traceparent is not None:
        attributes[TRACE] = task.traceparent
    if (retry := effective(task).retry) != DEFAULTS.retry:
        attributes[RETRY] = msgspec.json.encode(retry).decode()
    entry: dict[str, Any] = {
        "MessageBody": body,
        "MessageAttributes": {name: attribute(text) for name, text in attributes.items()},
    }
    if is_fifo:
        # Without a collection no order was asked for: then each message is a group of its own.
        entry["MessageGroupId"] = task.collection or plain_id(task_id)
        entry["MessageDeduplicationId"] = plain_id(f"{task.kind}/{task.dedupe_key}" if task.dedupe_key else task_id)
    elif task.collection is not None:
        entry["MessageGroupId"] = task.collection  # on a standard queue, SQS keeps groups from starving each other
    if delay := _delay(task, now):
        entry["DelaySeconds"] = delay
    size = size_of(entry)
    if size > MOST_BYTES:
        detail = f"the message has {size:,} bytes with its attributes, SQS takes {MOST_BYTES:,}: send less"
        raise Refused(detail, errors=[{"item": item, "field": "payload", "detail": detail}])
    return Message(entry, size)


def _delay(task: NewTask, now: datetime) -> int:
    if task.at is None:
        return math.ceil(task.delay or 0)
    return max(0, math.ceil((task.at.astimezone(UTC) - now).total_seconds()))
