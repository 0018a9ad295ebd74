"""Access: what a caller may do.

Rule 1: a right is a scope for a kind. A caller has all of its scopes for all kinds that its patterns match.
Rule 2: a pattern is a kind, or the beginning of kinds with a `*` behind it. Nothing else has a meaning in it.
Rule 3: names that begin with `leasekit.` are the servers' own: only the pattern `*` matches their kinds.
"""

from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from leasekit.named import PREFIXES
from leasekit.tokens import SCOPES, Scope

_OF_SERVERS = tuple(f"{prefix}leasekit." for prefix in PREFIXES)

__all__ = ["GUEST", "LOCAL", "Access", "KindPatterns"]


class KindPatterns:
    """The kinds that an access token is for, as patterns: exact names, or beginnings with a `*` at the end."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._exact = frozenset(pattern for pattern in self.patterns if not pattern.endswith("*"))
        self._beginnings = tuple(pattern[:-1] for pattern in self.patterns if pattern.endswith("*"))
        self.has_all = "" in self._beginnings
        """Whether every kind matches."""

    def __repr__(self) -> str:
        return f"KindPatterns({self.patterns!r})"

    def match(self, kind: str | None) -> bool:
        """Return whether these are patterns of a kind; of None, which no kind has, only `*` is."""
        if self.has_all:
            return True
        if kind is None or kind.startswith(_OF_SERVERS):
            return False
        return kind in self._exact or kind.startswith(self._beginnings)

    def cover(self, pattern: str) -> bool:
        """Return whether all kinds that a pattern matches match here."""
        if pattern.endswith("*"):
            return pattern[:-1].startswith(self._beginnings)
        return self.match(pattern)


class Access(Struct, frozen=True, kw_only=True, gc=False):
    """A caller, and its rights."""

    name: str
    """The name of the access token; *local* for a caller that needs none."""
    scopes: frozenset[Scope]
    """The rights of the caller …"""
    kinds: KindPatterns
    """… with tasks of these kinds."""
    token_id: str | None = None
    """The id of the access token; None: the caller needs none."""
    expires_at: float | None = None
    """When the token expires, in seconds since 1970."""
    digest: bytes | None = None
    """The SHA-256 of the secret that the caller has shown: what began with it ends with it, also if its token stays."""
    is_guest: bool = False
    """Whether the caller was let in because the store had no token: what began so ends with the first one."""

    @property
    def may_end(self) -> bool:
        """Whether these rights may end while a request waits."""
        return self.digest is not None or self.is_guest

    @property
    def caller(self) -> str:
        """Return by whom what callers share is counted: the id of the token, or "" for all that need none."""
        return self.token_id or ""

    @property
    def has_all_kinds(self) -> bool:
        """Return whether kinds need no check."""
        return self.kinds.has_all

    def has(self, scopes: Collection[Scope]) -> bool:
        """Return whether one of these scopes is held; none at all is needed if there are none."""
        return not scopes or not self.scopes.isdisjoint(scopes)

    def covers(self, scopes: Collection[str], kinds: Iterable[str], expires_at: float | None) -> bool:
        """Return whether nothing is allowed by these rights that is not allowed here, and for no longer."""
        outlives = self.expires_at is not None and (expires_at is None or expires_at > self.expires_at)
        return self.scopes.issuperset(scopes) and all(map(self.kinds.cover, kinds)) and not outlives


LOCAL = Access(name="local", scopes=frozenset(SCOPES), kinds=KindPatterns(["*"]))
"""A caller of this machine that needs no token: it may do everything."""
GUEST = replace(LOCAL, is_guest=True)
"""The same, while the store has no token."""
