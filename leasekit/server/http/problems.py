"""Refusals: every refusal is answered with an RFC 9457 problem document.

An error of the client is never a 5xx. No answer contains a traceback: an unexpected error is logged here, and the
client learns only that it happened.
"""

import http
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, NotFoundException, ValidationException

from leasekit._lifecycle.validation import shortened
from leasekit.errors import Refused, Throttled, Unavailable
from leasekit.wire import ItemError, Problem, ProblemType

__all__ = ["HANDLERS", "MEDIA_TYPE", "Malformed", "TooDeep", "UnknownTask", "problem"]

MEDIA_TYPE = "application/problem+json"

logger = logging.getLogger("leasekit.server")


class Malformed(HTTPException):
    """The request body is not JSON, or did not arrive."""

    status_code = 400


class TooDeep(HTTPException):
    """The request body is nested too deeply to be decoded."""

    status_code = 400


class UnknownTask(NotFoundException):
    """The route exists, but no task has this id."""


def problem(
    status: int,
    detail: str,
    *,
    type: ProblemType | None = None,  # noqa: A002 - the name that RFC 9457 gives it
    errors: Sequence[ItemError] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response[Problem]:
    """Return the answer that says why a request is refused. Without `type`, the status decides on the problem type."""
    document = Problem(
        type=type or _type_of(status),
        status=status,
        title=http.HTTPStatus(status).phrase,
        detail=shortened(detail),
        errors=list(errors) if errors else None,
    )
    return Response(document, status_code=status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def _type_of(status: int) -> ProblemType:
    if status in (413, 422):
        return "urn:leasekit:problem:refused"
    if status in (408, 429) or status >= 500:
        return "urn:leasekit:problem:later"
    return "urn:leasekit:problem:misdirected"


# From exceptions to answers -----------------------------------------------------------------------------------


def _refused(_: Request[Any, Any, Any], error: Refused) -> Response[Problem]:
    return problem(422, str(error), errors=[msgspec.convert(entry, ItemError) for entry in error.errors])


def _throttled(_: Request[Any, Any, Any], error: Throttled) -> Response[Problem]:
    # Whole seconds, as in RFC 9110, and at least 1: a 0 would invite an immediate repeat.
    wait = max(1, math.ceil(error.retry_after or 1))
    return problem(429, str(error), headers={"retry-after": str(wait)})


def _unavailable(_: Request[Any, Any, Any], error: Unavailable) -> Response[Problem]:
    return problem(503, str(error))


def _bad_parameters(_: Request[Any, Any, Any], error: ValidationException) -> Response[Problem]:
    entries = error.extra if isinstance(error.extra, list) else []
    errors = [ItemError(detail=shortened(str(e.get("message"))), field=e.get("key")) for e in entries]
    return problem(422, "a parameter does not fit: see `errors`", errors=errors)


def _http(request: Request[Any, Any, Any], error: HTTPException) -> Response[Problem]:
    if error.status_code == 500:
        return _unexpected(request, error)
    detail = _PLAIN.get(error.status_code) if type(error).__module__.startswith("litestar.") else None
    return problem(error.status_code, detail or error.detail, type=_TYPES.get(type(error)), headers=error.headers)


_TYPES: Mapping[type[HTTPException], ProblemType] = {
    Malformed: "urn:leasekit:problem:malformed",
    TooDeep: "urn:leasekit:problem:refused",
    UnknownTask: "urn:leasekit:problem:no-such-task",
}
_PLAIN = {
    404: "there is no such route",
    405: "this route does not accept this method: use one that the `allow` header lists",
}


def _unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[Problem]:
    logger.error("%s %s failed", request.scope["method"], request.scope["path"], exc_info=error)
    return problem(500, "an error of the server: whether the request was applied is unknown, and it may be repeated")


HANDLERS: dict[int | type[Exception], Callable[[Request[Any, Any, Any], Any], Response[Any]]] = {
    Refused: _refused,
    Throttled: _throttled,
    Unavailable: _unavailable,
    ValidationException: _bad_parameters,
    HTTPException: _http,
    Exception: _unexpected,
}
