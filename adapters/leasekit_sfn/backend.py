"""Activities of AWS Step Functions as values: the content of each call, and the meaning of its answer.

    outcome             call                error          cause
    success             SendTaskSuccess                    (output: the handler's return value, as JSON)
    retry               SendTaskFailure     retry          {"error": …, "retry_after": …, "progress": …}
    fatal               SendTaskFailure     fatal          {"error": …, "progress": …}
    release             SendTaskFailure     released       {"retry_after": …, "progress": …}
    crash               SendTaskFailure     crashed        {"error": …, "progress": …}
    cancelled           SendTaskFailure     cancelled      {"error": …, "progress": …}

Step Functions hands out a task once. The `Retry` field of the state, whose `ErrorEquals` matches the error, decides
whether and when the state is tried again.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import leasekit
from leasekit import Lease, Task
from leasekit.backend import Capabilities
from leasekit.errors import ConfigError
from leasekit.task import Beat, Settlement
from leasekit_aws import AwsBackend, BotoClients, Call, adopt, failure_json, json_text, options, payload
from leasekit_aws.values import text_of

_MAX_OUTPUT = 262144  # bytes
_MAX_CAUSE = 32768
_ERRORS = {"retry": "retry", "fatal": "fatal", "release": "released", "crash": "crashed", "cancelled": "cancelled"}
_GONE = {"TaskTimedOut": "expired", "TaskDoesNotExist": "unknown", "InvalidToken": "unknown"}
_ARN = re.compile(
    r"arn:[a-z-]+:states:(?P<region>[a-z0-9-]{1,40}):\d{12}:activity:(?P<kind>[\w+!@.()=' -]{1,80})", re.ASCII
)


class SfnService:
    """Activities by the kind of their tasks; without any, tasks that the user's own code has polled for."""

    capabilities = Capabilities(
        max_batch=1,
        max_claim=1,
        fences=False,
        remembers_claims=False,
        keeps_claims=True,
        retries=False,
        cancel_requests=False,
        progress=False,
        max_result=_MAX_OUTPUT,
    )

    def __init__(
        self, *, activities: Mapping[str, str] | None = None, worker: str = "", ttl: float | None = None
    ) -> None:
        self.ttl = ttl
        self.polls: Mapping[str | None, Call] = {
            kind: Call("get_activity_task", {"activityArn": arn, "workerName": worker[:80]})
            for kind, arn in (activities or {}).items()
        }

    def read(self, kind: str | None, answer: Mapping[str, Any]) -> Task | None:
        """Return the task in the answer to a poll, None if the answer has none. Raises `ProtocolError`."""
        return self.task(answer, kind=kind or "activity", ttl=self.ttl or 300.0)

    def task(self, answer: Mapping[str, Any], *, kind: str, ttl: float) -> Task | None:
        """Return the task in the answer to a poll, None if the answer has none. Raises `ProtocolError`."""
        if not answer.get("taskToken"):
            return None
        token = text_of(answer, "taskToken", at_most=2048)
        return Task(id=task_id(token), kind=kind, token=token, ttl=ttl, payload=payload(answer.get("input")))

    def beat(self, beat: Beat, *, item: int) -> Call:
        """Return a heartbeat. It cannot carry progress."""
        return Call("send_task_heartbeat", {"taskToken": beat.token})

    def cancel_requested(self, answer: Mapping[str, Any]) -> bool:
        """Return False: Step Functions answers heartbeats of a stopped execution with *gone*."""
        return False

    def gone(self, code: str, message: str) -> str | None:
        """Return why a lease is gone: Step Functions also calls a task timed out if it, or its execution, ended."""
        return _GONE.get(code)

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """Return the call that ends an activity, by its outcome."""
        token = settlement.token
        if settlement.outcome == "success":
            output = json_text(settlement.result, "result", at_most=_MAX_OUTPUT, item=item, unit="bytes")
            return Call("send_task_success", {"taskToken": token, "output": output})
        cause = failure_json(settlement, at_most=_MAX_CAUSE)
        error = _ERRORS[settlement.outcome]
        return Call("send_task_failure", {"taskToken": token, "error": error, "cause": cause})


def task_id(token: str) -> str:
    """Return an id for a task: Step Functions gives tasks no id but their token, which is a secret."""
    return f"sfn-{hashlib.sha256(token.encode()).hexdigest()[:40]}"


_FORM = "the URL of Step Functions must be sfn://activity-arn?region=…&endpoint=…&ttl=300; several ARNs: sfn://arn,arn"


def connect(url: str, *, worker: str) -> AwsBackend:
    """Return the backend for one or several activities: each is a kind, named by the last part of its ARN.

    Nothing is opened yet. `ttl` must be the `HeartbeatSeconds` of the states that run the activities, which Step
    Functions does not tell workers; default 300 s. The region is that of the ARN, unless the URL names one.

    Raises `ConfigError` if the URL is wrong.
    """
    arns, _, query = url.partition("://")[2].partition("?")
    activities: dict[str, str] = {}
    regions: set[str] = set()
    for arn in map(unquote, arns.split(",")):
        match = _ARN.fullmatch(arn)
        if match is None or "#" in query:
            raise ConfigError(_FORM)
        regions.add(match["region"])
        if activities.setdefault(match["kind"], arn) != arn:
            named = f"two activities of the URL are named {match['kind']}"
            raise ConfigError(f"{named}: connect to each by a URL of its own")
    if len(regions) > 1:
        raise ConfigError("the activities of the URL are in several regions: use one URL for each region")
    found = options(query)
    service = SfnService(activities=activities, worker=worker, ttl=found.ttl)
    clients = BotoClients("stepfunctions", region=found.region or regions.pop(), endpoint=found.endpoint)
    return AwsBackend(service, clients)


def task(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, kind: str = "activity") -> Task:
    """Return the task in an answer of `client.get_activity_task`, for `with leasekit.lease(task):`.

    `client` is that boto3 client: heartbeats are sent with its credentials, region and endpoint. `ttl` must be the
    `HeartbeatSeconds` of the state, which Step Functions does not tell its workers. `kind` is the kind of the task.

    Raises `ProtocolError` if the answer has no task.
    """
    return adopt(_PLAIN.task(response, kind=kind, ttl=ttl), service=_PLAIN, name="stepfunctions", client=client)


def lease(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, idle_timeout: float | None = None) -> Lease:
    """Return `leasekit.lease(task(response, …))`, for `with lease(response, client=client, ttl=300) as held:`."""
    return leasekit.lease(task(response, client=client, ttl=ttl), idle_timeout=idle_timeout)


_PLAIN = SfnService()
