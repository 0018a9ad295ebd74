"""Declarations in code, of periodic tasks and of kinds: which version counts while a deploy replaces one by another.

Workers declare what their code says when they start, and again every few minutes. So two versions of a declaration are
repeated side by side for the time of a deploy, and each would undo the other.

Rule 1: a declaration that has not been seen before takes effect, once; to repeat it changes nothing. So what an
        operator changes by hand holds until the code says something new.
Rule 2: an older declaration takes effect again only when the newest has not been repeated for `FORGOTTEN` seconds:
        the deploy of its code was undone.
"""

from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from leasekit._lifecycle.sameness import payload_identity
from leasekit.server.store import KindRow, PeriodicRow
from leasekit.wire import decode_value

_Row = TypeVar("_Row", PeriodicRow, KindRow)

FORGOTTEN = 900.0
"""Seconds after which the workers that repeat a declaration are gone: three times as long as a worker waits."""
_NOTED = 60.0  # seconds for which the repeats of a fleet write nothing
_KEPT = 10  # versions of which one is known as older


def digest_of(data: bytes) -> str:
    """Return the digest of what is declared, given as JSON; of an encoded payload, its own digest counts."""
    declared: dict[str, Any] = decode_value(data)
    payload = declared.get("payload")
    identity = payload_identity(payload)
    if identity is not payload:
        data = msgspec.json.encode({**declared, "payload": identity})
    return blake2b(data, digest_size=8).hexdigest()


def declare(row: _Row, digest: str, now: float) -> tuple[_Row, bool]:
    """Note a declaration; return the row with the note, which may be the same, and whether it takes effect."""
    digests: list[str] = (row.digests or "").split()
    age = now - (row.declared_at or 0.0)
    if digest == next(iter(digests), None):
        return row._replace(declared_at=now) if abs(age) >= _NOTED else row, False
    if digest in digests and age < FORGOTTEN:
        return row, False
    newest = [digest, *(known for known in digests if known != digest)][:_KEPT]
    return row._replace(digests=" ".join(newest), declared_at=now), True
