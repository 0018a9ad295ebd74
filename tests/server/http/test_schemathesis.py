"""Requests that Schemathesis makes up from our own OpenAPI document: answered as the document says, and never a 5xx."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from leasekit.server.http import routes
from leasekit.server.http.openapi import document
from leasekit.server.http.routes import OPERATIONS
from tests.sampling import IS_SOAK, in_soak
from tests.server.http.conftest import Running

pytestmark = pytest.mark.soak
# Sample: a twentieth of the examples, a tenth of the histories, and none of the bounds that Schemathesis enumerates
# (1,200 cases, made up whenever tests are collected).
EXAMPLES = in_soak(500, by_default=25)  # of each operation
HISTORIES = in_soak(100, by_default=10)  # of calls that feed one another
ROUNDS = 20  # of histories, until one of them goes all the way, which is for chance to say
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

MAY_REFUSE = {
    ("POST", "/v1/vacuum"),
    ("POST", "/v1/tokens"),
    ("PUT", "/v1/periodic/{name}"),
    ("POST", "/v1/tasks/cancel-matching"),
    ("POST", "/v1/tasks/reschedule-matching"),
    ("PATCH", "/v1/tasks/{task_id}"),
}

LEASE = {"id": "$response.body#/tasks/0/id", "token": "$response.body#/tasks/0/token"}
LINKS: dict[str, dict[str, tuple[str, Any]]] = {
    "/v1/tasks": {
        "claim": (
            "claim",
            {"worker": "w", "claim_id": "$response.body#/tasks/0/id", "kinds": ["$request.body#/tasks/0/kind"]},
        ),
        "cancel": ("cancel", {"ids": ["$response.body#/tasks/0/id"]}),
    },
    "/v1/claims": {
        "beat": ("heartbeat", {"worker": "w", "beats": [LEASE]}),
        "succeed": ("results", {"worker": "w", "results": [{**LEASE, "outcome": "success"}]}),
        "fail": ("results", {"worker": "w", "results": [{**LEASE, "outcome": "retry", "retry_after": 0}]}),
    },
}
"""Of each path: what its answer leads to; the operation, and its body."""


def linked() -> dict[str, Any]:
    """Our document, and which call follows which."""
    drawn: dict[str, Any] = json.loads(document(OPERATIONS))
    for path, links in LINKS.items():
        drawn["paths"][path]["post"]["responses"]["200"]["links"] = {
            name: {"operationId": operation, "requestBody": body} for name, (operation, body) in links.items()
        }
    return drawn


SCHEMA = schemathesis.openapi.from_dict(linked())
SCHEMA.config.phases.coverage.enabled = IS_SOAK
SCHEMA.config.checks.negative_data_rejection.expected_statuses = ["400", "401", "403", "404", "409", "414", "422"]


@SCHEMA.hook
def filter_path_parameters(_: schemathesis.HookContext, values: Any) -> bool:
    """On its way through `requests`, an id that looks like quoted already comes out as another one."""
    return "%" not in str(values)


@SCHEMA.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """No schema can say that an access token must end in the future, that instants have bounds, and what is a mark."""
    if _has_made_up_mark(context, body):
        return False
    ends = body.get("expires_at") if isinstance(body, dict) else None
    is_over = isinstance(ends, str) and ends <= f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}"
    return not is_over and _has_no_odd_instant(body)


@SCHEMA.hook
def filter_query(context: schemathesis.HookContext, values: Any) -> bool:
    return _has_no_odd_instant(values) and not _has_made_up_mark(context, values)


def _has_made_up_mark(context: schemathesis.HookContext, values: Any) -> bool:
    """Whether a cursor of tasks is a text that fits the schema: only a server can make one."""
    of_tasks = context.operation is not None and context.operation.path.startswith(("/v1/tasks", "/v1/chains"))
    cursor = values.get("cursor") if of_tasks and isinstance(values, dict) else None
    return isinstance(cursor, str) and len(cursor) <= 128


def _has_no_odd_instant(value: Any) -> bool:
    """Whether no instant is on the first or the last day of the calendar."""
    return not any(f"{day}T" in str(value) for day in ("0001-01-01", "9999-12-31"))


@pytest.fixture(scope="module")
def url(server: Running) -> Iterator[str]:
    """Where the server is. Claims hardly wait here, and streams of events end at once."""
    server.engine.feed.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MAX_WAIT", 0.01)
        yield f"http://127.0.0.1:{server.port}"
    assert server.get("/readyz")["status"] == "ready"


@pytest.fixture(scope="module")
def session(server: Running) -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        session.headers["authorization"] = f"Bearer {server.give_token()}"  # others are made on the way
        yield session


def excluded(case: schemathesis.Case[Any]) -> list[Any]:
    """Return the checks that are left out where no schema tells what is refused.

    PostgreSQL refuses to be vacuumed; texts may be no cron expressions or tokens of dry runs; a task may have ended;
    an access token may have a name with a hyphen or a space at its ends, or a pattern with a * in its middle.
    """
    may_refuse = (case.method.upper(), case.path) in MAY_REFUSE or any(map(_may_be_refused, _tasks_of(case.body)))
    return [positive_data_acceptance] if may_refuse else []


def _tasks_of(body: Any) -> list[Any]:
    """Return the new tasks of a request."""
    if not isinstance(body, dict):
        return []
    then = [task for result in body.get("results", ()) for task in result.get("then", ())]
    return [*body.get("tasks", ()), *then]


def _may_be_refused(task: Any) -> bool:
    """Return whether a task runs after itself, or has labels, which settings of its kind may rule out."""
    return task.get("id") in task.get("after", ()) or bool(task.get("requires") or task.get("prefers"))


@pytest.mark.slow
@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=SLOW, deadline=None)
def test_every_answer_is_one_that_the_document_tells_of(
    case: schemathesis.Case[Any], url: str, session: requests.Session
) -> None:
    case.call_and_validate(base_url=url, session=session, excluded_checks=excluded(case))


@pytest.mark.slow
def test_so_is_every_answer_to_calls_that_feed_one_another(
    server: Running, url: str, session: requests.Session
) -> None:
    class Machine(SCHEMA.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, _: schemathesis.Case[Any]) -> dict[str, Any]:
            return {"base_url": url, "session": session}

        def validate_response(self, response: Any, case: schemathesis.Case[Any], **_: Any) -> None:
            case.validate_response(response, excluded_checks=excluded(case))

    options: dict[str, Any] = {"stateful_step_count": 10, "suppress_health_check": SLOW, "deadline": None}
    for _ in range(ROUNDS):
        Machine.run(settings=settings(max_examples=HISTORIES, derandomize=False, **options))  # each round others
        # Only whoever has claimed a task can end it: they did feed one another.
        if any("success" in counts for counts in server.get("/v1/stats")["kinds"].values()):
            return
    pytest.fail("no history led from a schedule to a success")
