"""SQS as AWS documents and answers it, where moto does otherwise; requests and answers are held to botocore's model.

A message lives by a clock that tests turn. What moto does not do, and this does:

- The handle of a receive that has run out changes nothing more, and the answer is *done* all the same.
- Twelve hours count from the receive, and to ask for more than is left of them is an error of the entry.
- A deleted message's handle is an error of the entry, with the handle in its text.
- A FIFO queue does not delete by a handle that has run out.
- A message has the attributes that its receive asked for, and no other.
- Answers that are lost, entries that fail alone, throttling, credentials that have expired.
"""

import hashlib
import json
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

MODEL = botocore.session.get_session().get_service_model("sqs")
LONGEST = 43_200
Params = dict[str, Any]


class Answer(Exception):
    """An answer that is not the usual one."""

    def __init__(self, status: int, code: str = "", message: str = "", *, raw: bytes | None = None) -> None:
        self.status, self.code, self.message, self.raw = status, code, message, raw


class Lost(Exception):
    """The connection breaks instead of an answer."""


@dataclass
class Message:
    """One message, with every receive of it."""

    body: str
    id: str
    attributes: Params = field(default_factory=dict)
    group: str | None = None
    trace_header: str | None = None
    delay: int = 0
    visible_at: float = 0.0
    received_at: float = 0.0
    handles: list[str] = field(default_factory=list)
    deleted: bool = False


@dataclass
class Queue:
    """One queue. `dead_letter_queue` is the name of that for its dead letters, `visibility` its visibility timeout."""

    name: str
    messages: list[Message] = field(default_factory=list)
    dead_letter_queue: str | None = None
    visibility: int = 30

    def find(self, handle: str) -> Message | None:
        return next((one for one in self.messages if handle in one.handles), None)


class Fake:
    """The service. `now` is its clock; `calls` are those that came, in order; `meet` is what the next ones meet."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.reset()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """All is forgotten: for the next test."""
        self.now = 1_000_000.0
        self.queues: dict[str, Queue] = {}
        self.calls: list[tuple[str, Params]] = []
        self._scripts: dict[str, deque[Callable[[Callable[[], Params], Params], Params]]] = defaultdict(deque)
        self._count = 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # What tests say

    def queue(self, name: str, *, dead_letter_queue: str | None = None) -> Queue:
        return self.queues.setdefault(name, Queue(name, dead_letter_queue=dead_letter_queue))

    def put(self, name: str, body: str, **more: Any) -> Message:
        self._count += 1
        message = Message(body, f"message-{self._count}", **more)
        self.queue(name).messages.append(message)
        return message

    def asked(self, operation: str) -> list[Params]:
        return [params for name, params in self.calls if name == operation]

    def meet(self, operation: str, act: "Callable[[Callable[[], Params], Params], Params]") -> None:
        """The next call of this operation is answered by `act(apply, params)`."""
        self._scripts[operation].append(act)

    def error(self, operation: str, status: int, code: str, message: str = "because") -> None:
        def act(apply: Callable[[], Params], params: Params) -> Params:
            raise Answer(status, code, message)

        self.meet(operation, act)

    def hold(self, operation: str, *, applied: bool = False) -> tuple[threading.Event, threading.Event]:
        """The next call of this operation: set when it has arrived, and answered when the second one is set.

        It is done when it is answered; `applied`: when it arrives.
        """
        arrived, go_on = threading.Event(), threading.Event()

        def act(apply: Callable[[], Params], params: Params) -> Params:
            answer = apply() if applied else None
            arrived.set()
            self.lock.release()  # others are answered meanwhile
            try:
                assert go_on.wait(30)
            finally:
                self.lock.acquire()
            return apply() if answer is None else answer

        self.meet(operation, act)
        return arrived, go_on

    def say(self, operation: str, raw: bytes) -> None:
        """The call is answered by these bytes."""

        def act(apply: Callable[[], Params], params: Params) -> Params:
            raise Answer(200, raw=raw)

        self.meet(operation, act)

    def lose(self, operation: str, *, applied: bool) -> None:
        """The call's answer is lost, after it was done or before."""

        def act(apply: Callable[[], Params], params: Params) -> Params:
            if applied:
                apply()
            raise Lost

        self.meet(operation, act)

    def fail(self, operation: str, code: str, *entries: int, fault: bool = True, message: str = "because") -> None:
        """These entries of the next batch fail, alone."""

        def act(apply: Callable[[], Params], params: Params) -> Params:
            chosen = [params["Entries"][n]["Id"] for n in entries]
            params["Entries"] = [one for one in params["Entries"] if one["Id"] not in chosen]
            answer = apply()
            answer["Failed"] += [{"Id": one, "Code": code, "SenderFault": fault, "Message": message} for one in chosen]
            return answer

        self.meet(operation, act)

    # What it does: names are those of SQS's operations and members

    # ruff: noqa: N802, N803

    def handle(self, operation: str, params: Params) -> Params:
        model = MODEL.operation_model(operation)
        assert model.input_shape is not None
        report = ParamValidator().validate(params, model.input_shape)
        if report.has_errors():
            raise AssertionError(f"{operation}: {report.generate_report()}")
        entries = params.get("Entries")
        assert entries is None or 1 <= len({one["Id"] for one in entries}) == len(entries) <= 10
        with self.lock:
            self.calls.append((operation, params))
            script = self._scripts[operation]
            act = script.popleft() if script else (lambda apply, _: apply())
            answer = act(lambda: getattr(self, operation)(**params), params)
        if model.output_shape is not None and answer:
            report = ParamValidator().validate(answer, model.output_shape)
            assert not report.has_errors(), f"{operation}: {report.generate_report()}"
        return answer

    def _of(self, url: str) -> Queue:
        name = url.rpartition("/")[2]
        if name not in self.queues:
            raise Answer(400, "AWS.SimpleQueueService.NonExistentQueue", "The specified queue does not exist.")
        return self.queues[name]

    def GetQueueUrl(self, QueueName: str, **_: Any) -> Params:
        self._of(QueueName)
        return {"QueueUrl": f"{self.endpoint}/123456789012/{QueueName}"}

    def GetQueueAttributes(self, QueueUrl: str, AttributeNames: list[str]) -> Params:
        queue = self._of(QueueUrl)
        arn = "arn:aws:sqs:eu-west-1:123456789012:"
        waiting = sum(not message.deleted for message in queue.messages)
        known = {"QueueArn": arn + queue.name, "VisibilityTimeout": str(queue.visibility)}
        known["ApproximateNumberOfMessages"] = str(waiting)
        if queue.dead_letter_queue is not None:
            known["RedrivePolicy"] = json.dumps(
                {"deadLetterTargetArn": arn + queue.dead_letter_queue, "maxReceiveCount": 5}
            )
        return {"Attributes": {name: value for name, value in known.items() if name in AttributeNames}}

    def PurgeQueue(self, QueueUrl: str) -> Params:
        self._of(QueueUrl).messages.clear()
        return {}

    def StartMessageMoveTask(self, SourceArn: str, **_: Any) -> Params:
        return {"TaskHandle": f"move-of-{SourceArn.rpartition(':')[2]}"}

    def ReceiveMessage(
        self,
        QueueUrl: str,
        MaxNumberOfMessages: int = 1,
        VisibilityTimeout: int | None = None,
        MessageAttributeNames: tuple[str, ...] = (),
        AttributeNames: tuple[str, ...] = (),
        MessageSystemAttributeNames: tuple[str, ...] = (),
        **_: Any,
    ) -> Params:
        named = {*AttributeNames, *MessageSystemAttributeNames}
        found: list[Params] = []
        queue = self._of(QueueUrl)
        hidden = queue.visibility if VisibilityTimeout is None else VisibilityTimeout
        for message in queue.messages:
            if message.deleted or message.visible_at > self.now or len(found) == MaxNumberOfMessages:
                continue
            self._count += 1
            message.handles.append(f"AQEB/{uuid.uuid4()}+" + "h" * 160 + "==")
            message.received_at, message.visible_at = self.now, self.now + hidden
            about: Params = {"ApproximateReceiveCount": str(len(message.handles))}
            if message.group is not None:
                about["MessageGroupId"] = message.group
            if message.trace_header is not None:
                about["AWSTraceHeader"] = message.trace_header
            entry: Params = {"MessageId": message.id, "ReceiptHandle": message.handles[-1], "Body": message.body}
            if about := {name: text for name, text in about.items() if named & {name, "All"}}:
                entry["Attributes"] = about
            if own := {
                name: value for name, value in message.attributes.items() if {name, "All"} & {*MessageAttributeNames}
            }:
                entry["MessageAttributes"] = own
            found.append(entry)
        return {"Messages": found} if found else {}

    def ChangeMessageVisibilityBatch(self, QueueUrl: str, Entries: list[Params]) -> Params:
        return self._each(QueueUrl, Entries, self._hide)

    def DeleteMessage(self, QueueUrl: str, ReceiptHandle: str) -> Params:
        self._delete(self._of(QueueUrl), {"ReceiptHandle": ReceiptHandle})
        return {}

    def DeleteMessageBatch(self, QueueUrl: str, Entries: list[Params]) -> Params:
        return self._each(QueueUrl, Entries, self._delete)

    def SendMessageBatch(self, QueueUrl: str, Entries: list[Params]) -> Params:
        return self._each(QueueUrl, Entries, self._send)

    def _each(self, url: str, entries: list[Params], act: Callable[[Queue, Params], Params]) -> Params:
        queue = self._of(url)
        answer: Params = {"Successful": [], "Failed": []}
        for entry in entries:
            try:
                answer["Successful"].append({"Id": entry["Id"]} | act(queue, entry))
            except Answer as error:
                answer["Failed"].append(
                    {"Id": entry["Id"], "Code": error.code, "SenderFault": True, "Message": error.message}
                )
        return answer

    def _hide(self, queue: Queue, entry: Params) -> Params:
        handle, seconds = entry["ReceiptHandle"], entry["VisibilityTimeout"]
        message = queue.find(handle)
        if message is None or message.deleted:
            why = "Message does not exist or is not available for visibility timeout change."
            raise Answer(400, "InvalidParameterValue", f"Value {handle} for parameter ReceiptHandle is invalid. {why}")
        if self.now + seconds > message.received_at + LONGEST:
            why = f"Reason: Total VisibilityTimeout for the message is beyond the limit [{LONGEST} seconds]"
            raise Answer(
                400, "InvalidParameterValue", f"Value {seconds} for parameter VisibilityTimeout is invalid. {why}"
            )
        if message.visible_at > self.now:  # also by the handle of an earlier receive
            message.visible_at = self.now + seconds
        return {}

    def _delete(self, queue: Queue, entry: Params) -> Params:
        handle = entry["ReceiptHandle"]
        message = queue.find(handle)
        has_expired = message is not None and (message.visible_at <= self.now or message.handles[-1] != handle)
        if has_expired and queue.name.endswith(".fifo"):
            why = "Reason: The receipt handle has expired."
            raise Answer(400, "InvalidParameterValue", f"Value {handle} for parameter ReceiptHandle is invalid. {why}")
        if message is not None:
            message.deleted = True
        return {}

    def _send(self, queue: Queue, entry: Params) -> Params:
        body = entry["MessageBody"]
        attributes = entry.get("MessageAttributes", {})
        delay = entry.get("DelaySeconds", 0)
        group = entry.get("MessageGroupId")
        trace = entry.get("MessageSystemAttributes", {}).get("AWSTraceHeader", {}).get("StringValue")
        message = self.put(queue.name, body, attributes=attributes, group=group, delay=delay, trace_header=trace)
        message.visible_at = self.now + delay
        return {"MessageId": message.id, "MD5OfMessageBody": hashlib.md5(body.encode()).hexdigest()}  # noqa: S324

    # How it is spoken to

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                operation = self.headers["X-Amz-Target"].rpartition(".")[2]
                body = self.rfile.read(length := int(self.headers["Content-Length"]))
                if len(body) < length:  # the caller has closed the connection instead
                    self.close_connection = True
                    return
                params = json.loads(body)
                try:
                    self._answer(200, json.dumps(fake.handle(operation, params)).encode())
                except Answer as answer:
                    error = {"__type": f"com.amazonaws.sqs#{answer.code}", "message": answer.message}
                    raw = json.dumps(error).encode() if answer.raw is None else answer.raw
                    self._answer(answer.status, raw, code=answer.code)
                except Lost:
                    self.close_connection = True

            def _answer(self, status: int, body: bytes, *, code: str = "") -> None:
                self.send_response(status)
                self.send_header("x-amzn-RequestId", str(uuid.uuid4()))
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                if code:
                    self.send_header("x-amzn-query-error", f"{code};Sender")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Nothing."""

        return Handler
