"""Amazon SWF's activity tasks, as values: what each call says, and what its answer means.

    outcome             call                           reason         details
    success             RespondActivityTaskCompleted                  (result: what the body returned, as JSON)
    retry               RespondActivityTaskFailed      retry          {"error": …, "retry_after": …, "progress": …}
    fatal               RespondActivityTaskFailed      fatal          {"error": …, "progress": …}
    release             RespondActivityTaskFailed      released       {"retry_after": …, "progress": …}
    crash               RespondActivityTaskFailed      crashed        {"error": …, "progress": …}
    cancelled           RespondActivityTaskCanceled                   {"error": …, "progress": …}

SWF hands out a task once. Whether it is scheduled again, and when, is for the decider to say, which reads this in the
workflow's history.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET

from leasekit import Task
from leasekit.backend import Traits
from leasekit.errors import ProtocolError
from leasekit.task import Beat, Settlement
from leasekit_aws import Call, error_json, json_text, payload
from leasekit_aws.values import text_of

__all__ = ["SwfService", "task_id"]

_MAX_DETAILS = 2048  # of a heartbeat
_MAX_RESULT = 32768  # and of the details of a failure
_UNKNOWN = {"Unknown activity": "expired", "Unknown execution": "cancelled"}
_REASONS = {"retry": "retry", "fatal": "fatal", "release": "released", "crash": "crashed"}


class SwfService:
    """One task list of a domain; without them, tasks that somebody else has polled for."""

    traits = Traits(
        max_batch=1,
        max_claim=1,
        remembers_claims=False,
        keeps_claims=True,
        retries=False,
        progress=False,
        max_progress=_MAX_DETAILS,
        max_result=_MAX_RESULT,
    )

    def __init__(self, *, domain: str = "", task_list: str = "", worker: str = "", ttl: float | None = None) -> None:
        self.ttl = ttl
        asked = {"domain": domain, "taskList": {"name": task_list}, "identity": worker[:256]}
        self.polls: Mapping[str | None, Call] = {None: Call("poll_for_activity_task", asked)} if domain else {}

    def read(self, kind: str | None, answer: Mapping[str, Any]) -> Task | None:
        """The task in the answer to a poll, None where it brought none."""
        return self.task(answer, ttl=self.ttl or 300.0)

    def task(self, answer: Mapping[str, Any], *, ttl: float) -> Task | None:
        """The task in the answer to a poll, None where it brought none. Raises `ProtocolError`."""
        if not answer.get("taskToken"):
            return None
        started = answer.get("startedEventId")
        if not isinstance(started, int) or isinstance(started, bool) or not 0 < started < 2**63:
            raise ProtocolError("a task came whose startedEventId is no number of an event")
        return Task(
            id=task_id(
                text_of(answer, "workflowExecution", "workflowId", at_most=256),
                text_of(answer, "workflowExecution", "runId", at_most=64),
                text_of(answer, "activityId", at_most=256),
            ),
            kind=text_of(answer, "activityType", "name", at_most=256),
            token=text_of(answer, "taskToken", at_most=1024),
            ttl=ttl,
            # The number of an event in the run's history: it grows with every start of an activity of this run.
            fence=started,
            payload=payload(answer.get("input")),
        )

    def beat(self, beat: Beat, *, item: int) -> Call:
        """A heartbeat; the progress goes as its details. SWF shows the last ones to the decider, on a time-out."""
        params: dict[str, Any] = {"taskToken": beat.token}
        if beat.progress is not UNSET:
            params["details"] = json_text(beat.progress, "progress", at_most=_MAX_DETAILS, item=item)
        return Call("record_activity_task_heartbeat", params)

    def order(self, answer: Mapping[str, Any]) -> Literal["cancel"] | None:
        """The order to wind down, where the decider has asked for a cancellation."""
        asked = answer.get("cancelRequested")
        if not isinstance(asked, bool):
            raise ProtocolError("the answer to a heartbeat does not say whether it is cancelled")
        return "cancel" if asked else None

    def gone(self, code: str, message: str) -> str | None:
        """Why a lease is over: SWF says of all that has ended that it is unknown, and in its message what that is."""
        if code != "UnknownResourceFault":
            return None
        return next((reason for what, reason in _UNKNOWN.items() if what in message), "unknown")

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """The end of an activity, by its outcome."""
        token = settlement.token
        if settlement.outcome == "success":
            result = json_text(settlement.result, "result", at_most=_MAX_RESULT, item=item)
            return Call("respond_activity_task_completed", {"taskToken": token, "result": result})
        progress = None if settlement.progress is UNSET else settlement.progress
        known = {"retry_after": settlement.retry_after, "progress": progress}
        details = error_json(settlement.error, at_most=_MAX_RESULT, **known)
        if settlement.outcome == "cancelled":
            return Call("respond_activity_task_canceled", {"taskToken": token, "details": details})
        reason = _REASONS[settlement.outcome]
        return Call("respond_activity_task_failed", {"taskToken": token, "reason": reason, "details": details})


def task_id(workflow: str, run: str, activity: str) -> str:
    """An id that names this activity of this run, whoever works on it and however often; a digest where it is no name.

    leasekit's ids are 1-128 printable ASCII characters without `/`.
    """
    plain = f"{workflow}:{run}:{activity}"
    return plain if _NAME.fullmatch(plain) else f"swf-{hashlib.sha256(plain.encode()).hexdigest()}"


_NAME = re.compile(r"[!-.0-~]{1,128}")
