"""Names that the server makes up: successors' ids, and tokens, whole batches of them for one piece of chance."""

import random as _random
import uuid

__all__ = ["successor_id", "tokens"]

_SUCCESSORS = uuid.UUID("6c656173-656b-5974-8000-7375632e6c6b")
_TOKEN = 32  # hexadecimal digits: 128 bits


def successor_id(task_id: str, fence: int, position: int) -> str:
    """The id of a successor: the same run's report always names the same, so that its repeat makes none."""
    return str(uuid.uuid5(_SUCCESSORS, f"{task_id}/{fence}/{position}"))


def tokens(count: int, chance: _random.Random) -> list[str]:
    """Names that are as hard to guess as `chance` is, each for one claim of one task: 128 bits."""
    digits = f"{chance.getrandbits(4 * _TOKEN * count):0{_TOKEN * count}x}" if count else ""
    return [digits[at : at + _TOKEN] for at in range(0, _TOKEN * count, _TOKEN)]
