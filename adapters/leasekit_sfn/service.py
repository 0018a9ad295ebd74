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

from leasekit import Task
from leasekit.backend import Capabilities
from leasekit.task import Beat, Settlement
from leasekit_aws import Call, failure_json, json_text, payload
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


def kind_of(arn: str) -> str | None:
    """Return the name of the activity in an ARN, None if the ARN is not an activity's."""
    match = _ARN.fullmatch(arn)
    return match["kind"] if match else None


def region_of(arn: str) -> str:
    """Return the region in an activity's ARN."""
    match = _ARN.fullmatch(arn)
    return match["region"] if match else ""
