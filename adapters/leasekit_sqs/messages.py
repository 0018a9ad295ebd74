"""Tasks as messages, and messages as tasks. No input or output.

A message that leasekit sends has the payload as JSON in its body, and the other fields as attributes: `leasekit.id`,
`leasekit.kind`, `leasekit.retry` unless that is the default, `traceparent`. A message of another sender need not have
any of these attributes: its id is that of SQS, its kind that of the queue or of an attribute of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import msgspec

from leasekit.task import Name, RetryPolicy, Task
from leasekit.wire import decode_value
from leasekit_aws.values import payload, text_of
from leasekit_sqs.receipts import Receipt

MOST_BYTES = 1024 * 1024  # of one message, and of all messages in one call
ID, KIND, RETRY, TRACE = "leasekit.id", "leasekit.kind", "leasekit.retry", "traceparent"
_ERROR = "leasekit.error"
_AWS_TRACE = "AWSTraceHeader"
_LONGEST_HANDLE = 8192
_MOST_ATTRIBUTES = 10
_LONGEST_ERROR = 1000


@dataclass(frozen=True, slots=True)
class Received:
    """A message as boto3 returns it, validated."""

    message: Mapping[str, Any]
    id: str
    handle: str
    kind: str | None  # the kind that the message names
    attempt: int | None  # None: the receive did not ask for the count
    group: str | None
    retry: RetryPolicy | None  # the policy that the message names
    is_scheduled: bool  # leasekit has sent it

    @classmethod
    def of(cls, message: Mapping[str, Any], kind_attribute: str | None = None) -> "Received":
        """Validate a message, whose kind `kind_attribute` may name. Raises `ProtocolError` if it is malformed."""
        ours, theirs = _attribute(message, KIND), _attribute(message, kind_attribute) if kind_attribute else None
        own_id = _attribute(message, ID)
        about = _mapping(message.get("Attributes"))
        return cls(
            message=message,
            id=own_id if own_id is not None and _is_name(own_id) else text_of(message, "MessageId", at_most=128),
            handle=text_of(message, "ReceiptHandle", at_most=_LONGEST_HANDLE),
            kind=next((name for name in (ours, theirs) if _is_name(name)), None),
            attempt=_count(about.get("ApproximateReceiveCount")),
            group=group if isinstance(group := about.get("MessageGroupId"), str) else None,
            retry=_policy(_attribute(message, RETRY)),
            # A copy of another sender's message in a dead-letter queue has an id, but no kind.
            is_scheduled=own_id is not None and ours is not None,
        )

    def task(self, *, kind: str, ttl: float) -> Task:
        """Return the message as a task. Raises `ProtocolError` for a body that is too large, or not a string."""
        trace = _attribute(self.message, TRACE)
        return Task(
            id=self.id,
            kind=kind,
            token=self.handle,
            ttl=float(ttl),
            attempt=self.attempt or 0,
            payload=payload(self.message.get("Body")),
            collection=self.group if self.group != plain_id(self.id) and _is_name(self.group) else None,
            traceparent=trace if trace is not None and len(trace) <= 128 else None,
        )

    def receipt(self, url: str, retry: RetryPolicy) -> Receipt:
        return Receipt(
            id=self.id,
            handle=self.handle,
            url=url,
            message=self.message,
            attempt=self.attempt or 1,
            group=self.group,
            retry=retry,
        )


def plain_id(text: str) -> str:
    """Return an id that SQS accepts: `text`, or its digest if `text` is too long or has other than visible ASCII."""
    is_plain = len(text) <= 128 and " " not in text and text.isascii() and text.isprintable()
    return text if is_plain else sha256(text.encode()).hexdigest()


def attribute(text: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": text}


def size_of(entry: Mapping[str, Any]) -> int:
    """Return the size of a message as SQS counts it: its body, and names, types and values of its attributes."""
    size = len(str(entry["MessageBody"]).encode())
    for name, value in _mapping(entry.get("MessageAttributes")).items():
        held = value.get("BinaryValue", value.get("StringValue", ""))
        size += (
            len(name)
            + len(str(value.get("DataType", "")))
            + len(held if isinstance(held, bytes) else str(held).encode())
        )
    return size


def sent_on(message: Mapping[str, Any], task_id: str, error: Any) -> dict[str, Any]:
    """Return body and attributes of a message for the dead-letter queue, with its id, and its error if that fits."""
    kept = {
        name: {key: value for key, value in _mapping(held).items() if key in ("DataType", "StringValue", "BinaryValue")}
        for name, held in _mapping(message.get("MessageAttributes")).items()
        if name != _ERROR  # of an earlier failure, after which the message was redriven
    }
    entry: dict[str, Any] = {"MessageBody": message.get("Body"), "MessageAttributes": kept}
    if isinstance(trace := _mapping(message.get("Attributes")).get(_AWS_TRACE), str):
        entry["MessageSystemAttributes"] = {_AWS_TRACE: attribute(trace)}  # SQS takes no other, and does not count it
    for name, text in {ID: task_id, _ERROR: _short(error)}.items():
        is_room = len(kept) < _MOST_ATTRIBUTES and size_of(entry) + len(name) + len(text.encode()) + 6 <= MOST_BYTES
        if text and name not in kept and is_room:
            kept[name] = attribute(text)
    return entry


def error_of(message: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the error with which leasekit has sent a message to a dead-letter queue; None: it names none."""
    text = _attribute(message, _ERROR)
    if text is None:
        return None
    kind, colon, says = text.partition(": ")
    return {"type": kind, "message": says} if colon else {"message": text}


def sent_at(message: Mapping[str, Any]) -> float | None:
    """Return when a message was sent, by SQS; None: the receive did not ask for it."""
    text = _mapping(message.get("Attributes")).get("SentTimestamp")
    return int(text) / 1000 if isinstance(text, str) and text.isdecimal() and len(text) < 15 else None


def _short(error: Any) -> str:
    """Return an error as one line of characters that SQS accepts."""
    error = decode_value(msgspec.json.encode(error))  # the error may be encoded JSON already
    if isinstance(error, Mapping):
        about = cast("Mapping[str, Any]", error)
        error = f"{about.get('type', '')}: {about.get('message', '')}"
    text = "" if error is None else str(error)
    return "".join(char if char.isprintable() and char < "\ufffe" else " " for char in text[:_LONGEST_ERROR]).strip()


def _attribute(message: Mapping[str, Any], name: str) -> str | None:
    value = _mapping(_mapping(message.get("MessageAttributes")).get(name)).get("StringValue")
    return value if isinstance(value, str) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _is_name(text: str | None) -> bool:
    try:
        msgspec.convert(text, Name)
    except msgspec.ValidationError:
        return False
    return True


def _count(text: object) -> int | None:
    return int(text) or None if isinstance(text, str) and text.isdecimal() and len(text) < 10 else None


def _policy(text: str | None) -> RetryPolicy | None:
    try:
        return _POLICY.decode(text or "")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


_POLICY: msgspec.json.Decoder[RetryPolicy] = msgspec.json.Decoder(RetryPolicy)
