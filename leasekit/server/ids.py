"""Names that the server makes up: successors' ids, and tokens, whole batches of them for one piece of chance."""

import secrets
import uuid

__all__ = ["successor_id", "tokens"]

_SUCCESSORS = uuid.UUID("6c656173-656b-5974-8000-7375632e6c6b")
_TOKEN = 32  # hexadecimal digits: 128 bits


def successor_id(task_id: str, fence: int, position: int) -> str:
    """The id of a successor: the same run's report always names the same, so that its repeat makes none."""
    return str(uuid.uuid5(_SUCCESSORS, f"{task_id}/{fence}/{position}"))


def tokens(count: int) -> list[str]:
    """Unguessable names, each for one claim of one task: 128 bits."""
    chance = secrets.token_hex(_TOKEN // 2 * count)
    return [chance[at : at + _TOKEN] for at in range(0, _TOKEN * count, _TOKEN)]
