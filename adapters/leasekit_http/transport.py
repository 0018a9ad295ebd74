"""HTTP requests: send bytes, return a value or raise a typed error.

Rule 1: the other side is not trusted. Answers are bounded in size and time, and no redirect is followed.
Rule 2: only a problem document of a leasekit server, about the content of the request, counts as a refusal. Any other
status, type or shape (of an ingress without a backend, a firewall, a captive portal) counts as an outage, so that no
task ends because of it.
Rule 3: an answer counts only for the request that it names. An answer that a middlebox delivers twice on a kept
connection would otherwise be read as the answer to the next request, and acknowledge a heartbeat that never arrived. An
answer that ends the worker must name one: no content of its own shows that it is the server's.
Rule 4: all addresses serve one store. An address that names another store counts as one that does not answer: the store
there knows nothing of this client's leases, and would call them gone.
"""

import asyncio
import contextlib
import functools
import importlib
import itertools
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import anyio
import httpx
import msgspec

from leasekit.errors import AccessDenied, BackendError, ProtocolError, Refused, Throttled, Unavailable, Untrusted
from leasekit.wire import REQUEST_HEADER, STORE_HEADER, Problem, decode_value
from leasekit_http.way import Way, untrusted

# Not by the first request: if another thread forks the process meanwhile, the child waits for ever for these imports.
for _name in ("httpcore", "anyio._backends._asyncio"):
    importlib.import_module(_name)

logger = logging.getLogger("leasekit")

T = TypeVar("T")

MAX_ANSWER = 16 * 1024 * 1024
MAX_RETRY_AFTER = 300.0  # seconds: a server cannot put its clients to sleep for good

# Connections are kept for less than servers keep theirs (75 s), so that a request seldom meets one that is closing.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30)
# Calls of users at a time; the others wait, in their order. The pool of httpcore compares all connections with each
# other at each request: thousands would take the event loop, and with it the heartbeats, for many seconds.
_TOGETHER = 50
_WAITING = 50  # requests that wait for ends of tasks at a time; others poll
_HEADERS = {"accept": "application/json", "accept-encoding": "identity"}
_JSON = {"content-type": "application/json"}


class NotThere(Refused):
    """A leasekit server answered that the task does not exist."""


class Transport:
    """The connections to one service, opened by the first request; the address that answered last is asked first."""

    def __init__(self, *base_urls: str, headers: Mapping[str, str], way: Way) -> None:
        self._urls = deque(base_urls)
        self._socket = base_urls[0].partition("http+unix://")[2] or None
        self._headers = {"user-agent": "leasekit", **headers, **_HEADERS}
        self._way = way
        # Made here, so that a proxy or a certificate that cannot be used is refused here.
        self._client: httpx.AsyncClient | None = None if self._socket else self._new_client()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(_TOGETHER)
        self._waiting = 0
        self._tries: Iterator[str] = iter(())
        self._stores = _Stores()

    async def post(
        self,
        path: str,
        body: bytes,
        read: Callable[[bytes], T],
        *,
        timeout: float,
        at_most: int = MAX_ANSWER,
        owed_after: float = 0.0,
        is_one_try: bool = False,
        is_patient: bool = False,
        must_be_named: Callable[[T], bool] | None = None,
    ) -> T:
        """Send a POST and return its answer as decoded by `read`, which raises `ProtocolError` for an invalid answer.

        `timeout` bounds the whole answer at each address, however slowly its bytes come. `is_one_try`: no other address
        is asked. If the caller is cancelled after `owed_after` seconds, the address counts as one that does not answer.
        `is_patient`: the request waits while too many others of that sort are under way. `must_be_named` tells of an
        answer whether it counts only if it names its request.
        """
        ask = functools.partial(
            self._request,
            "POST",
            path,
            read,
            body=body,
            timeout=timeout,
            at_most=at_most,
            must_be_named=must_be_named,
        )
        self._client_of_loop()
        async with self._room if is_patient else contextlib.nullcontext():
            return await self._first_answer(ask, owed_after=owed_after, is_one_try=is_one_try)

    async def send(
        self, method: str, path: str, body: bytes | None, read: Callable[[bytes], T], *, timeout: float
    ) -> T:
        """Send a request of another method, which may be repeated, and return its answer as decoded by `read`."""
        ask = functools.partial(self._request, method, path, read, body=body, timeout=timeout)
        self._client_of_loop()
        return await self._first_answer(ask)

    async def get(self, path: str, read: Callable[[bytes], T], *, timeout: float) -> T:
        """Send a GET and return its answer as decoded by `read`. Raises `NotThere` if the server has no such task."""
        self._client_of_loop()
        async with self._room:
            return await self._first_answer(functools.partial(self._request, "GET", path, read, timeout=timeout))

    async def wait(self, path: str, body: bytes, read: Callable[[bytes], T], *, timeout: float, owed_after: float) -> T:
        """Send a POST whose answer may come late. Raises `Throttled` if too many such requests are under way.

        Calls of users do not wait for these requests.
        """
        self._client_of_loop()
        if self._waiting >= _WAITING:
            raise Throttled(f"{_WAITING} requests of this process wait for ends of tasks already", retry_after=1.0)
        self._waiting += 1
        try:
            ask = functools.partial(self._request, "POST", path, read, body=body, timeout=timeout)
            return await self._first_answer(ask, owed_after=owed_after)
        finally:
            self._waiting -= 1

    async def aclose(self) -> None:
        """Close the connections; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _first_answer(
        self, ask: Callable[[str], Awaitable[T]], *, owed_after: float = 0.0, is_one_try: bool = False
    ) -> T:
        """Return the answer of the first address that has one; raise the last address's error if none has."""
        *first, last = [self._urls[0]] if is_one_try else self._urls
        for url in first:
            with contextlib.suppress(Unavailable, Untrusted):
                return await self._ask_address(ask, url, owed_after)
        return await self._ask_address(ask, last, owed_after)

    async def _ask_address(self, ask: Callable[[str], Awaitable[T]], url: str, owed_after: float) -> T:
        """Ask one address and note whether it answered: a refusal is an answer, a long wait in vain is not."""
        began_at = time.monotonic()
        try:
            answer = await ask(url)
        except (Unavailable, Untrusted):
            self._move_last(url)
            raise
        except asyncio.CancelledError:
            if time.monotonic() - began_at >= owed_after:
                self._move_last(url)
            raise
        except BackendError:
            self._move_first(url)
            raise
        self._move_first(url)
        return answer

    def _move_last(self, url: str) -> None:
        # Only if no other request has done so: requests that fail together must skip one address, not two.
        if self._urls[0] == url:
            self._urls.rotate(-1)

    def _move_first(self, url: str) -> None:
        self._urls.rotate(-self._urls.index(url))

    async def _request(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        base_url: str,
        *,
        timeout: float,
        body: bytes | None = None,
        at_most: int = MAX_ANSWER,
        must_be_named: Callable[[T], bool] | None = None,
    ) -> T:
        headers = {REQUEST_HEADER: next(self._tries)}
        if body is not None:
            headers |= _JSON
        url = (base_url if self._socket is None else "http://localhost") + path
        streaming = self._client_of_loop().stream(method, url, content=body, headers=headers)
        response, raw = await self._answered(streaming, headers[REQUEST_HEADER], base_url, timeout, at_most)
        if response.status_code != 200:
            raise failure(response, raw, request=body)
        try:
            answer = read(raw)
            if must_be_named is not None and must_be_named(answer) and REQUEST_HEADER not in response.headers:
                raise ProtocolError(f"it has no {REQUEST_HEADER} header, which every proxy on the way must keep")
            return answer
        except ProtocolError as error:
            raise ProtocolError(f"{_description(response, raw)}: {error}") from error

    async def _answered(
        self,
        streaming: AbstractAsyncContextManager[httpx.Response],
        request_id: str,
        base_url: str,
        timeout: float,
        at_most: int,
    ) -> tuple[httpx.Response, bytes]:
        """Return the answer to a request, and its body. Raises `BackendError` for what httpx raises."""
        try:
            with anyio.fail_after(timeout):
                async with streaming as response:
                    _check_request(response, request_id)
                    self._stores.check(base_url, response.headers.get(STORE_HEADER))
                    return response, await _read_body(response, at_most)
        except TimeoutError:
            raise Unavailable(f"{base_url} did not answer within {timeout:g} s") from None
        except httpx.RemoteProtocolError as error:
            raise ProtocolError(f"{base_url} does not speak HTTP: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            if (refusal := untrusted(error, base_url)) is not None:
                raise refusal from error
            raise Unavailable(f"{base_url} cannot be reached: {error or type(error).__name__}") from error

    def _client_of_loop(self) -> httpx.AsyncClient:
        # A forked child has another loop. The connections belong to its parent, so the child leaves them untouched.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                self._client = None
            self._loop = loop
            self._room = asyncio.Semaphore(_TOGETHER)
            self._waiting = 0
            # New names for a forked child too, or its requests would have those of its parent.
            prefix = secrets.token_hex(8)
            self._tries = (f"{prefix}-{number}" for number in itertools.count())
        if self._client is None:
            self._client = self._new_client()
        return self._client

    def _new_client(self) -> httpx.AsyncClient:
        urls = [] if self._socket else list(self._urls)
        client = self._way.client(urls, socket=self._socket, limits=_LIMITS)
        client.headers = httpx.Headers(self._headers)
        return client


class _Stores:
    """The stores that the addresses of one service have named. They must be one: the addresses are nodes of it."""

    def __init__(self) -> None:
        self._store: str | None = None  # that of the first answer, until all addresses name another one
        self._of_address: dict[str, str] = {}

    def check(self, url: str, store: str | None) -> None:
        """Raise `Unavailable` if this address serves another store than the others; None: the answer named none."""
        if store is None:
            return
        is_news = self._of_address.get(url) != store
        self._of_address[url] = store
        if self._store is None or set(self._of_address.values()) == {store}:
            self._store = store
        if store != self._store:
            others = ", ".join(other for other, its in self._of_address.items() if its == self._store)
            says = f"{url} serves another store than {others}: give addresses of one service, or mend that server"
            if is_news:
                logger.error("%s", says)
            raise Unavailable(says)


def _check_request(response: httpx.Response, request: str) -> None:
    """Raise `ProtocolError` if an answer names another request; not every server names a request.

    Call this before the body is read: the connection of an unread answer is closed, and its stale bytes with it.
    """
    if response.headers.get(REQUEST_HEADER, request) != request:
        raise ProtocolError(
            f"{_description(response)} to another request than this one (its {REQUEST_HEADER} header differs): "
            "whether this request was applied is unknown, it may be repeated"
        )


async def _read_body(response: httpx.Response, at_most: int) -> bytes:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise ProtocolError(f"{_description(response)}, compressed, though that was not asked for")
    raw = bytearray()
    async for chunk in response.aiter_raw():
        raw += chunk
        if len(raw) > at_most:
            raise ProtocolError(f"{_description(response)} and is larger than {at_most:,} bytes")
    return bytes(raw)


_NO_SUCH_NAME = frozenset(f"urn:leasekit:problem:no-such-{what}" for what in ("periodic", "token", "worker"))
_DENIED = ("urn:leasekit:problem:unauthenticated", "urn:leasekit:problem:forbidden")
_NOT_THERE = ("urn:leasekit:problem:no-such-task", "urn:leasekit:problem:no-such-kind")


def failure(response: httpx.Response, raw: bytes, *, request: bytes | None) -> BackendError:
    """Return the error for an answer whose status is not 200, to a request with this body; None: to a GET."""
    status, problem = response.status_code, _problem(response, raw)
    says = f"the server answered {status}: {problem.detail}" if problem else _description(response, raw)
    if status == 429:
        return Throttled(says, retry_after=_retry_after(response.headers.get("retry-after")))
    if problem is not None:
        if problem.type in _DENIED:
            where = " (token=…, LEASEKIT_TOKEN, or --token-file)" if status == 401 else ""
            return AccessDenied(f"{says}{where}", errors=msgspec.to_builtins(problem.errors or ()))
        if problem.type == "urn:leasekit:problem:refused":
            return Refused(problem.detail, errors=msgspec.to_builtins(problem.errors or ()))
        names_one = request is None or response.request.method == "PATCH"
        if (problem.type in _NOT_THERE and names_one) or problem.type in _NO_SUCH_NAME:
            return NotThere(says)
        if problem.type == "urn:leasekit:problem:malformed" and request is not None and not _is_json(request):
            return Refused(says)
    if status >= 500 or status == 408:
        return Unavailable(says)
    if 300 <= status < 400:
        says += " (redirects are not followed)"
    says += _MISSING.get(status, "")
    return ProtocolError(says)


def _description(response: httpx.Response, raw: bytes | None = None) -> str:
    """Return the URL, the status and the beginning of an answer for messages, without possible secrets."""
    says = f"{str(response.url)[:_LONGEST]} answered {response.status_code}"
    if raw is None:
        return says
    begins = " ".join(_SECRET.sub(r"\1…", raw[:4096].decode(errors="replace")).split())[:_LONGEST]
    return f"{says}, which is not an answer of a leasekit server: {begins!r}"


_LONGEST = 120
_MISSING = {
    401: " (give what it asks for as token=…, headers=…, or in LEASEKIT_TOKEN, LEASEKIT_HEADERS)",
    407: " (give user and password in proxy=…)",
}
# Anything that looks like a token: long, and with a digit in it. An answer may repeat the request's own tokens.
_SECRET = re.compile(r"([\w+/=-]{4})(?=[\w+/=-]*\d)[\w+/=-]{8,}", re.ASCII)


def _is_json(body: bytes) -> bool:
    try:
        decode_value(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _problem(response: httpx.Response, raw: bytes) -> Problem | None:
    """Return the problem document of a leasekit server; None for anything else, even a foreign problem document."""
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        problem = _decode_problem(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return problem if problem.status == response.status_code else None


_decode_problem = msgspec.json.Decoder(Problem).decode


def _retry_after(value: str | None) -> float | None:
    """Return the seconds in a header, at most `MAX_RETRY_AFTER`; None if it is not a plain number."""
    if value is None or not value.isascii() or not value.isdigit():
        return None
    return MAX_RETRY_AFTER if len(value) > 9 else min(float(value), MAX_RETRY_AFTER)
