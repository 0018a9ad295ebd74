"""The engine behind HTTP, as an ASGI application: `Api` is for use with another ASGI server too."""

import asyncio
import functools
import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPMethod
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leasekit.server.engine import Engine
from leasekit.server.http.auth import Authenticator
from leasekit.server.http.bodies import Bodies
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.echo import echo_request_header
from leasekit.server.http.lease_kinds import LeaseKinds
from leasekit.server.http.metrics import Metrics
from leasekit.server.http.needs import ANY_TOKEN
from leasekit.server.http.openapi import document
from leasekit.server.http.operations import JSON, Operation
from leasekit.server.http.problems import problem_of
from leasekit.server.http.reach import LOCAL_REACH, Reach, TlsFiles
from leasekit.server.http.request import ApiRequest, Parts
from leasekit.server.http.routes import OPERATIONS
from leasekit.server.http.sending import BIG, Sending
from leasekit.server.node_roles import Role, listed, role_of
from leasekit.wire import STORE_HEADER

BODY_TIMEOUT = 30.0
CONSOLE = "/console"
"""The path of the web console."""
ConsoleMode = Literal["off", "read-only", "on"]
_PROBES = frozenset({"/healthz", "/readyz"})


@dataclass(frozen=True, kw_only=True)
class Security:
    """The protection of a server that other machines can reach."""

    tls: TlsFiles | None = None
    require_tokens: bool = False
    server_names: Sequence[str] = ()
    behind_proxy: Sequence[str] = ()

    def reach(self, *, is_open: bool) -> Reach:
        """Return how the server is reached. Raises `ConfigError` if that would be unprotected."""
        return Reach.of(
            is_open=is_open,
            has_tls=self.tls is not None,
            needs_tokens=self.require_tokens,
            names=self.server_names,
            proxies=self.behind_proxy,
        )


NO_SECURITY = Security()


class Api(Router):
    """The ASGI application over an open engine. A request body must arrive within `body_timeout` seconds.

    `reach` says who can reach the server, and what requests need therefore.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        body_timeout: float = BODY_TIMEOUT,
        reach: Reach = LOCAL_REACH,
        console: ConsoleMode = "off",
    ) -> None:
        sending = Sending()
        engine.check_room = sending.check_room
        metrics = Metrics(engine)
        self.parts = Parts(
            *(engine, DisconnectWatch(), DisconnectWatch(), metrics, sending),
            bodies=Bodies(body_timeout),
            lease_kinds=LeaseKinds(functools.partial(engine.queries.kinds_of, is_vital=True)),
            auth=Authenticator(engine, is_required=reach.needs_tokens, peer=reach.peer, count=metrics.refuse),
        )
        self.reach = reach
        self.store_header = STORE_HEADER.encode(), engine.store_id.encode()
        operations = [*OPERATIONS, _OPENAPI]
        paths = dict.fromkeys(operation.path for operation in operations)
        routes: list[BaseRoute] = [
            _Route(self, path, [each for each in operations if each.path == path]) for path in paths
        ]
        if console != "off":
            routes.append(_ConsoleRoute(self, console))
        super().__init__(routes, redirect_slashes=False, default=_Resource(self, None, {}))


class _Route(Route):
    """The route of one path. It answers methods that it does not have, unless another route has them."""

    def __init__(self, api: Api, path: str, operations: Sequence[Operation]) -> None:
        of_method = {operation.method: operation for operation in operations}
        if (reads := of_method.get(HTTPMethod.GET)) is not None and reads.media_type != "text/event-stream":
            of_method[HTTPMethod.HEAD] = reads  # the HTTP layer sends the head alone
        super().__init__(path, _Resource(api, path, of_method))
        self.methods = {*of_method, "OPTIONS"}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _ConsoleRoute(Mount):
    """The route of the web console, which is loaded by its first request."""

    def __init__(self, api: Api, mode: ConsoleMode) -> None:
        super().__init__(CONSOLE, self._serve)
        self._api, self._mode = api, mode
        self._console: ASGIApp | None = None
        self.methods = {"GET", "HEAD", "POST"}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and scope["path"] == CONSOLE:
            return Match.FULL, {"root_path": scope.get("root_path", "") + CONSOLE, "endpoint": self.app}
        return super().matches(scope)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._api.parts.metrics.count(CONSOLE, scope["method"], message["status"])
            await send(message)

        request = ApiRequest(scope, receive, self._api.parts)
        try:
            self._api.reach.check(request)
            console = self._console or await self._load()
        except HTTPException as error:
            await problem_of(request, error)(scope, receive, send_and_count)
        else:
            await console(scope, receive, send_and_count)

    async def _load(self) -> ASGIApp:
        # In a thread, because the import takes longer than a heartbeat may wait.
        site = await asyncio.to_thread(importlib.import_module, "leasekit.server.console.site")
        console: ASGIApp = self._console or site.Console(
            self._api.parts.engine,
            mode=self._mode,
            auth=self._api.parts.auth,
            has_proxy=bool(self._api.reach.proxies),
            is_own_origin=self._api.reach.is_own_origin,
        )
        self._console = console
        return console


class _Resource:
    """Run the operations of one path, as an ASGI application; `path` is None for all unknown paths."""

    def __init__(self, api: Api, path: str | None, of_method: dict[HTTPMethod, Operation]) -> None:
        self._api = api
        self._path = path
        self._of_method = of_method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                echo_request_header(message, scope)
                message["headers"] = [*message["headers"], self._api.store_header]
                self._api.parts.metrics.count(self._path, scope["method"], message["status"])
            await send(message)

        request = ApiRequest(scope, receive, self._api.parts)
        try:
            response = await self._answer(request)
        except Exception as error:  # noqa: BLE001 - each is answered, and those that are not expected are logged
            response = problem_of(request, error)
        await response(scope, receive, send_and_count)

    async def _answer(self, request: ApiRequest) -> Response:
        self._api.reach.check(request, is_probe=self._path in _PROBES)
        if self._path is None:
            raise HTTPException(404, "there is no such route")
        _check_role(self._path, self._api.parts.engine.roles)
        allow = {"allow": ", ".join(sorted([*self._of_method, "OPTIONS"]))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allow)
        operation = self._of_method.get(request.method)  # type: ignore[call-overload]  # HTTPMethod is a str
        if operation is None:
            raise HTTPException(405, "this route does not accept this method: use one of the `allow` header", allow)
        if not operation.needs.is_open:
            await request.authenticate()
            operation.needs.check_scope(request.access)
        sending, is_read = self._api.parts.sending, request.method == "GET" and not operation.needs.is_open
        if is_read:
            sending.check_reads()
        answer = await operation(request)
        if isinstance(answer, Response):
            return answer
        body = msgspec.json.encode(answer)
        if is_read and len(body) > BIG:
            sending.check_reads()  # others may have come since
        return sending.of(body)


def _check_role(path: str, roles: Collection[Role]) -> None:
    """Refuse requests that are for a server of another role."""
    needed = role_of(path)
    if needed is not None and needed not in roles:
        raise HTTPException(421, f"this server has the role {listed(roles)}: send this request to a server of {needed}")


async def _openapi(request: ApiRequest) -> Response:
    return Response(_document(), media_type=JSON)


@functools.cache
def _document() -> bytes:
    return document(OPERATIONS)


_OPENAPI = Operation(HTTPMethod.GET, "/openapi.json", _openapi, None, None, dict, JSON, {}, ANY_TOKEN)
