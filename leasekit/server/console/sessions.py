"""Sessions: a browser that has shown an access token once, and is known by a cookie from then on.

Rule 1: a session is in the memory of one server, as the digest of its cookie. It ends with that server, after half a
        day, when it is left, and when the secret with which it began does.
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
    """The sessions of one server. `is_valid` says whether an access token is; `now` is a clock without steps.

    `has_proxy`: browsers reach this server through a proxy that has TLS.
    """

    def __init__(
        self, is_valid: Callable[[Access], bool], now: Callable[[], float], *, has_proxy: bool = False
    ) -> None:
        self._is_valid = is_valid
        self._has_proxy = has_proxy
        self._now = now
        self._sessions: OrderedDict[bytes, tuple[Access, float]] = OrderedDict()

    def begin(self, request: Request, response: Response, access: Access) -> None:
        """Begin a session of an access token, and give its cookie to the browser."""
        secret = secrets.token_urlsafe(32)
        while len(self._sessions) >= _MOST:
            self._sessions.popitem(last=False)
        self._sessions[_digest(secret)] = access, self._now() + _LONGEST
        is_plain = not self._has_proxy and _is_plain_loopback(request)
        response.set_cookie(_NAME, secret, path=_path(request), httponly=True, samesite="strict", secure=not is_plain)

    def end(self, request: Request, response: Response) -> None:
        """End the session of a request, and take its cookie back."""
        self._sessions.pop(_digest(request.cookies.get(_NAME, "")), None)
        response.delete_cookie(_NAME, path=_path(request), httponly=True, samesite="strict")

    def access_of(self, request: Request) -> Access | None:
        """Return what the session of a request allows now; None: there is none, or it has ended."""
        key = _digest(request.cookies.get(_NAME, ""))
        access, until = self._sessions.get(key, (None, 0.0))
        if access is not None and self._now() < until and self._is_valid(access):
            return access
        self._sessions.pop(key, None)
        return None


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
