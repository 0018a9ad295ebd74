"""Pages of names, and the refusals of every operation."""

import heapq
from collections.abc import Iterable
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from leasekit.wire import MAX_BATCH

__all__ = ["ALL", "ANY", "READS", "WRITES", "NamePage", "page_of"]


class NamePage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cursor: Annotated[str, Meta(max_length=4096, pattern=r"^[^\u0000]*\Z")] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = MAX_BATCH


ANY = {
    400: "The request has several `Host` headers.",
    403: "The `Host` header does not name this machine, or the request comes from a web page of another origin.",
    414: "Path and query are too long, or the query has too many fields.",
    421: "The server has other roles: this request is for another server of the same database.",
    422: "A parameter does not fit; `errors` names it.",
    431: "The head has too many fields.",
}
"""The refusals of an operation that needs no access token."""

ALL = ANY | {
    401: "The request has no access token, or none that is valid: it is unknown, was revoked, or has expired.",
    403: f"{ANY[403]} Or: the access token lacks a scope, or a kind that the request names; `detail` says which.",
    429: "CapacityExceeded: the client has sent too many access tokens that are not valid.",
}
"""The refusals of an operation that needs one."""

READS = ALL | {
    429: (
        "CapacityExceeded: nothing was applied, except if two answers to the same claim are still being sent. "
        "Repeat the request after `Retry-After` seconds."
    ),
    503: "The store does not answer: whether the request was applied is unknown, and it may be repeated.",
}
WRITES = READS | {
    400: "The body is not JSON.",
    408: "The body took too long to arrive.",
    413: "The body is too big.",
    415: "The body is not `application/json`.",
    422: "The body does not fit the schema or the bounds: nothing was applied. `errors` names items and fields.",
}


def page_of(names: Iterable[str], wanted: NamePage) -> tuple[list[str], str | None]:
    """Return the names of a page, in order, and its cursor: the last of them, or None if no more follow."""
    after = (name for name in names if wanted.cursor is UNSET or name > wanted.cursor)
    page = heapq.nsmallest(wanted.limit + 1, after)  # there may be a million
    return page[: wanted.limit], page[wanted.limit - 1] if len(page) > wanted.limit else None
