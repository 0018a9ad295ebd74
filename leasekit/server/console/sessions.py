"""Sessions: a browser that has shown an access token once, and is known by a cookie from then on.

Rule 1: a session is a row of the store, with the digest of its cookie: it holds at every node of a database, and goes
        on after a restart. What the store has begins no session.
Rule 2: a session ends after half a day, when it is left, and when the secret with which it began does.
Rule 3: the cookie is good for the console only: the API takes no cookies.

A row, because a cookie that is sealed with a key of the store could be made by whoever reads the store, and could not
be taken back when the session is left.
"""

import secrets

from starlette.requests import Request
from starlette.responses import Response

from leasekit.server.access import Access
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.auth import Authenticator
from leasekit.server.store import SessionRow
from leasekit.tokens import digest_of

_LONGEST = 12 * 3600.0  # seconds
_NAME = "leasekit-console"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")


class Sessions:
    """The sessions of a store. `has_proxy`: browsers reach this server through a proxy that has TLS."""

    def __init__(self, engine: Engine, auth: Authenticator, *, has_proxy: bool = False) -> None:
        self._engine = engine
        self._auth = auth
        self._has_proxy = has_proxy

    async def begin(self, request: Request, response: Response, access: Access) -> None:
        """Begin a session of an access token, and give its cookie to the browser."""
        assert access.digest is not None  # noqa: S101 - a login shows a secret
        secret = secrets.token_urlsafe(32)
        until = self._engine.clock.peek() + _LONGEST
        await self._engine.operations.begin_session(SessionRow(digest_of(secret), access.digest, until))
        is_plain = not self._has_proxy and _is_plain_loopback(request)
        response.set_cookie(_NAME, secret, path=_path(request), httponly=True, samesite="strict", secure=not is_plain)

    async def end(self, request: Request, response: Response) -> None:
        """End the session of a request, and take its cookie back."""
        if (secret := request.cookies.get(_NAME)) is not None:
            await self._engine.operations.end_session(digest_of(secret))
        response.delete_cookie(_NAME, path=_path(request), httponly=True, samesite="strict")

    async def access_of(self, request: Request) -> Access | None:
        """Return what the session of a request allows now; None: there is none, or it has ended."""
        secret = request.cookies.get(_NAME)
        # Until it is known who asks, browsers take turns by their addresses: anybody can make up cookies.
        CALLER.set(f"a browser at {'' if request.client is None else request.client.host}")
        row = None if secret is None else await self._engine.queries.session(digest_of(secret))
        return None if row is None else await self._auth.access_of_digest(row.secret)


def _path(request: Request) -> str:
    return request.scope.get("root_path") or "/"


def _is_plain_loopback(request: Request) -> bool:
    """Return whether a browser asks on this machine itself: a proxy that rewrites the Host header tells of itself."""
    if any(name in request.headers for name in _OF_PROXIES):
        return False
    host = request.url.hostname or ""
    return request.url.scheme == "http" and (host in {"localhost", "::1"} or host.startswith("127."))
