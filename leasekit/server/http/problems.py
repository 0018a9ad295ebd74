"""Refusals: every refusal is answered with an RFC 9457 problem document.

An error of the client is never a 5xx. No answer contains a traceback: an unexpected error is logged here, and the
client learns only that it happened.
"""

import http
import logging
import math
from collections.abc import Mapping, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leasekit._lifecycle.validation import shortened
from leasekit.errors import AccessDenied, Refused, Throttled, Unavailable
from leasekit.server.log_limit import LogLimit
from leasekit.server.roles.tokens import Conflict
from leasekit.wire import ItemError, Problem, ProblemType

MEDIA_TYPE = "application/problem+json"

logger = logging.getLogger("leasekit.server.requests")
logger.addFilter(LogLimit())


class Malformed(HTTPException):
    """The request body is not JSON, or did not arrive."""

    def __init__(self, detail: str) -> None:
        super().__init__(400, detail)


class TooDeep(Malformed):
    """The request body is nested too deeply to be decoded."""


class Unauthenticated(HTTPException):
    """The request has no access token, or none that is valid."""

    def __init__(self, detail: str) -> None:
        super().__init__(401, detail, {"www-authenticate": 'Bearer realm="leasekit"'})


class Forbidden(HTTPException):
    """The access token lacks a right. `errors`: for kinds that the request names."""

    def __init__(self, detail: str, *, errors: Sequence[ItemError] = ()) -> None:
        super().__init__(403, detail)
        self.errors = errors


class UnknownToken(HTTPException):
    """The route exists, but no access token has this id or name, or its caller may not see it."""

    def __init__(self, token: str) -> None:
        super().__init__(404, f"there is no access token {token!r}")


class UnknownTask(HTTPException):
    """The route exists, but no task has this id."""

    def __init__(self, task_id: str) -> None:
        super().__init__(404, f"there is no task {task_id!r}")


class UnknownKind(HTTPException):
    """The route exists, but this kind has no settings."""

    def __init__(self, kind: str) -> None:
        super().__init__(404, f"the kind {kind!r} has no settings")


class UnknownPeriodic(HTTPException):
    """The route exists, but no periodic task has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(404, f"there is no periodic task {name!r}")


class UnknownWorker(HTTPException):
    """The route exists, but no worker that holds leases, or called lately, has this name."""

    def __init__(self, worker: str) -> None:
        super().__init__(404, f"there is no worker {worker!r}: none of this name holds tasks, or has called lately")


def problem_of(request: Request, error: Exception) -> Response:
    match error:
        case Refused():
            errors = [msgspec.convert(entry, ItemError) for entry in error.errors]
            return _problem(409 if isinstance(error, Conflict) else 422, str(error), errors=errors)
        case Throttled():
            # Whole seconds, as in RFC 9110, and at least 1: a 0 would invite an immediate repeat.
            wait = max(1, math.ceil(error.retry_after or 1))
            return _problem(429, str(error), headers={"retry-after": str(wait)})
        case AccessDenied():
            return _problem(403, str(error), type=_TYPES[Forbidden])
        case Unavailable():
            return _problem(503, str(error))
        case Forbidden():
            return _problem(403, error.detail, type=_TYPES[Forbidden], errors=error.errors)
        case HTTPException():
            return _problem(error.status_code, error.detail, type=_TYPES.get(type(error)), headers=error.headers)
        case _:
            logger.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
            return _problem(500, _UNEXPECTED)


_UNEXPECTED = "an error of the server: whether the request was applied is unknown, and it may be repeated"


_TYPES: Mapping[type[HTTPException], ProblemType] = {
    Malformed: "urn:leasekit:problem:malformed",
    TooDeep: "urn:leasekit:problem:refused",
    UnknownTask: "urn:leasekit:problem:no-such-task",
    Unauthenticated: "urn:leasekit:problem:unauthenticated",
    Forbidden: "urn:leasekit:problem:forbidden",
    UnknownToken: "urn:leasekit:problem:no-such-token",
    UnknownKind: "urn:leasekit:problem:no-such-kind",
    UnknownPeriodic: "urn:leasekit:problem:no-such-periodic",
    UnknownWorker: "urn:leasekit:problem:no-such-worker",
}


def _problem(
    status: int,
    detail: str,
    *,
    type: ProblemType | None = None,  # noqa: A002 - the name that RFC 9457 gives it
    errors: Sequence[ItemError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    document = Problem(
        type=type or _type_of(status),
        status=status,
        title=http.HTTPStatus(status).phrase,
        detail=shortened(detail),
        errors=list(errors) or None,
    )
    return Response(msgspec.json.encode(document), status, headers, MEDIA_TYPE)


def _type_of(status: int) -> ProblemType:
    if status in (409, 413, 422):
        return "urn:leasekit:problem:refused"
    if status in (408, 429) or status >= 500:
        return "urn:leasekit:problem:later"
    return "urn:leasekit:problem:misdirected"
