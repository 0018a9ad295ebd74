"""The server that a client is checked against: the real API over tasks in memory, recorded and disturbed."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from leasekit.server.conformance.record import Exchange, Record, Sign
from leasekit.server.engine import Engine
from leasekit.server.http.app import Api
from leasekit.server.http.sending import ABORT
from leasekit.wire import REQUEST_HEADER, BeatsRequest, ClaimRequest, ResultsRequest

SIGN = "/sign"
"""The path below which a running handler shows that it runs: `/sign/TASK?attempt=N`."""

_FORMS = {"/v1/claims": ClaimRequest, "/v1/heartbeats": BeatsRequest, "/v1/results": ResultsRequest}
_PROXY_PAGE = "<html><body><h1>{}</h1></body></html>"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A disturbance of some requests."""

    name: str
    path: str
    """`/v1/…`, or an empty text: all paths of the API."""
    skip: int = 0
    """Matching requests that pass first."""
    times: int = 1
    """Matching requests that are disturbed then."""
    seconds: float = math.inf
    """For how long requests are disturbed, counted from the first of them."""
    only_grants: bool = False
    """Whether only claims that are granted tasks match; the server handles them."""
    only_named: bool = False
    """Whether only requests match that have the header `Leasekit-Request`."""
    applied: bool = False
    """Whether the server handles the request."""
    answer: Callable[[dict[str, Any]], Response] | None = None
    """Makes the answer to a request body, in place of the server's. Without it and `edit`, the connection is cut."""
    edit: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Changes the server's JSON answer in a way that the client must understand."""
    readable: bool = False
    """Whether the client must take the answer for that of the server."""


def page(status: int) -> Callable[[dict[str, Any]], Response]:
    """Return what makes the answer of a proxy: HTML that knows nothing of leasekit."""
    return lambda _: Response(_PROXY_PAGE.format(status), status, media_type="text/html")


def busy(seconds: int) -> Callable[[dict[str, Any]], Response]:
    """Return what makes the answer of a server that has no capacity for `seconds`."""
    body = {"type": "urn:leasekit:problem:later", "title": "Too Many Requests", "status": 429, "detail": "busy"}
    content = msgspec.json.encode(body)
    return lambda _: Response(content, 429, {"retry-after": str(seconds)}, "application/problem+json")


def verdicts(
    verdict: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Callable[[dict[str, Any]], Response]:
    """Return what makes an answer with this verdict on each beat of a request."""

    def answer(body: dict[str, Any]) -> Response:
        items = [{"id": beat["id"], **verdict} for beat in body["beats"]]
        return Response(msgspec.json.encode({"verdicts": items}), 200, headers, "application/json")

    return answer


class _Disturbing:
    """A fault, and how many requests it has met."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._seen = 0
        self._until = math.inf

    def takes(self, exchange: Exchange) -> bool:
        """Return whether the fault is for this request, which counts from now on."""
        fault = self.fault
        if not exchange.path.startswith("/v1/") or fault.path not in ("", exchange.path):
            return False
        if fault.only_named and REQUEST_HEADER not in exchange.headers:
            return False
        self._seen += 1
        if self._seen == fault.skip + 1:
            self._until = exchange.at + fault.seconds
        return fault.skip < self._seen <= fault.skip + fault.times and exchange.at <= self._until


class Recorder(Api):
    """The API, which keeps a record of its requests and disturbs some of them."""

    def __init__(self, engine: Engine, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(engine)
        self.record = Record()
        self._faults = [_Disturbing(fault) for fault in faults]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the API does, or as a fault has it."""
        if scope["type"] != "http":
            return
        if scope["path"].startswith(f"{SIGN}/"):
            self._sign(scope)
            await Response(status_code=204)(scope, receive, send)
            return
        body = await _body(receive)
        exchange = Exchange(
            at=time.monotonic(),
            method=scope["method"],
            path=scope["path"],
            headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
            body=_decoded(body),
        )
        self.record.exchanges.append(exchange)
        # A request that does not fit its schema is refused, whatever else was to become of it.
        fault = self._fault(exchange, grants=False) if _fits(exchange.path, body) else None
        answer = _Answer()
        if fault is None or fault.applied:
            await super().__call__(scope, _replayed(body, receive), answer)
            exchange.status, exchange.answer = answer.status, _decoded(bytes(answer.body))
            if fault is None and any(exchange.granted()):
                fault = self._fault(exchange, grants=True)
        await self._send(exchange, answer, fault, scope, receive, send)

    def _fault(self, exchange: Exchange, *, grants: bool) -> Fault | None:
        of_this = [it for it in self._faults if it.fault.only_grants is grants]
        taking = [it.fault for it in of_this if it.takes(exchange)]  # all of them count the request
        return taking[0] if taking else None

    async def _send(
        self, exchange: Exchange, answer: "_Answer", fault: Fault | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        exchange.answered_at = time.monotonic()
        if fault is not None:
            exchange.fault, exchange.is_readable = fault.name, fault.readable
        if fault is None or fault.edit is not None:
            edited = None if fault is None or fault.edit is None else fault.edit(exchange.answer)
            response = answer.response(edited)
        elif fault.answer is not None:
            response = fault.answer(exchange.body)
            exchange.answer = _decoded(bytes(response.body))
        else:
            exchange.status = None
            scope["extensions"][ABORT]["abort"]()
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        exchange.status = response.status_code
        after = response.headers.get("retry-after")
        exchange.retry_after = float(after) if after is not None and after.isdigit() else None
        await response(scope, receive, send)

    def _sign(self, scope: Scope) -> None:
        attempt = parse_qs(scope["query_string"].decode("latin-1")).get("attempt", ["0"])[0]
        task_id = scope["path"].removeprefix(f"{SIGN}/")
        self.record.signs.append(Sign(time.monotonic(), task_id, int(attempt) if attempt.isdigit() else 0))


class _Answer:
    """An answer of the API that is kept until it is known what the client gets of it."""

    def __init__(self) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.body += message.get("body", b"")

    def response(self, value: dict[str, Any] | None) -> Response:
        """Return the answer with this JSON object; None: with the body that it has."""
        response = Response(bytes(self.body) if value is None else msgspec.json.encode(value), self.status)
        length = (b"content-length", str(len(response.body)).encode())
        response.raw_headers = [*((name, it) for name, it in self.headers if name.lower() != length[0]), length]
        return response


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _fits(path: str, body: bytes) -> bool:
    if (form := _FORMS.get(path)) is None:
        return True
    try:
        msgspec.json.decode(body, type=form)
    except msgspec.DecodeError:
        return False
    return True


def _decoded(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is; an empty one if it is something else."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


async def until(is_so: Callable[[], bool], *, within: float) -> bool:
    """Wait until a fact holds; return whether it does within so many seconds."""
    end = time.monotonic() + within
    while not is_so():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(0.02)
    return True
