"""The console of a store that may have no server: for `leasekit console`, and to mount into another application.

Rule 1: a file is opened here if no process has it open, and others of this machine can join then, as with any process.
        If another process has the file, its console is shown: requests go to the socket beside the file.
Rule 2: a database is opened as one more node.
Rule 3: who may look is up to the application that this is mounted in; by itself it answers this machine only.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from leasekit.errors import BackendError, ConfigError
from leasekit.server.console.site import READ_ONLY, Console
from leasekit.server.console.visit import Mode
from leasekit.server.engine import Engine
from leasekit.server.local_socket import socket_path
from leasekit.server.shared import connect
from leasekit.server.store import SharedStore, Store
from leasekit.server.store.urls import open_store

__all__ = ["StoreConsole"]

_INNER = "/console"
_NOT_SENT_ON = frozenset(
    {"host", "origin", "connection", "transfer-encoding", "authorization", "cookie", "content-length"}
)
_NOT_RETURNED = frozenset({"connection", "transfer-encoding", "content-length", "date", "server", "keep-alive"})


class StoreConsole:
    """An ASGI application with the console of a store; `aclose` closes what its first request has opened.

    `url` is sqlite:///file.db or postgresql://host/database. `mode` is *on* or *read-only*. Raises `ConfigError` for a
    URL that names no such store.
    """

    def __init__(self, url: str, *, mode: Mode = "on") -> None:
        self._mode: Mode = mode
        self._store = open_store(url)
        if self._store.url is None and not isinstance(self._store, SharedStore):
            raise ConfigError("a store in memory is its process's own: name sqlite:///file.db, or postgresql://…")
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            app = await self._open()
        except BackendError as error:
            app = PlainTextResponse(f"the store cannot be opened: {error}", 503)
        await app(scope, receive, send)

    async def aclose(self) -> None:
        """Close the store, if a request has opened it."""
        async with self._opening:
            self._app = None
            await self._opened.aclose()

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            word = (await receive())["type"].rpartition(".")[2]
            if word == "shutdown":
                await self.aclose()
            await send({"type": f"lifespan.{word}.complete"})
            if word == "shutdown":
                return

    async def _open(self) -> ASGIApp:
        async with self._opening:
            if self._app is None and isinstance(self._store, SharedStore):
                self._app = Console(await self._opened.enter_async_context(Engine(self._store)), mode=self._mode)
            elif self._app is None:
                self._app = await self._opened.enter_async_context(
                    aclosing(_JoinedConsole(self._store, mode=self._mode))
                )
            return self._app


class _JoinedConsole:
    """The console of the process that has a file open: of this one, if no other has."""

    def __init__(self, store: Store, *, mode: Mode) -> None:
        path = socket_path(store)
        if path is None or store.url is None:
            raise ConfigError("the path of the store is too long for a socket beside it: move it to a shorter path")
        self._backend = connect(store.url, worker="console")
        self._mode: Mode = mode
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=httpx.Timeout(60.0))

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._backend.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(Request(scope, receive))
        except HTTPException as error:
            response = PlainTextResponse(error.detail, error.status_code)
        except (BackendError, httpx.TransportError) as error:
            response = PlainTextResponse(f"the process that has the store open does not answer: {error}", 503)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        await self._backend.gates()  # opens the store, or chooses again who has it open
        answer = await self._client.send(await self._sent_on(request), stream=True)
        headers = {name: value for name, value in answer.headers.items() if name not in _NOT_RETURNED}
        return StreamingResponse(_body(answer), answer.status_code, headers)

    async def _sent_on(self, request: Request) -> httpx.Request:
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_SENT_ON}
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin is not None:  # that of a page of this site stays one
            headers["origin"] = "http://localhost" if origin.partition("://")[2] == host else "null"
        if self._mode != "on":
            headers[READ_ONLY] = "true"
        path, root = request.scope["path"], request.scope.get("root_path", "")
        inner = path.removeprefix(root) if root and path.startswith(root) else path
        if not inner.startswith("/"):
            raise HTTPException(404, "the address of the console ends with a slash")
        body = b"" if request.method in {"GET", "HEAD"} else await request.body()
        url = httpx.URL(path=_INNER + inner, query=request.scope["query_string"])
        return self._client.build_request(request.method, url, headers=headers, content=body)


async def _body(answer: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()
