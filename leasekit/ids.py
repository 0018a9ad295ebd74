"""Ids: UUIDv7 (RFC 9562), which sort in the order of their creation, so that indexes stay compact."""

from random import Random, SystemRandom

_SYSTEM = SystemRandom()
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def uuid7s(count: int, now: float, rng: Random = _SYSTEM) -> list[str]:
    """Return `count` new ids that sort by the millisecond of `now` (seconds since 1970); `rng` gives the rest."""
    digits = f"{int(now * 1000) & 0xFFFF_FFFF_FFFF:012x}"
    time = f"{digits[:8]}-{digits[8:]}-7"
    chance = rng.randbytes(10 * count).hex()  # for a whole batch at once
    return [
        f"{time}{chance[at : at + 3]}-{_VARIANT[chance[at + 3]]}{chance[at + 4 : at + 7]}-{chance[at + 7 : at + 19]}"
        for at in range(0, 20 * count, 20)
    ]
