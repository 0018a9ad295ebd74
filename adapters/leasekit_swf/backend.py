"""Amazon SWF's activity tasks as values: the content of each call, and the meaning of its answer.

    outcome             call                           reason         details
    success             RespondActivityTaskCompleted                  (result: the handler's return value, as JSON)
    retry               RespondActivityTaskFailed      retry          {"error": …, "retry_after": …, "progress": …}
    fatal               RespondActivityTaskFailed      fatal          {"error": …, "progress": …}
    release             RespondActivityTaskFailed      released       {"retry_after": …, "progress": …}
    crash               RespondActivityTaskFailed      crashed        {"error": …, "progress": …}
    cancelled           RespondActivityTaskCanceled                   {"error": …, "progress": …}

SWF hands out a task once. The decider, which reads the reason and the details in the workflow's history, decides
whether and when the task is scheduled again.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import UNSET

import leasekit
from leasekit import Lease, Task
from leasekit.backend import Capabilities
from leasekit.errors import ConfigError, ProtocolError
from leasekit.task import Beat, Settlement
from leasekit_aws import AwsBackend, BotoClients, Call, adopt, failure_json, json_text, options, payload
from leasekit_aws.values import text_of

_MAX_DETAILS = 2048  # of a heartbeat
_MAX_RESULT = 32768  # of a result, and of the details of a failure
_UNKNOWN = {"Unknown activity": "expired", "Unknown execution": "cancelled"}
_REASONS = {"retry": "retry", "fatal": "fatal", "release": "released", "crash": "crashed"}


class SwfService:
    """The task list of a domain; without these, tasks that the user's own code has polled for."""

    capabilities = Capabilities(
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
        """Return the task in the answer to a poll, None if the answer has none. Raises `ProtocolError`."""
        return self.task(answer, ttl=self.ttl or 300.0)

    def task(self, answer: Mapping[str, Any], *, ttl: float) -> Task | None:
        """Return the task in the answer to a poll, None if the answer has none. Raises `ProtocolError`."""
        if not answer.get("taskToken"):
            return None
        started = answer.get("startedEventId")
        if not isinstance(started, int) or isinstance(started, bool) or not 0 < started < 2**63:
            raise ProtocolError("the startedEventId of a task must be a positive integer")
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
        """Return a heartbeat with the progress as details: on a timeout SWF shows the last details to the decider."""
        params: dict[str, Any] = {"taskToken": beat.token}
        if beat.progress is not UNSET:
            params["details"] = json_text(beat.progress, "progress", at_most=_MAX_DETAILS, item=item)
        return Call("record_activity_task_heartbeat", params)

    def cancel_requested(self, answer: Mapping[str, Any]) -> bool:
        """Return whether the decider has requested a cancel. Raises `ProtocolError`."""
        cancel_requested = answer.get("cancelRequested")
        if not isinstance(cancel_requested, bool):
            raise ProtocolError("the answer to a heartbeat has no cancelRequested")
        return cancel_requested

    def gone(self, code: str, message: str) -> str | None:
        """Return why a lease is gone: SWF calls everything that has ended unknown, and its message names the thing."""
        if code != "UnknownResourceFault":
            return None
        return next((reason for what, reason in _UNKNOWN.items() if what in message), "unknown")

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """Return the call that ends an activity, by its outcome."""
        token = settlement.token
        if settlement.outcome == "success":
            result = json_text(settlement.result, "result", at_most=_MAX_RESULT, item=item)
            return Call("respond_activity_task_completed", {"taskToken": token, "result": result})
        details = failure_json(settlement, at_most=_MAX_RESULT)
        if settlement.outcome == "cancelled":
            return Call("respond_activity_task_canceled", {"taskToken": token, "details": details})
        reason = _REASONS[settlement.outcome]
        return Call("respond_activity_task_failed", {"taskToken": token, "reason": reason, "details": details})


def task_id(workflow: str, run: str, activity: str) -> str:
    """Return an id for this activity of this run, the same for each attempt; a digest if it is not a valid id."""
    plain = f"{workflow}:{run}:{activity}"
    return plain if _NAME.fullmatch(plain) else f"swf-{hashlib.sha256(plain.encode()).hexdigest()}"


_NAME = re.compile(r"[!-.0-~]{1,128}")


_FORM = "the URL of SWF must be swf://domain/task-list?region=…&endpoint=…&ttl=300"


def connect(url: str, *, worker: str) -> AwsBackend:
    """Return the backend for one task list of a domain. Nothing is opened yet.

    `ttl` must be the heartbeat timeout of the activities, which SWF does not tell their workers; default 300 s.

    Raises `ConfigError` if the URL is wrong.
    """
    parts = urlsplit(url)
    domain, task_list = unquote(parts.netloc), unquote(parts.path.removeprefix("/"))
    if "@" in parts.netloc:
        raise ConfigError("leave credentials out of the URL: boto3 finds them (environment, ~/.aws, instance role)")
    if parts.fragment or not (_is_name(domain) and _is_name(task_list)):
        raise ConfigError(_FORM)
    found = options(parts.query)
    service = SwfService(domain=domain, task_list=task_list, worker=worker, ttl=found.ttl)
    return AwsBackend(service, BotoClients("swf", region=found.region, endpoint=found.endpoint))


def task(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0) -> Task:
    """Return the task in an answer of `client.poll_for_activity_task`, for `with leasekit.lease(task):`.

    `client` is that boto3 client: heartbeats are sent with its credentials, region and endpoint. `ttl` must be the
    heartbeat timeout of the activity, which SWF does not tell its workers.

    Raises `ProtocolError` if the answer has no task.
    """
    return adopt(_PLAIN.task(response, ttl=ttl), service=_PLAIN, name="swf", client=client)


def lease(response: Mapping[str, Any], *, client: Any, ttl: float = 300.0, idle_timeout: float | None = None) -> Lease:
    """Return `leasekit.lease(task(response, …))`, for `with lease(response, client=client, ttl=300) as held:`."""
    return leasekit.lease(task(response, client=client, ttl=ttl), idle_timeout=idle_timeout)


_PLAIN = SwfService()


def _is_name(name: str) -> bool:
    """Return whether SWF allows a name: 1-256 characters without `:`, `/`, `|` and control characters."""
    return 0 < len(name) <= 256 and not any(sign in ":/|" or not sign.isprintable() for sign in name)
