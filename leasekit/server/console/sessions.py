"""Sessions: a browser that has shown an access token once, and is known by a cookie from then on.

Rule 1: a session is in the memory of one server, as the digest of its cookie. It ends with that server, after half a
        day, when it is left, and when its token does.
Rule 2: the cookie is good for the console only: the API takes no cookies.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from leasekit.server.access import Access

_LONGEST = 12 * 3600.0  # seconds
_MOST = 1000  # sessions; the oldest ends for a new one
_NAME = "leasekit-console"
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto")


class Sessions:
    """The sessions of one server. `access_of_id` returns what a token allows now; `now` is a clock without steps.

    `has_proxy`: browsers reach this server through a proxy that has TLS.
    """

    def __init__(
        self, access_of_id: Callable[[str], Access | None], now: Callable[[], float], *, has_proxy: bool = False
    ) -> None:
        self._access_of_id = access_of_id
        self._has_proxy = has_proxy
        self._now = now
        self._tokens: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def begin(self, request: Request, response: Response, token_id: str) -> None:
        """Begin a session of a token, and give its cookie to the browser."""
        secret = secrets.token_urlsafe(32)
        while len(self._tokens) >= _MOST:
            self._tokens.popitem(last=False)
        self._tokens[_digest(secret)] = token_id, self._now() + _LONGEST
        is_plain = not self._has_proxy and _is_plain_loopback(request)
        response.set_cookie(_NAME, secret, path=_path(request), httponly=True, samesite="strict", secure=not is_plain)

    def end(self, request: Request, response: Response) -> None:
        """End the session of a request, and take its cookie back."""
        self._tokens.pop(_digest(request.cookies.get(_NAME, "")), None)
        response.delete_cookie(_NAME, path=_path(request), httponly=True, samesite="strict")

    def access_of(self, request: Request) -> Access | None:
        """Return what the session of a request allows now; None: there is none, or it has ended."""
        key = _digest(request.cookies.get(_NAME, ""))
        token_id, until = self._tokens.get(key, ("", 0.0))
        access = self._access_of_id(token_id) if self._now() < until else None
        if access is None:
            self._tokens.pop(key, None)
        return access


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _path(request: Request) -> str:
    return request.scope.get("root_path") or "/"


def _is_plain_loopback(request: Request) -> bool:
    """Return whether a browser asks on this machine itself: a proxy that rewrites the Host header tells of itself."""
    if any(name in request.headers for name in _OF_PROXIES):
        return False
    host = request.url.hostname or ""
    return request.url.scheme == "http" and (host in {"localhost", "::1"} or host.startswith("127."))
