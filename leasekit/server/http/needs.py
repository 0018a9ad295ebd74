"""Needs: what a caller must be allowed to do for an operation, and where its kinds are found.

Rule 1: each operation says what it needs; one that says nothing cannot be defined.
Rule 2: where a request names kinds itself, one that its caller may not touch is refused, whole, with 403. The answer
does not depend on what there is.
Rule 3: where a request names tasks, those of other kinds are answered like tasks that do not exist.
Rule 4: where a request selects or lists, it sees what its caller may touch, and nothing tells that there is more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import UNSET

from leasekit.errors import Refused
from leasekit.server.access import Access
from leasekit.server.engine import Engine
from leasekit.server.http.problems import Forbidden, UnknownTask
from leasekit.tokens import SCOPES, Scope
from leasekit.wire import ItemError, SettlementItem

__all__ = ["ANYBODY", "ANY_TOKEN", "Needs", "Where", "check", "check_kinds", "check_successors", "needs"]


_LISTED = 100  # kinds of a request that its refusal lists, each with its place


class Where(StrEnum):
    """The place in a request at which its kinds are found."""

    NOWHERE = "it concerns no kind"
    ALL = "it concerns all kinds"
    PATH = "its path names one"
    TASK = "its path names a task"
    TASKS = "its body has tasks"
    KINDS = "its body names some"
    ITEMS = "its body names tasks, each of which is judged by itself"
    SELECTED = "its body selects tasks, or names them"
    LISTED = "its answer has a list"
    PERIODIC = "its path names a periodic task"
    TOKENS = "it concerns access tokens, which are compared with that of the caller"


class Needs(NamedTuple):
    """The scopes of which one is needed, for the kinds that are found `where`."""

    scopes: Sequence[Scope] = ()
    where: Where = Where.NOWHERE
    is_open: bool = False  # no access token is needed at all

    def __str__(self) -> str:
        if self.is_open:
            return "no access token"
        scopes = " or ".join(f"`{scope}`" for scope in self.scopes) or "any access token"
        return f"{scopes}: {self.where}"

    def check_scope(self, access: Access) -> None:
        """Raise `Forbidden` if a caller has none of the scopes."""
        if not access.has(self.scopes):
            has = ", ".join(scope for scope in SCOPES if scope in access.scopes)
            raise Forbidden(
                f"the access token {access.name!r} lacks the scope {' or '.join(self.scopes)}: it has {has}"
            )


ANYBODY = Needs(is_open=True)
"""No access token is needed."""
ANY_TOKEN = Needs()
"""A valid access token is needed, whatever its scopes."""


def needs(*scopes: Scope, kinds: Where) -> Needs:
    """Return the needs of an operation: one of these scopes."""
    return Needs(scopes, kinds)


async def check(wanted: Needs, access: Access, engine: Engine, given: Mapping[str, Any]) -> None:
    """Raise `Forbidden` or `UnknownTask` if a caller may not touch the kinds of a request, or select by errors."""
    if wanted.where is Where.SELECTED and "read" not in access.scopes:
        _check_filters(access, given)
    if access.has_all_kinds:
        return
    if wanted.where is Where.ALL:
        scopes, kinds = " or ".join(wanted.scopes), ", ".join(access.kinds.patterns)
        raise Forbidden(
            f"this needs the scope {scopes} for all kinds (*): the access token {access.name!r} has {kinds}"
        )
    if wanted.where is Where.TASK:
        task_id = given["params"].task_id
        if not access.kinds.match((await engine.queries.kinds_of([task_id])).get(task_id, _NO_KIND)):
            raise UnknownTask(task_id)
    if (kinds_of := _NAMED.get(wanted.where)) is not None:
        check_kinds(access, wanted.scopes, kinds_of(given))


def _check_filters(access: Access, given: Mapping[str, Any]) -> None:
    """Raise `Forbidden` if tasks are selected by their errors: the number that match tells what is in them."""
    body = given.get("body")
    if named := [name for name in ("error", "error_type") if getattr(body, name, None) not in (None, UNSET)]:
        raise Forbidden(f"the filter `{named[0]}` needs the scope read too, which {access.name!r} lacks")


def check_kinds(access: Access, scopes: Iterable[Scope], kinds: Iterable[str]) -> None:
    """Raise `Forbidden` if the access token is not for all of these kinds; `scopes` are only named in the message."""
    items = {item: kind for item, kind in enumerate(kinds) if not access.kinds.match(kind)}
    if foreign := list(dict.fromkeys(items.values())):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise Forbidden(
            f"the access token {access.name!r} has the scope {' or '.join(scopes)} for the kinds "
            f"{', '.join(access.kinds.patterns)}, not for {', '.join(map(repr, foreign[:3]))}{more}",
            errors=[
                ItemError(item=item, field="kind", detail=f"the access token is not for {kind!r}")
                for item, kind in list(items.items())[:_LISTED]
            ],
        )


def check_successors(access: Access, results: Sequence[SettlementItem]) -> None:
    """Raise `Refused` for results with successors that the caller could not schedule."""
    if access.has_all_kinds and "submit" in access.scopes:
        return
    errors: list[dict[str, Any]] = []
    for item, result in enumerate(results):
        for kind in dict.fromkeys(task.kind for task in result.then):
            if "submit" not in access.scopes or not access.kinds.match(kind):
                detail = (
                    f"has a task of kind {kind!r}, for which the access token {access.name!r} lacks the scope submit"
                )
                errors.append({"item": item, "field": "then", "detail": detail})
    if errors:
        raise Refused(f"item {errors[0]['item']}: then {errors[0]['detail']}", errors=errors)


_NO_KIND = "/"  # is no kind, and matches no pattern but *
_NAMED: Mapping[Where, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    Where.PATH: lambda given: [given["params"].kind],
    Where.TASKS: lambda given: (task.kind for task in given["body"].tasks),
    Where.KINDS: lambda given: given["body"].kinds,
}
