"""Amazon SWF and Step Functions as far as workers see them, on a real port: what moto lacks.

moto has SWF's polls, heartbeats and ends, but no cancellation and no long poll, and of Step Functions no activity at
all. This plays them. Every request and every answer is checked against botocore's own model of the service, bounds
included, so that the two cannot agree on something that AWS does not know.
"""

import itertools
import json
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import boto3.session
import botocore.session
import pytest
from botocore import xform_name
from botocore.validate import ParamValidator

from leasekit.backend import Backend
from leasekit_aws import AwsBackend, BotoClients
from leasekit_sfn import SfnService
from leasekit_swf import connect
from tests.adapters.botocore_models import read_once as read_once

pytest.register_assert_rewrite("leasekit.testing.contract")

_MODELS = {
    model.metadata["targetPrefix"]: model
    for model in map(botocore.session.get_session().get_service_model, ("swf", "stepfunctions"))
}
_ARN = "arn:aws:states:eu-central-1:123456789012:activity:resize"
_COMMON = {"ThrottlingException", "ValidationException", "AccessDeniedException", "ExpiredTokenException"}
_COMMON |= {"InternalFailure", "UnrecognizedClientException", "ServiceUnavailable"}


class Fault(Exception):
    """An error that the service answers."""

    def __init__(self, code: str, message: str = "", *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass
class Page:
    """An answer that is none of AWS's."""

    status: int = 200
    body: bytes = b"<html>Welcome to the hotel</html>"
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/html"})


class Lost(Exception):
    """The request is applied, its answer never arrives."""


@dataclass
class Work:
    """One activity task."""

    source: str  # a task list, or an activity's ARN
    kind: str
    input: str | None
    workflow: str
    run: str
    activity: str
    token: str = field(default_factory=lambda: f"AAAAKgAAAAI/{uuid.uuid4().hex}+" + "x" * 400)
    state: str = "waiting"
    fence: int = 0
    beaten_at: float = 0.0
    cancelled: bool = False
    details: list[str] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class Aws:
    """The services, with a clock that tests turn: leases end by it and by nothing else."""

    heartbeat_timeout: ClassVar[float] = 300.0

    def __init__(self) -> None:
        self.url = ""
        self.now = 1000.0
        self.poll_seconds = 0.15  # real ones: how long an empty poll takes. AWS: 60
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.works: list[Work] = []
        self.shifts = False  # a proxy in between answers each request with the answer before it on the connection
        self.violations: list[str] = []
        self.signers: list[tuple[str, str]] = []  # operation; key, day, region and service
        self._events: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(7, 3))
        self._faults: dict[str, deque[Any]] = defaultdict(deque)
        self.changed = threading.Condition()

    # For tests

    def schedule(
        self, source: str, kind: str, value: Any = None, *, raw: str | None = None, workflow: str = "", run: str = ""
    ) -> Work:
        """What a decider or a state machine does. The input is JSON, or `raw`."""
        text = json.dumps(value) if raw is None else raw
        workflow = workflow or f"order {len(self.works)}"
        work = Work(source, kind, text, workflow=workflow, run=run or uuid.uuid4().hex, activity="a1")
        with self.changed:
            self.works.append(work)
            self.changed.notify_all()
        return work

    def turn(self, seconds: float) -> None:
        """Let time pass: leases that were not beaten run out."""
        with self.changed:
            self.now += seconds
            for work in self.works:
                if work.state == "started" and self.now - work.beaten_at >= self.heartbeat_timeout:
                    work.state = "timed out"
            self.changed.notify_all()

    def close(self, work: Work) -> None:
        """The workflow execution ends, and its activities with it."""
        with self.changed:
            work.state = "closed"

    def next(self, operation: str, *faults: Any) -> None:
        """The next calls of this operation are answered so: a `fault`, a `page`, `lost`, or what a dict says."""
        self._faults[operation].extend(faults)

    fault = Fault
    page = Page
    lost = Lost()

    def asked(self, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.requests if name == operation]

    def wait_until(self, fact: Callable[[], object]) -> None:
        until = time.monotonic() + 40
        with self.changed:
            while not fact():
                assert time.monotonic() < until, "it never came true"
                self.changed.wait(0.05)  # for what the services do; or to look again at what others do

    # For the server

    def answer(self, prefix: str, operation: str, params: dict[str, Any]) -> dict[str, Any] | Page:
        model = _MODELS[prefix].operation_model(operation)
        if wrong := _wrong(params, model.input_shape):
            self.violations.append(f"{operation}: {wrong}")
            raise Fault("ValidationException", wrong)
        with self.changed:
            self.requests.append((operation, params))
            self.changed.notify_all()
            fault = self._faults[operation].popleft() if self._faults[operation] else None
        if isinstance(fault, Fault):
            known = {error.name for error in model.error_shapes} | _COMMON
            assert fault.code in known, f"{operation} does not raise {fault.code}"
            raise fault
        if isinstance(fault, (dict, Page)):
            return fault
        answer: dict[str, Any] = getattr(self, xform_name(operation))(params)
        if isinstance(fault, Lost):
            raise fault
        is_empty_poll = "taskToken" in (model.output_shape.members if model.output_shape else {}) and not answer.get(
            "taskToken"
        )
        if not is_empty_poll and model.output_shape and (wrong := _wrong(answer, model.output_shape)):
            self.violations.append(f"answer to {operation}: {wrong}")
        return answer

    def _poll(self, source: str) -> Work | None:
        def waiting() -> Work | None:
            return next((w for w in self.works if w.source == source and w.state == "waiting"), None)

        with self.changed:
            work = self.changed.wait_for(waiting, timeout=self.poll_seconds)
            if work is not None:
                work.state, work.beaten_at, work.fence = "started", self.now, next(self._events[work.run])
                self.changed.notify_all()
            return work

    def _held(self, token: str, *, gone: dict[str, str]) -> Work:
        work = next((w for w in self.works if w.token == token), None)
        if work is None or work.state != "started":
            state = "unknown" if work is None else work.state
            raise Fault(gone.get(state, gone["unknown"]), _SAYS.get(state, "Unknown activity, scheduledEventId = 5"))
        return work

    def _end(self, work: Work, **end: Any) -> dict[str, Any]:
        with self.changed:
            work.state, work.end = "ended", end
            self.changed.notify_all()
        return {}

    # Amazon SWF

    SWF: ClassVar[dict[str, str]] = {"unknown": "UnknownResourceFault"}

    def poll_for_activity_task(self, params: dict[str, Any]) -> dict[str, Any]:
        if params["domain"] == "nowhere":
            raise Fault("UnknownResourceFault", "Unknown domain: nowhere")
        work = self._poll(params["taskList"]["name"])
        if work is None:
            return {"startedEventId": 0}
        answer = {
            "taskToken": work.token,
            "activityId": work.activity,
            "startedEventId": work.fence,
            "workflowExecution": {"workflowId": work.workflow, "runId": work.run},
            "activityType": {"name": work.kind, "version": "1"},
        }
        return answer if work.input is None else answer | {"input": work.input}

    def record_activity_task_heartbeat(self, params: dict[str, Any]) -> dict[str, Any]:
        work = self._held(params["taskToken"], gone=self.SWF)
        work.beaten_at = self.now
        work.details += [params["details"]] if "details" in params else []
        return {"cancelRequested": work.cancelled}

    def respond_activity_task_completed(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._end(self._held(params["taskToken"], gone=self.SWF), result=params.get("result"))

    def respond_activity_task_failed(self, params: dict[str, Any]) -> dict[str, Any]:
        work = self._held(params["taskToken"], gone=self.SWF)
        return self._end(work, reason=params.get("reason"), details=params.get("details"))

    def respond_activity_task_canceled(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._end(self._held(params["taskToken"], gone=self.SWF), cancelled=params.get("details"))

    # AWS Step Functions: of a task that has ended it says the same as of one that timed out

    SFN: ClassVar[dict[str, str]] = {
        "unknown": "InvalidToken",
        **dict.fromkeys(("ended", "timed out", "closed"), "TaskTimedOut"),
    }

    def get_activity_task(self, params: dict[str, Any]) -> dict[str, Any]:
        work = self._poll(params["activityArn"])
        return {} if work is None else {"taskToken": work.token, "input": work.input}

    def send_task_heartbeat(self, params: dict[str, Any]) -> dict[str, Any]:
        self._held(params["taskToken"], gone=self.SFN).beaten_at = self.now
        return {}

    def send_task_success(self, params: dict[str, Any]) -> dict[str, Any]:
        return self._end(self._held(params["taskToken"], gone=self.SFN), output=params["output"])

    def send_task_failure(self, params: dict[str, Any]) -> dict[str, Any]:
        work = self._held(params["taskToken"], gone=self.SFN)
        return self._end(work, error=params.get("error"), cause=params.get("cause"))


_SAYS = {"closed": "Unknown execution: WorkflowExecution=[workflowId=made-up, runId=made-up]"}


def _wrong(params: Any, shape: Any) -> str:
    """What of this is not as botocore's model has it; botocore itself leaves upper bounds to the service."""
    report = ParamValidator().validate({k: v for k, v in params.items() if k in shape.members}, shape)
    unknown = sorted(set(params) - set(shape.members))
    too_long = [
        f"{name} is longer than {member.metadata['max']}"
        for name, member in shape.members.items()
        if member.type_name == "string" and len(params.get(name) or "") > member.metadata.get("max", 2**40)
    ]
    return "; ".join(([report.generate_report()] if report.has_errors() else []) + too_long + unknown)


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"
    last: tuple[int, bytes, dict[str, str]] | None = None  # of this connection

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        prefix, _, operation = self.headers["x-amz-target"].partition(".")
        signer = self.headers["authorization"].partition("Credential=")[2].partition(",")[0]
        self.server.aws.signers.append((operation, signer))
        try:
            answer = self.server.aws.answer(prefix, operation, json.loads(body))
        except Fault as fault:
            said = json.dumps({"__type": f"com.amazonaws.model#{fault.code}", "message": str(fault)})
            self._send(fault.status, said.encode(), _headers())
        except Lost:
            self.close_connection = True
        else:
            if isinstance(answer, Page):
                self._send(answer.status, answer.body, answer.headers)
            else:
                self._send(200, json.dumps(answer).encode(), _headers())

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        before, self.last = self.last, (status, body, headers)
        if self.server.aws.shifts:
            status, body, headers = before or self.last
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # whoever asked has gone
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


def _headers() -> dict[str, str]:
    return {"content-type": "application/x-amz-json-1.0", "x-amzn-requestid": str(uuid.uuid4())}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    aws: Aws


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones, and none of this machine's settings."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "AWS_ACCESS_KEY_ID": "AKIAMADEUP", "AWS_SECRET_ACCESS_KEY": "made-up", "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def session() -> boto3.session.Session:
    """One for all backends: boto3 reads its models for each session, for 0.1 s of CPU."""
    return boto3.session.Session()


@pytest.fixture
def aws(credentials: None, session: boto3.session.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """The services on a port of their own. Afterwards all that was said must have been in botocore's words."""
    made = boto3.session.Session
    monkeypatch.setattr(boto3.session, "Session", lambda **own: made(**own) if own else session)
    aws = Aws()
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.aws = aws
        aws.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield aws
        server.shutdown()
        thread.join()
    assert aws.violations == []


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def backend(aws: Aws) -> AsyncIterator[Backend]:
    backend = connect(f"swf://media/render?endpoint={aws.url}", worker="w")
    yield backend
    await backend.aclose()


@pytest.fixture
async def steps(aws: Aws) -> AsyncIterator[Backend]:
    service = SfnService(activities={"resize": _ARN}, worker="w" * 100, ttl=60)
    backend = AwsBackend(service, BotoClients("stepfunctions", region="eu-central-1", endpoint=aws.url))
    yield backend
    await backend.aclose()
