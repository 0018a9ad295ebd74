"""Names that the server makes up: ids, successors' ids, tokens. Whole batches, for one piece of chance."""

import os
import secrets
import uuid

__all__ = ["successor_id", "tokens", "uuid7s"]

_SUCCESSORS = uuid.UUID("6c656173-656b-5974-8000-7375632e6c6b")
_TOKEN = 32  # hexadecimal digits: 128 bits
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def uuid7s(count: int, now: float) -> list[str]:
    """UUIDv7s (RFC 9562): they sort by the millisecond in which they were made, the rest is chance."""
    digits = f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}"
    time = f"{digits[:8]}-{digits[8:]}-7"
    chance = os.urandom(10 * count).hex()
    return [
        f"{time}{chance[at : at + 3]}-{_VARIANT[chance[at + 3]]}{chance[at + 4 : at + 7]}-{chance[at + 7 : at + 19]}"
        for at in range(0, 20 * count, 20)
    ]


def successor_id(task_id: str, fence: int, position: int) -> str:
    """The id of a successor: the same run's report always names the same, so that its repeat makes none."""
    return str(uuid.uuid5(_SUCCESSORS, f"{task_id}/{fence}/{position}"))


def tokens(count: int) -> list[str]:
    """Unguessable names, each for one claim of one task: 128 bits."""
    chance = secrets.token_hex(_TOKEN // 2 * count)
    return [chance[at : at + _TOKEN] for at in range(0, _TOKEN * count, _TOKEN)]
