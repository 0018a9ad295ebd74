"""Sameness: whether two submissions have the same payload.

Rule 1: the same JSON may be written in more than one way, so keys are sorted first.
Rule 2: of an encoded payload counts the digest of the clear one, which its client has made: the rest differs each time.
"""

from hashlib import blake2b
from typing import Any

import msgspec

from leasekit.codecs import Encoded
from leasekit.wire import decode_value


def payload_identity(payload: Any) -> Any:
    """Return the value by which payloads are compared: the payload, or a codec's digest of the clear value."""
    form = Encoded.of(payload)
    return payload if form is None or form.digest is None else ["$digest", form.digest]


def payload_digest(payload: bytes) -> bytes:
    """Return the digest of a payload, given as JSON: 16 bytes, equal for two payloads if the payloads are equal."""
    identity = decode_value(payload)
    if b'"$codec"' in payload:  # few are: tens of thousands come each second
        identity = payload_identity(identity)
    return blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=16).digest()
