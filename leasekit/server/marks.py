"""Marks: where a search goes on, and up to where a dry run has looked, as texts that only the servers of a store read.

A mark stands for running numbers of the store, which count the tasks of everybody: who could read two marks would know
how many tasks others have scheduled in between. So marks are encrypted with the identity of the store as the key, which
its servers keep to themselves: they read the marks of each other. A mark that was made up opens as an empty text, which
no search takes.
"""

import base64
import binascii
from collections.abc import Callable
from hashlib import blake2b, shake_256
from hmac import compare_digest
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

T = TypeVar("T", bound=Struct)

_FIELDS = ("cursor", "token")  # of requests and answers, where they are marks
_WIDTH = 32  # bytes: texts are filled up to a multiple of it, so that the length of a mark tells no number of digits
_TAG = 16  # bytes


def hashed(key: str) -> str:
    """Return a hash of a key, by which others may tell it from other keys."""
    return blake2b(key=key.encode(), digest_size=16, person=b"leasekit store").hexdigest()


class Marks:
    """Marks under one key: `key_of` returns it, an ASCII text; a store tells its own once it is open."""

    def __init__(self, key_of: Callable[[], str]) -> None:
        self._key_of = key_of

    def sealed(self, answer: T) -> T:
        """Return an answer of a search with its marks encrypted."""
        return replace(answer, **{name: self.seal(text) for name, text in _marks_of(answer)})

    def opened(self, request: T) -> T:
        """Return a request for a search with its marks as they were before they were encrypted."""
        return replace(request, **{name: self.open(text) for name, text in _marks_of(request)})

    def seal(self, text: str) -> str:
        """Encrypt an ASCII text; the same text becomes the same mark.

        The pad that hides the text depends on its keyed digest, which is also the proof that it is genuine (a synthetic
        initialization vector: Rogaway and Shrimpton, "Deterministic Authenticated-Encryption", 2006).
        """
        plain = text.encode().ljust(-(-len(text) // _WIDTH) * _WIDTH)
        tag = self._tag(plain)
        return base64.urlsafe_b64encode(tag + self._padded(plain, tag)).decode()

    def open(self, mark: str) -> str:
        """Return the text of a mark; empty: it is no mark of this store."""
        try:
            raw = base64.b64decode(mark, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return ""
        tag, plain = raw[:_TAG], self._padded(raw[_TAG:], raw[:_TAG])
        return plain.decode().rstrip() if compare_digest(tag, self._tag(plain)) else ""

    def _tag(self, plain: bytes) -> bytes:
        return blake2b(plain, key=self._key, digest_size=_TAG, person=b"leasekit marks").digest()

    def _padded(self, text: bytes, tag: bytes) -> bytes:
        pad = shake_256(self._key + tag).digest(len(text))
        return bytes(a ^ b for a, b in zip(text, pad, strict=True))

    @property
    def _key(self) -> bytes:
        return self._key_of().encode()


def _marks_of(message: Struct) -> list[tuple[str, str]]:
    return [(name, text) for name in _FIELDS if isinstance(text := getattr(message, name, None), str)]
