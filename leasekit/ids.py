"""Ids that are made up here: UUIDv7 (RFC 9562), whose order is that of their making, so that indexes stay compact."""

import os
import time
import uuid

__all__ = ["new_id"]


def new_id() -> str:
    """A new id: 48 bits of milliseconds since 1970, the rest random."""
    millis = time.time_ns() // 1_000_000
    value = (millis & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant of the RFC
    return str(uuid.UUID(int=value))
