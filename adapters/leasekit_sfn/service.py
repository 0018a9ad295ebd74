"""Activities of AWS Step Functions, as values: what each call says, and what its answer means.

    outcome             call                error          cause
    success             SendTaskSuccess                    (output: what the body returned, as JSON)
    retry               SendTaskFailure     retry          {"error": …, "retry_after": …, "progress": …}
    fatal               SendTaskFailure     fatal          {"error": …, "progress": …}
    release             SendTaskFailure     released       {"retry_after": …, "progress": …}
    crash               SendTaskFailure     crashed        {"error": …, "progress": …}
    cancelled           SendTaskFailure     cancelled      {"error": …, "progress": …}

Step Functions hands out a task once. Whether the state is tried again, and when, is said by its `Retry` field, whose
`ErrorEquals` matches these words.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET

from leasekit import Task
from leasekit.backend import Traits
from leasekit.task import Beat, Settlement
from leasekit_aws import Call, error_json, json_text, payload
from leasekit_aws.values import text_of

__all__ = ["SfnService", "kind_of", "region_of", "task_id"]

_MAX_OUTPUT = 262144  # bytes
_MAX_CAUSE = 32768
_ERRORS = {"retry": "retry", "fatal": "fatal", "release": "released", "crash": "crashed", "cancelled": "cancelled"}
_GONE = {"TaskTimedOut": "expired", "TaskDoesNotExist": "unknown", "InvalidToken": "unknown"}
_ARN = re.compile(
    r"arn:[a-z-]+:states:(?P<region>[a-z0-9-]{1,40}):\d{12}:activity:(?P<kind>[\w+!@.()=' -]{1,80})", re.ASCII
)


class SfnService:
    """Activities, by the kind of task that each is; without them, tasks that somebody else has polled for."""

    traits = Traits(
        max_batch=1,
        max_claim=1,
        fences=False,
        remembers_claims=False,
        keeps_claims=True,
        retries=False,
        orders=False,
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
        """The task in the answer to a poll, None where it brought none."""
        return self.task(answer, kind=kind or "activity", ttl=self.ttl or 300.0)

    def task(self, answer: Mapping[str, Any], *, kind: str, ttl: float) -> Task | None:
        """The task in the answer to a poll, None where it brought none. Raises `ProtocolError`."""
        if not answer.get("taskToken"):
            return None
        token = text_of(answer, "taskToken", at_most=2048)
        return Task(id=task_id(token), kind=kind, token=token, ttl=ttl, payload=payload(answer.get("input")))

    def beat(self, beat: Beat, *, item: int) -> Call:
        """A heartbeat; it carries nothing: progress stays here."""
        return Call("send_task_heartbeat", {"taskToken": beat.token})

    def order(self, answer: Mapping[str, Any]) -> Literal["cancel"] | None:
        """Never an order: an execution that is stopped answers heartbeats with *gone*."""
        return None

    def gone(self, code: str, message: str) -> str | None:
        """Why a lease is over. A task that has ended, or whose execution has, is one that timed out, too."""
        return _GONE.get(code)

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """The end of an activity, by its outcome."""
        token = settlement.token
        if settlement.outcome == "success":
            output = json_text(settlement.result, "result", at_most=_MAX_OUTPUT, item=item, unit="bytes")
            return Call("send_task_success", {"taskToken": token, "output": output})
        progress = None if settlement.progress is UNSET else settlement.progress
        known = {"retry_after": settlement.retry_after, "progress": progress}
        cause = error_json(settlement.error, at_most=_MAX_CAUSE, **known)
        error = _ERRORS[settlement.outcome]
        return Call("send_task_failure", {"taskToken": token, "error": error, "cause": cause})


def task_id(token: str) -> str:
    """An id for a task: Step Functions gives it none but its token, which is a secret."""
    return f"sfn-{hashlib.sha256(token.encode()).hexdigest()[:40]}"


def kind_of(arn: str) -> str | None:
    """The name of the activity, None where this is no activity's ARN."""
    found = _ARN.fullmatch(arn)
    return found["kind"] if found else None


def region_of(arn: str) -> str:
    """The region in an activity's ARN."""
    found = _ARN.fullmatch(arn)
    return found["region"] if found else ""
