"""The access tokens of a store, as a node remembers them: whose secret is this, and when was it used?

Rule 1: a secret is found by its SHA-256, so that the time of a look-up tells nothing about secrets that are valid.
Rule 2: what is remembered is as of `read_at`. A node that could not read the tokens for long trusts no secret.
"""

import hmac
import math
from collections.abc import Callable, Mapping, Sequence

from leasekit.errors import Unavailable
from leasekit.server.access import Access, KindPatterns
from leasekit.server.roles.tokens import is_valid
from leasekit.server.store import TokenRow
from leasekit.tokens import Scope, digest_of

_TRUSTED = 10.0  # seconds for which what was read counts
_COARSE = 300.0  # seconds between two notes of the use of one token


class TokenBook:
    """The access tokens of one engine; for its event loop. `now` is the store's time, `instant` has no steps."""

    def __init__(self, now: Callable[[], float], instant: Callable[[], float], *, is_shared: bool) -> None:
        self._now = now
        self._is_shared = is_shared  # other nodes may change the tokens
        self._instant = instant
        self._rows: dict[str, TokenRow] = {}
        self._of_digest: dict[bytes, TokenRow] = {}
        self._access: dict[str, Access] = {}
        self._used: dict[str, float] = {}
        self._watchers: dict[Callable[[], None], str] = {}
        self.read_at = -math.inf
        """When the tokens were read, by `instant`."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_any(self) -> bool:
        """Whether a token was ever made: then requests need one."""
        return bool(self._rows)

    def learn(self, rows: Sequence[TokenRow]) -> None:
        """Replace what is remembered, and look."""
        self._rows = {row.id: row for row in rows}
        self._of_digest = {row.digest: row for row in rows}
        self._of_digest.update({row.former_digest: row for row in rows if row.former_digest is not None})
        self._access = {row.id: _access_of(row) for row in rows}
        self.read_at = self._instant()
        self.look()

    def of_secret(self, secret: str) -> Access | None:
        """Return what the token with this secret allows; None: there is none, or it is not valid (any longer).

        Raises `Unavailable` if the tokens could not be read lately.
        """
        self._check_age()
        digest = digest_of(secret)
        row = self._of_digest.get(digest)
        if row is None or not _is_secret_of(row, digest, self._now()):
            return None
        self._used[row.id] = self._now()
        return self._access[row.id] if is_valid(row, self._now()) else None

    def of_id(self, token_id: str) -> Access | None:
        """Return what the token with this id allows; None: it is not valid (any longer)."""
        row = self._rows.get(token_id)
        return None if row is None or not is_valid(row, self._now()) else self._access[token_id]

    def watch(self, token_id: str, ended: Callable[[], None]) -> Callable[[], None]:
        """Call `ended` when the token is found to be no longer valid; return a function that ends the watch."""
        self._watchers[ended] = token_id

        def leave() -> None:
            self._watchers.pop(ended, None)

        return leave

    def look(self) -> None:
        """Call those who watch tokens that are no longer valid."""
        for ended, token_id in list(self._watchers.items()):
            if self.of_id(token_id) is None:
                ended()

    def to_note(self) -> Mapping[str, float]:
        """Return the uses of tokens that are to be noted in the store, and count them as noted."""
        used, self._used = self._used, {}
        return {
            token_id: at
            for token_id, at in used.items()
            if token_id in self._rows and at - (self._rows[token_id].used_at or 0.0) >= _COARSE
        }

    def _check_age(self) -> None:
        if self._is_shared and (age := self._instant() - self.read_at) > _TRUSTED:
            since = "never" if math.isinf(age) else f"last {age:.0f} s ago"
            raise Unavailable(f"the access tokens could not be read ({since}): try again later")


def _is_secret_of(row: TokenRow, digest: bytes, now: float) -> bool:
    if hmac.compare_digest(row.digest, digest):
        return True
    return row.former_until is not None and now < row.former_until


def _access_of(row: TokenRow) -> Access:
    scopes: frozenset[Scope] = frozenset(row.scopes.split(","))  # type: ignore[arg-type]
    kinds = KindPatterns(row.kinds.split("/"))
    return Access(name=row.name, scopes=scopes, kinds=kinds, token_id=row.id, expires_at=row.expires_at)
