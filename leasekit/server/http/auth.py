"""Authentication: who makes a request, and may they?

Rule 1: without a right that its table names, no operation is run (`Operation.needs`).
Rule 2: a request over the socket beside the store needs no token: only processes of the user who owns the store reach
it. Nor does one from the same machine, as long as the store has never had a token, and the server was not told so.
Rule 3: an answer does not tell a token that is unknown from one that was revoked or has expired.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request

from leasekit.errors import Throttled
from leasekit.server.access import GUEST, LOCAL, Access
from leasekit.server.engine import Engine
from leasekit.server.http.problems import Unauthenticated
from leasekit.server.log_limit import LogLimit
from leasekit.server.token_bucket import Bucket
from leasekit.tokens import digest_of, is_secret

__all__ = ["LOCAL_SOCKET", "Authenticator", "Failures"]

LOCAL_SOCKET = "leasekit.local"
"""The ASGI extension of a request that came over the socket beside the store."""

_FAILURES, _EACH = 20, 6.0  # bad tokens of a peer in a row, and seconds for one more
_PEERS = 10_000  # that are remembered
_AGAIN = 0.1  # seconds between two looks at the store because of unknown tokens

logger = logging.getLogger("leasekit.server.requests")
logger.addFilter(LogLimit())


_MISSING = "this server needs an access token: send it as `Authorization: Bearer lk_…`"
_NOT_VALID = "the access token is not valid: it is unknown, was revoked, or has expired"


class Authenticator:
    """Turns requests into identities: `access_of` is the one place where that happens.

    `is_required`: every request over TCP needs a token, also while the store has none. `peer` returns the address that
    bad tokens are counted for. `count` is called for each refusal with its reason: *missing*, *invalid*, *locked*.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        is_required: bool = False,
        peer: Callable[[Request], str] = lambda request: request.client.host if request.client else "",
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._engine = engine
        self._is_required = is_required
        self._peer = peer
        self._failures = Failures(engine.clock.instant)
        self._look_at = 0.0
        self._count = count

    @property
    def is_required(self) -> bool:
        """Whether requests over TCP need a token."""
        return self._is_required or self._engine.tokens.has_any

    async def access_of(self, request: Request) -> Access:
        """Return who makes a request. Raises `Unauthenticated`, and `Throttled` after too many bad tokens."""
        if LOCAL_SOCKET in (request.scope.get("extensions") or ()):
            return LOCAL
        await self._engine.token_watch.freshen()  # a node that stood still may not know that there is a token by now
        values = request.headers.getlist("authorization")
        secret = _bearer(values[0]) if len(values) == 1 else None
        if not (self._is_required or self._engine.tokens.has_any) and (secret is None or not is_secret(secret)):
            return GUEST  # what a proxy may have sent on is not for leasekit
        if not values:
            self._refuse(request, "missing", _MISSING)
        if secret is not None and (access := await self.access_of_secret(secret)) is not None:
            return access
        return self._refuse(request, "invalid", _NOT_VALID)

    async def access_of_secret(self, secret: str) -> Access | None:
        """Return what the token with this secret allows; None: it is not valid.

        An unknown token may have been made a moment ago, at another node: then the store is asked.
        """
        return await self.access_of_digest(digest_of(secret)) if is_secret(secret) else None

    async def access_of_digest(self, digest: bytes) -> Access | None:
        """Return what the token whose secret has this SHA-256 allows, as `access_of_secret` does."""
        await self._engine.token_watch.freshen()
        access, now = self._engine.tokens.of_digest(digest), self._engine.clock.instant()
        if access is None and now >= self._look_at:
            self._look_at = now + _AGAIN
            await self._engine.token_watch.read()
            access = self._engine.tokens.of_digest(digest)
        return access

    async def log_in(self, request: Request, secret: str) -> Access:
        """Return what the token with this secret allows, for a session. Raises like `access_of`."""
        return await self.access_of_secret(secret) or self._refuse(request, "invalid", _NOT_VALID)

    def _refuse(self, request: Request, reason: str, detail: str) -> Access:
        peer = self._peer(request)
        wait = self._failures.add(peer) if reason == "invalid" else None
        self._count(reason if wait is None else "locked")
        if wait is not None:
            logger.warning("%s has sent too many access tokens that are not valid: it has to wait", peer or "a client")
            raise Throttled("too many access tokens that are not valid: try again later", retry_after=wait)
        if reason == "invalid":
            logger.warning("%s has sent an access token that is not valid", peer or "a client")
        raise Unauthenticated(detail)


class Failures:
    """Bad tokens of each peer: some are taken at once, then one every few seconds."""

    def __init__(self, instant: Callable[[], float]) -> None:
        self._instant = instant
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def add(self, peer: str) -> float | None:
        """Count a bad token; return the seconds to wait if there were too many, else None."""
        now = self._instant()
        bucket = Bucket(1 / _EACH, _FAILURES, self._full_at.pop(peer, 0.0))
        if not bucket.tokens(now):
            self._full_at[peer] = bucket.full_at
            return max(1.0, bucket.next_at - now)
        self._full_at[peer] = bucket.less(1, now).full_at
        while len(self._full_at) > _PEERS:
            self._full_at.popitem(last=False)
        return None


def _bearer(header: str) -> str | None:
    scheme, _, secret = header.partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None
