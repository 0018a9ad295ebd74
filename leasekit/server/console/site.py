"""The console as an ASGI application: which path is which page, and the headers of all of them.

Rule 1: the console asks the engine what the API asks it, and has no queries of its own.
Rule 2: each answer has the headers below: nothing is loaded from elsewhere, no script or style is inline, no page can
        be framed.
"""

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from leasekit.errors import LeasekitError, Refused, Throttled, Unavailable
from leasekit.server.access import LOCAL, Access
from leasekit.server.console.desk import done, form_of, notice, planned
from leasekit.server.console.pages import NAV, PAGES, Page
from leasekit.server.console.rendering import render
from leasekit.server.console.sessions import Sessions
from leasekit.server.console.streams import events, pulses
from leasekit.server.console.visit import Mode, Visit, parameters
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.auth import Authenticator
from leasekit.server.http.problems import Unauthenticated
from leasekit.server.http.reach import LOCAL_REACH
from leasekit.server.log_limit import LogLimit

logger = logging.getLogger("leasekit.server.console")
logger.addFilter(LogLimit())

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers would send no origin with a form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_FILES = ("console.css", "console.js", "events.js", "keys.js", "live.js", "stream.js", "times.js", "icon.svg")
_FRESH = 1.0  # seconds for which a page that was written for one reader is good for others
READ_ONLY = "leasekit-console-read-only"
"""A request with this header is answered as by a read-only console; it can take rights away, and give none."""
_ACT = "do"
_PAGES = 200  # pages that are kept for others, at most


class Console:
    """The console over an open engine. Mount it at any path: all its links are relative."""

    def __init__(
        self,
        engine: Engine,
        *,
        mode: Mode = "on",
        auth: Authenticator | None = None,
        has_proxy: bool = False,
        is_own_origin: Callable[[Request, str], bool] = LOCAL_REACH.is_own_origin,
    ) -> None:
        """`auth` says which callers may look, and act; None: all, because another application guards the console.

        `has_proxy`: a proxy that has TLS is in front of this server. `is_own_origin` says whether the pages of an
        origin are those of the server that a request asks.
        """
        self._engine = engine
        self._mode = mode
        self._auth = auth
        self._is_own = is_own_origin
        self._sessions = None if auth is None else Sessions(engine, auth, has_proxy=has_proxy)
        self._written = _Written()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Exception as error:  # noqa: BLE001 - each is answered, and those that are not expected are logged
            response = self._refusal(request, error)
        response.headers.update(HEADERS)
        response.headers.setdefault("cache-control", "no-store")
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        name = _name(request)
        if name is None:  # links of the page would lead elsewhere
            return RedirectResponse(request.scope["path"].rpartition("/")[2] + "/", 308)
        if name in _FILES:
            return _file(request, name)
        if name == "login":
            return await self._log_in(request)
        if name == "logout":
            return await self._log_out(request)
        access = await self._access_of(request)
        if name == _ACT:
            return await self._act(request, access)
        if request.method not in {"GET", "HEAD"}:
            raise HTTPException(405, "a page is only looked at", {"allow": "GET, HEAD"})
        if name in _STREAMS and request.method == "GET":
            return StreamingResponse(_STREAMS[name](self._visit(request, access)), media_type="text/event-stream")
        if (page := PAGES.get(name)) is None:
            raise HTTPException(404, "there is no such page")
        if page.needs_operate and not access.has(["operate"]):
            raise HTTPException(403, "this page is for operators: the access token has no scope `operate`")
        return await self._page(request, page, access)

    async def _access_of(self, request: Request) -> Access:
        """Return who asks. Raises `HTTPException` if they may not look."""
        if self._auth is None or self._sessions is None:
            return LOCAL
        access = _checked(await self._sessions.access_of(request) or await self._auth.access_of(request))
        CALLER.set(access.caller)
        return access

    async def _goes_on(self, request: Request) -> bool:
        """Return whether who has sent this request may still look."""
        try:
            await self._access_of(request)
        except (HTTPException, LeasekitError):
            return False
        return True

    async def _log_in(self, request: Request) -> Response:
        """Show the form for an access token, or begin a session with one."""
        fault = None
        if request.method == "POST" and self._auth is not None and self._sessions is not None:
            try:
                access = _checked(
                    await self._auth.log_in(request, (await form_of(request, self._is_own)).get("token", ""))
                )
            except Unauthenticated as error:
                fault = error.detail
            else:
                response = RedirectResponse("./", 303)
                await self._sessions.begin(request, response, access)
                return response
        values: dict[str, Any] = {"nav": (), "current": "", "title": "Log in", "live": False, "notice": None}
        text = render("login.html", now=_now(self._engine), **values, who=None, fault=fault)
        return Response(text, 401 if fault else 200, media_type="text/html")

    async def _log_out(self, request: Request) -> Response:
        if request.method != "POST":
            raise HTTPException(405, "a session is left by a form", {"allow": "POST"})
        await form_of(request, self._is_own)
        response = RedirectResponse("login", 303)
        if self._sessions is not None:
            await self._sessions.end(request, response)
        return response

    async def _act(self, request: Request, access: Access) -> Response:
        """Say what an act will do (GET), or do it (POST)."""
        if request.method == "POST":
            form = await form_of(request, self._is_own)
            visit = self._visit(request, await self._access_of(request), form)  # it may have ended meanwhile
            values = await done(visit)
        elif request.method in {"GET", "HEAD"}:
            visit = self._visit(request, access)
            values = await planned(visit)
        else:
            raise HTTPException(405, "an act is a form", {"allow": "GET, HEAD, POST"})
        if isinstance(values, Response):
            return values
        text = await asyncio.to_thread(
            render, "do.html", now=visit.now, nav=NAV, current=_ACT, live=False, notice=None, who=_who(access), **values
        )
        return Response(text, media_type="text/html")

    def _visit(self, request: Request, access: Access, form: Mapping[str, str] | None = None) -> Visit:
        given = parameters(request.scope["query_string"]) if form is None else form
        by = access.name if access.token_id is not None else None if request.client is None else request.client.host
        return Visit(
            engine=self._engine,
            given=given,
            access=access,
            may_act=self._mode == "on" and access.has(["operate"]) and READ_ONLY not in request.headers,
            by=by,
            goes_on=functools.partial(self._goes_on, request),
        )

    async def _page(self, request: Request, page: Page, access: Access) -> Response:
        visit = self._visit(request, access)
        key = f"{access.token_id} {visit.may_act} {page.name}?{request.scope['query_string'].decode('latin-1')}"
        text = await self._written.get(key, lambda: _write(visit, page))
        return text if isinstance(text, Response) else Response(text, media_type="text/html")

    def _refusal(self, request: Request, error: Exception) -> Response:
        if isinstance(error, Unauthenticated) and request.headers.get("sec-fetch-mode", "navigate") == "navigate":
            return RedirectResponse("login", 303)
        status, detail, headers = _said(error)
        if status == 500:
            logger.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        values: dict[str, Any] = {"nav": NAV, "current": "", "title": "Not shown", "live": False, "notice": None}
        text = render("refusal.html", now=_now(self._engine), **values, who=None, detail=detail)
        return Response(text, status, headers, "text/html")


_STREAMS: Mapping[str, Callable[[Visit], AsyncGenerator[bytes]]] = {"pulse": pulses, "events": events}


def _checked(access: Access) -> Access:
    """Return who asks. Raises `HTTPException` if they may not look: then no session begins either."""
    if not access.has(["read"]) or not access.has_all_kinds:
        raise HTTPException(403, f"the console needs the scope `read` for all kinds: {access.name!r} has less")
    return access


def _who(access: Access) -> str | None:
    """Return the name of the token of a session; None: none was needed."""
    return access.name if access.token_id is not None else None


def _now(engine: Engine) -> datetime:
    return datetime.fromtimestamp(engine.clock.peek(), UTC)


async def _write(visit: Visit, page: Page) -> str | Response:
    given = dict(visit.given)
    said = notice(given)
    visit = replace(visit, given=given)
    values = await page.run(visit)
    if isinstance(values, Response):
        return values
    shared: dict[str, Any] = {"nav": NAV, "current": page.name, "title": page.title, "live": page.is_live}
    shared |= {"may_act": visit.may_act, "given": visit.given, "notice": said, "who": _who(visit.access)}
    # In a thread: heartbeats are answered meanwhile, also when a template is read for the first time.
    return await asyncio.to_thread(render, page.template, now=visit.now, **{**shared, **values})


def _name(request: Request) -> str | None:
    """Return the name of a page, which is the last part of its path; None: the path of the console itself."""
    path, root = request.scope["path"], request.scope.get("root_path", "")
    inner = path.removeprefix(root) if root and path.startswith(root) else path
    return None if not inner.startswith("/") else inner.removeprefix("/")


class _Written:
    """The pages that were written lately: many readers of one page cost as much as one."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[float, asyncio.Task[str | Response]]] = {}

    async def get(self, key: str, write: Callable[[], Awaitable[str | Response]]) -> str | Response:
        now = asyncio.get_running_loop().time()
        until, page = self._pages.get(key, (0.0, None))
        if page is None or until < now:
            self._forget(now)
            page = asyncio.ensure_future(write())
            assert page is not None  # noqa: S101 - it was just made
            self._pages[key] = now + _FRESH, page
        return await asyncio.shield(page)

    def _forget(self, now: float) -> None:
        self._pages = {key: page for key, page in self._pages.items() if page[0] >= now}
        while len(self._pages) >= _PAGES:
            del self._pages[next(iter(self._pages))]


@functools.cache
def _content(name: str) -> tuple[bytes, str]:
    """Return a file of the console, and its tag."""
    content = resources.files("leasekit.server.console").joinpath("static", name).read_bytes()
    return content, f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'


def _file(request: Request, name: str) -> Response:
    content, tag = _content(name)
    headers = {"etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])


_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def _said(error: Exception) -> tuple[int, str, Mapping[str, str] | None]:
    """Return status, text and headers of a refusal."""
    match error:
        case Refused():
            return 422, str(error), None
        case Throttled():
            return 429, str(error), {"retry-after": "1"}
        case Unavailable():
            return 503, str(error), None
        case HTTPException():
            return error.status_code, error.detail, error.headers
        case _:
            return 500, "an error of the server, which is in its log", None
