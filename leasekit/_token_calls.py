"""The calls of operators on `Client` for access tokens, and for the log of what operators did."""

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from leasekit._driver.retrying import repeat_until_answered
from leasekit._session import Session
from leasekit.backend import TokenDirectory
from leasekit.config import check_number
from leasekit.errors import LeasekitError
from leasekit.ids import uuid7s
from leasekit.tokens import AuditPage, NewToken, Scope, TokenInfo, digest_of, new_secret

T = TypeVar("T")


class TokenCalls:
    """The part of `Operating` for access tokens."""

    _session: Session
    _retry_for: float | None

    def tokens(self) -> list[TokenInfo]:
        """List the access tokens, also those that have ended lately. Raises `LeasekitError` if the service has none."""
        return self._ask_of_tokens(self._token_directory.tokens)

    async def atokens(self) -> list[TokenInfo]:
        """Do what `tokens` does, from an event loop."""
        return await self._aask_of_tokens(self._token_directory.tokens)

    def token(self, token: str) -> TokenInfo | None:
        """Return an access token by its id, or by its name if it is valid; None: there is none."""
        return self._ask_of_tokens(partial(self._token_directory.token, _checked(token)))

    async def atoken(self, token: str) -> TokenInfo | None:
        """Do what `token` does, from an event loop."""
        return await self._aask_of_tokens(partial(self._token_directory.token, _checked(token)))

    def create_token(
        self, name: str, *, scopes: Sequence[Scope], kinds: Sequence[str] = ("*",), expires_at: datetime | None = None
    ) -> NewToken:
        """Make an access token; its secret is in the answer, and is never shown again.

        Raises `Refused` if another valid token has this name, and `AccessDenied` if the token would allow more than
        the one of this client.

        Args:
            name: What the token is called, in listings and in the log of what operators did.
            scopes: What it allows: *submit*, *work*, *read*, *operate*.
            kinds: For tasks of which kinds: `mail`, `mail.*` (all that begin so), or `*`, all.
            expires_at: When it ends by itself; None: it does not.
        """
        secret = new_secret()
        return NewToken(
            info=self._ask_of_tokens(self._creation(name, secret, scopes, kinds, expires_at)), secret=secret
        )

    async def acreate_token(
        self, name: str, *, scopes: Sequence[Scope], kinds: Sequence[str] = ("*",), expires_at: datetime | None = None
    ) -> NewToken:
        """Do what `create_token` does, from an event loop."""
        secret = new_secret()
        info = await self._aask_of_tokens(self._creation(name, secret, scopes, kinds, expires_at))
        return NewToken(info=info, secret=secret)

    def _creation(
        self, name: str, secret: str, scopes: Sequence[Scope], kinds: Sequence[str], expires_at: datetime | None
    ) -> Callable[[], Coroutine[Any, Any, TokenInfo]]:
        (token_id,) = uuid7s(1, 0.0)  # without its time: `created_at` says when the token was made
        return partial(
            self._token_directory.create_token,
            token_id=token_id,
            name=_checked(name),
            digest=digest_of(secret).hex(),
            scopes=list(scopes),
            kinds=list(kinds),
            expires_at=expires_at,
        )

    def revoke_token(self, token: str) -> TokenInfo:
        """End an access token (its id or name), for good: within a second no server takes it any longer."""
        return self._ask_of_tokens(partial(self._token_directory.revoke_token, _checked(token)))

    async def arevoke_token(self, token: str) -> TokenInfo:
        """Do what `revoke_token` does, from an event loop."""
        return await self._aask_of_tokens(partial(self._token_directory.revoke_token, _checked(token)))

    def rotate_token(self, token: str, *, overlap: float = 0.0) -> NewToken:
        """Give an access token (its id or name) another secret, which is in the answer and is never shown again.

        The secret before it is taken for `overlap` seconds more, up to thirty days.
        """
        secret = new_secret()
        return NewToken(info=self._ask_of_tokens(self._rotation(token, secret, overlap)), secret=secret)

    async def arotate_token(self, token: str, *, overlap: float = 0.0) -> NewToken:
        """Do what `rotate_token` does, from an event loop."""
        secret = new_secret()
        return NewToken(info=await self._aask_of_tokens(self._rotation(token, secret, overlap)), secret=secret)

    def _rotation(self, token: str, secret: str, overlap: float) -> Callable[[], Coroutine[Any, Any, TokenInfo]]:
        check_number("overlap", overlap)
        digest = digest_of(secret).hex()
        return partial(self._token_directory.rotate_token, _checked(token), digest=digest, overlap=overlap)

    def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the log of what operators did, the latest first; it is kept for a year."""
        return self._ask_of_tokens(partial(self._token_directory.audit, cursor=cursor, limit=limit))

    async def aaudit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Do what `audit` does, from an event loop."""
        return await self._aask_of_tokens(partial(self._token_directory.audit, cursor=cursor, limit=limit))

    @property
    def _token_directory(self) -> TokenDirectory:
        backend = self._session.connection().backend
        if not isinstance(backend, TokenDirectory):
            raise LeasekitError(f"{type(backend).__name__} has no access tokens: see what the service itself has")
        return backend

    def _ask_of_tokens(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._session.connection().run(repeat_until_answered(call, self._retry_for))

    async def _aask_of_tokens(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._session.connection().arun(repeat_until_answered(call, self._retry_for))


def _checked(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of an access token is a string, got {type(name).__name__}: give a string")
    return name
