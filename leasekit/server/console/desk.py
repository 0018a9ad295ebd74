"""The desk: take acts, as forms of the console's own pages, and show the pages before and after them.

Rule 1: a form counts only if its origin is this site: browsers say so with each form, and other sites cannot.
Rule 2: whether an act is allowed is judged here, for each request, whatever the pages have offered.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from leasekit.server.console.acts import ACTS, SAID, Act, Done
from leasekit.server.console.bulk_acts import BULK_ACTS
from leasekit.server.console.kind_acts import SET_KIND
from leasekit.server.console.rendering import number
from leasekit.server.console.visit import Visit, parameters

_ALL: Mapping[str, Act] = {**ACTS, **BULK_ACTS, "set-kind": SET_KIND}
_LONGEST = 64 * 1024  # bytes of a form
_FORM = "application/x-www-form-urlencoded"


async def form_of(request: Request, is_own: Callable[[Request, str], bool]) -> dict[str, str]:
    """Return what a form says. Raises `HTTPException` unless its origin `is_own`: that of this site."""
    if not is_own(request, request.headers.get("origin", "")):
        raise HTTPException(403, "the form comes from a web page of another origin, or from none")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415, f"the body must be {_FORM}")
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST:
                raise HTTPException(413, f"the form is larger than {_LONGEST:,} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected before the form was complete") from None
    return parameters(body)


def _chosen(visit: Visit) -> tuple[Act, Any]:
    """Return the act that is asked for, and its parameters. Raises `HTTPException` if there is none."""
    act = _ALL.get(visit.given.get("act", ""))
    if act is None:
        raise HTTPException(404, "there is no such act")
    of_act = replace(visit, given={name: text for name, text in visit.given.items() if name != "act"})
    return act, of_act.params(act.params)


async def planned(visit: Visit) -> Mapping[str, Any]:
    """Say what an act will do."""
    _check_right(visit)
    act, wanted = _chosen(visit)
    plan = await act.plan(visit, wanted)
    shown = {name: value for name, value in visit.given.items() if name not in {field.name for field in plan.fields}}
    return {"title": plan.title, "plan": plan, "form": {**shown, **plan.hidden}}


async def done(visit: Visit) -> Response | Mapping[str, Any]:
    """Do an act, and lead to the page that shows it; or, if there is more to do, to the next part."""
    _check_right(visit)
    act, wanted = _chosen(visit)
    answer = await act.run(visit, wanted)
    if not isinstance(answer, Done):
        return {"title": answer.title, "rest": answer, "form": {**answer.form, "act": visit.given["act"]}}
    joint = "&" if "?" in answer.page else "?"
    count = "" if answer.tasks is None else f"&n={answer.tasks}"
    return RedirectResponse(f"{answer.page}{joint}done={answer.said}{count}", 303)


def notice(given: dict[str, str]) -> str | None:
    """Take what was done out of the parameters of a page, and return the sentence about it."""
    said, count = SAID.get(given.pop("done", "")), given.pop("n", None)
    if said is None or count is None:
        return said
    return f"{number(int(count))} {said}" if count.isascii() and count.isdigit() and len(count) < 16 else None


def _check_right(visit: Visit) -> None:
    if not visit.may_act:
        raise HTTPException(403, "you may only look: the console is read-only, or the access token has no `operate`")
