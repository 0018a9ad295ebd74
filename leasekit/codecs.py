"""Codecs: encrypt or compress what users write before it leaves their process, and undo that where it is read.

Rule 1: an encoded value is JSON of one form, `Encoded`, which names its codec. So keys can be rotated, and a client
without the codec knows what it sees.
Rule 2: an encoded payload has a keyed digest of the clear one. By that a service knows a repeated submission, although
two encryptions of one payload differ.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

__all__ = ["Codec", "Codecs", "Compressed", "Encoded"]

_MIB = 1024 * 1024


class Codec(ABC):
    """Encode values that leave a client, and decode those that it gets: subclass this for `connect(…, codec=…)`.

    Several threads call the methods at once, and in an event loop they block it: they must be quick, and must not wait
    for a network.
    """

    name: str
    """Stands beside each value that the codec has encoded: 1-64 printable ASCII characters. Another key: another name.
    """
    digest_key: bytes
    """A secret of up to 64 bytes, for the digests of payloads. Keep it when the key of the codec is replaced: by
    another one, a submission that is repeated after that looks like another one. Empty: digests are no secret."""
    errors: bool = False
    """Whether the texts of errors are encoded too. Their type stays readable, and can be searched for."""

    @abstractmethod
    def encode(self, clear: bytes) -> bytes:
        """Return the encoded form of a value, which is given as JSON."""

    @abstractmethod
    def decode(self, data: bytes) -> bytes:
        """Return the JSON that `encode` got. Raise any exception for data that was damaged, or encoded otherwise."""


Codecs = Codec | Sequence[Codec] | None
"""The codecs that a client takes: the first encodes, and each decodes the values that it has encoded."""


class Encoded(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename={"codec": "$codec"}
):
    """A value that a codec has encoded, as it is stored and sent; what a client reads that cannot decode it."""

    codec: Annotated[str, Meta(pattern=r"^[ -~]{1,64}\Z")]
    """The name of the codec; `$codec` in the JSON."""
    data: str
    """The encoded value, in Base64."""
    digest: str | None = None
    """Of a payload: the keyed digest of the clear value and the task's id. Two payloads with one digest are the same.
    """

    @classmethod
    def of(cls, value: Any) -> "Encoded | None":
        """Return a value of a task as what a codec has made of it; None for a clear value."""
        if isinstance(value, Encoded):
            return value
        if not isinstance(value, dict) or "$codec" not in value:
            return None
        try:
            return msgspec.convert(cast("Any", value), cls)
        except msgspec.ValidationError:  # a user's value with a key of that name
            return None

    def __repr__(self) -> str:
        return f"(encoded with {self.codec})"


class Compressed(Codec):
    """Compress values with zlib, and then encode them with `within`, if it is given: an encrypting codec, say.

    Use it as a codec of its own, or around each codec of a rotation.
    """

    def __init__(self, within: Codec | None = None, *, level: int = 6, at_most: int = 16 * _MIB) -> None:
        """Compress by `level` (1-9). A value of more than `at_most` bytes is neither compressed nor decompressed."""
        self.name = "zlib" if within is None else f"{within.name}+zlib"
        self.digest_key = b"" if within is None else within.digest_key
        self.errors = False if within is None else within.errors
        self._within = within
        self._level = level
        self._at_most = at_most

    def encode(self, clear: bytes) -> bytes:
        """Compress a value, and encode it `within`. Raises ValueError if it is too large to be decompressed again."""
        if len(clear) > self._at_most:
            raise ValueError(f"this value has {len(clear):,} bytes: {self._at_most:,} at most, or raise `at_most`")
        data = zlib.compress(clear, self._level)
        return data if self._within is None else self._within.encode(data)

    def decode(self, data: bytes) -> bytes:
        """Undo `encode`. Raises ValueError for a value that would be too large, or is not what was compressed."""
        data = data if self._within is None else self._within.decode(data)
        inflating = zlib.decompressobj()
        clear = inflating.decompress(data, self._at_most + 1)
        if len(clear) > self._at_most:
            raise ValueError(f"it has more than {self._at_most:,} bytes when it is decompressed: raise `at_most`")
        if not inflating.eof or inflating.unused_data:
            raise ValueError("it is cut off, or has more bytes than zlib has written")
        return clear
