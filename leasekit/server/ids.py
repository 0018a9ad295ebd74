"""Names that the server generates: ids of successors, and tokens of claims."""

import random as _random
import uuid

_SUCCESSORS = uuid.UUID("6c656173-656b-5974-8000-7375632e6c6b")
_TOKEN = 32  # hexadecimal digits: 128 bits


def successor_id(task_id: str, token: str, position: int) -> str:
    """Return the id of a successor: a repeated report of one run names the same ids, so no task is created twice.

    Without the token of the run nobody knows the id before: whoever used it first would keep the successor out.
    """
    return str(uuid.uuid5(_SUCCESSORS, f"{task_id}/{token}/{position}"))


def tokens(count: int, random: _random.Random) -> list[str]:
    """Return tokens of 128 bits, as hard to guess as `random`; one draw from `random` makes the whole batch."""
    digits = f"{random.getrandbits(4 * _TOKEN * count):0{_TOKEN * count}x}" if count else ""
    return [digits[at : at + _TOKEN] for at in range(0, _TOKEN * count, _TOKEN)]
