"""Access tokens: their form, what they allow, and the log of operators' acts, as values.

Rule 1: a secret is made where it is shown. Services get and keep its SHA-256 only.
"""

import re
import secrets
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, get_args
from zlib import crc32

from msgspec import Meta, Struct

from leasekit.errors import ConfigError

__all__ = [
    "SCOPES", "AuditEntry", "AuditPage", "KindPattern", "NewToken", "Scope", "TokenInfo", "digest_of", "is_secret",
    "new_secret", "read_secret",
]  # fmt: skip

Scope = Literal["submit", "work", "read", "operate"]
"""A group of calls.

- `submit`: schedule tasks; cancel and reschedule them by their ids.
- `work`: claim tasks, renew their leases, settle their runs.
- `read`: see tasks, counts, workers, settings, events, metrics.
- `operate`: close gates, change settings, redrive, purge, act on many tasks, manage tokens; cancel and reschedule too.
"""

SCOPES: tuple[Scope, ...] = get_args(Scope)
"""All scopes."""

KindPattern = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[ -.0-~]+\Z")]
"""A kind, or the beginning of kinds with a `*` at its end: `mail`, `mail.*`, `*`."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_RANDOM, _CHECK = 43, 6  # digits of base 62: 256 bits, and a CRC-32
_FORM = re.compile(rf"lk_[0-9A-Za-z]{{{_RANDOM + _CHECK}}}", re.ASCII)


class TokenInfo(Struct, frozen=True, kw_only=True):
    """An access token, without its secret, which no service knows."""

    id: str
    """The id of the access token, which no other token has had."""
    name: str
    """The name of the access token. No two tokens have one name, unless one of them is revoked."""
    scopes: list[Scope]
    """The scopes of calls that the token allows …"""
    kinds: list[str]
    """… for tasks of these kinds: exact ones, or beginnings with a `*` at the end."""
    created_at: datetime
    """When it was made."""
    created_by: str
    """The name of the token by which it was made, or *local*."""
    expires_at: datetime | None = None
    """When it ends by itself; None: never."""
    used_at: datetime | None = None
    """When it was used last, within five minutes; None: never yet."""
    rotated_at: datetime | None = None
    """When it got its latest secret; None: it has its first one."""
    former_until: datetime | None = None
    """Until when the secret before the latest one is taken too; None: it is not."""
    revoked_at: datetime | None = None
    """When it was revoked; None: it is not."""


class NewToken(Struct, frozen=True, kw_only=True):
    """An access token with its secret, which is shown once. `str()` and `repr()` do not have the secret."""

    info: TokenInfo
    """The token, as others see it."""
    secret: str
    """What a client sends: keep it where only that client can read it."""

    def __repr__(self) -> str:
        return f"NewToken(info={self.info!r}, secret='lk_…')"


class AuditEntry(Struct, frozen=True, kw_only=True):
    """An act of an operator: who did what, to how many, and when. It has names, and never values."""

    id: str
    """Its id; ids grow with time."""
    at: datetime
    """When the change was made."""
    by: str
    """The name of the access token, or *local*."""
    token_id: str | None = None
    """The id of the access token; None: the caller needed none."""
    worker: str | None = None
    """The name that the client gave itself, if it gave one."""
    act: str
    """What was done, as in *gate.close* or *tasks.purge*."""
    target: str | None = None
    """What it was done to: the name of a kind, a collection, a worker, a periodic task, or a token; None: tasks."""
    fields: list[str] = []
    """The names of the settings of a kind that were changed; otherwise of what was given, as the filters by which tasks
    were selected."""
    count: int = 1
    """How many things this request has changed: tasks, or the one that it sets (a gate, the settings of a kind, a
    drain, a periodic task, a token). What was so already, a repeat, or what there is not counts 0."""


class AuditPage(Struct, frozen=True, kw_only=True):
    """A page of the audit log, the newest entry first."""

    entries: list[AuditEntry]
    """The entries."""
    cursor: str | None = None
    """Where the next page begins; None: this is the last page."""


def new_secret() -> str:
    """Return a new secret: `lk_`, 256 random bits, and a checksum, by which scanners tell it from other texts."""
    body = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM))
    return f"lk_{body}{_check_of(body)}"


def is_secret(text: str) -> bool:
    """Return whether a text has the form and the checksum of a secret."""
    return _FORM.fullmatch(text) is not None and _check_of(text[3:-_CHECK]) == text[-_CHECK:]


def read_secret(path: str) -> str:
    """Return the access token in a file. Raises `ConfigError` if there is none, without what the file has."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the access token cannot be read from {path}: {why}") from None


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 of a secret. Its 256 random bits cannot be guessed, so no salt or slow hash is needed."""
    return sha256(secret.encode()).digest()


def _check_of(body: str) -> str:
    number, digits = crc32(body.encode()), ""
    for _ in range(_CHECK):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits
