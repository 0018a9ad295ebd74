"""The access tokens of a store, as a node remembers them: whose secret is this, and when was it used?

Rule 1: a secret is found by its SHA-256, so that the time of a look-up tells nothing about secrets that are valid.
Rule 2: a caller is the secret that it has shown. Without an overlap, a rotation ends what began with the old one.
Rule 3: what is remembered is as of `read_at`. `TokenWatch` says whether that is new enough to be trusted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from leasekit.server.access import Access, KindPatterns
from leasekit.server.roles.tokens import is_valid
from leasekit.server.store import TokenRow
from leasekit.tokens import Scope

_COARSE = 300.0  # seconds between two notes of the use of one token


class _Secret(NamedTuple):
    """A secret of a token: the latest, or that from before, which is taken for some time more."""

    row: TokenRow
    access: Access
    until: float | None = None


class TokenBook:
    """The access tokens of one engine; for its event loop. `now` is the store's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rows: dict[str, TokenRow] = {}
        self._secrets: dict[bytes, _Secret] = {}  # by their SHA-256
        self._used: dict[str, float] = {}
        self._watchers: dict[Callable[[], None], Access] = {}
        self.read_at = -math.inf
        """When the read began that found these tokens, by a clock without steps."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_any(self) -> bool:
        """Whether a token was ever made: then requests need one."""
        return bool(self._rows)

    def kinds_of(self, token_id: str) -> KindPatterns:
        """Return the kinds of a token, also of one that is no longer valid; none, if it is unknown."""
        row = self._rows.get(token_id)
        return KindPatterns(() if row is None else row.kinds.split("/"))

    def within(self, kinds: KindPatterns) -> set[str]:
        """Return the tokens that are for nothing but these kinds, also those that are no longer valid."""
        return {row.id for row in self._rows.values() if all(map(kinds.cover, row.kinds.split("/")))}

    def learn(self, rows: Sequence[TokenRow], *, read_at: float) -> None:
        """Replace what is remembered, and look."""
        self._rows = {row.id: row for row in rows}
        self._secrets = {digest: secret for row in rows for digest, secret in _secrets_of(row)}
        self.read_at = read_at
        self.look()

    def of_digest(self, digest: bytes) -> Access | None:
        """Return what the token whose secret has this SHA-256 allows; None: there is none, or none that is valid."""
        secret_of = self._secrets.get(digest)
        if secret_of is None or not self._is_good(secret_of):
            return None
        self._used[secret_of.row.id] = self._now()
        return secret_of.access

    def is_valid(self, access: Access) -> bool:
        """Return whether what was allowed to a caller, when it came, is allowed now."""
        if access.digest is None:
            return not (access.is_guest and self.has_any)
        secret = self._secrets.get(access.digest)
        return secret is not None and self._is_good(secret)

    def watch(self, access: Access, ended: Callable[[], None]) -> Callable[[], None]:
        """Call `ended` when the rights of a caller are found to have ended; return a function that ends that."""
        self._watchers[ended] = access

        def leave() -> None:
            self._watchers.pop(ended, None)

        return leave

    def look(self) -> None:
        """Call those who watch rights that have ended."""
        for ended, access in list(self._watchers.items()):
            if not self.is_valid(access):
                ended()

    def to_note(self) -> Mapping[str, float]:
        """Return the uses of tokens that are to be noted in the store, and count them as noted."""
        used, self._used = self._used, {}
        return {
            token_id: at
            for token_id, at in used.items()
            if token_id in self._rows and at - (self._rows[token_id].used_at or 0.0) >= _COARSE
        }

    def _is_good(self, secret: _Secret) -> bool:
        now = self._now()
        return is_valid(secret.row, now) and (secret.until is None or now < secret.until)


def _secrets_of(row: TokenRow) -> Iterator[tuple[bytes, _Secret]]:
    scopes: frozenset[Scope] = frozenset(row.scopes.split(","))  # type: ignore[arg-type]
    kinds = KindPatterns(row.kinds.split("/"))
    for digest, until in ((row.digest, None), (row.former_digest, row.former_until)):
        if digest is not None:
            access = Access(
                name=row.name, scopes=scopes, kinds=kinds, token_id=row.id, expires_at=row.expires_at, digest=digest
            )
            yield digest, _Secret(row, access, until)
