"""The Lua scripts, as they are sent: each is one move, and one round trip.

Redis keeps a script by the SHA-1 of its text, until it is restarted or told to forget it.
"""

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files

__all__ = [
    "AGENDA", "ASIDE", "AWAIT", "BEAT", "CANCEL", "CENSUS", "CLAIM", "DROP", "MEET", "PAGE", "READ", "REDRIVE",
    "REGISTER", "SCHEDULE", "SETTLE", "TEND", "VISIT", "WANT", "Script",
]  # fmt: skip

_LUA = files("leasekit_redis") / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """One script."""

    text: str
    sha: str


def _script(*names: str) -> Script:
    text = "".join((_LUA / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


SCHEDULE = _script("common", "schedule")
CLAIM = _script("common", "claim")
BEAT = _script("common", "beat")
SETTLE = _script("common", "settle")
CANCEL = _script("common", "cancel")
ASIDE = _script("common", "aside")
AWAIT = _script("common", "await")
MEET = _script("common", "meet")
TEND = _script("common", "tend")
DROP = _script("common", "drop")
REDRIVE = _script("common", "redrive")
READ = _script("common", "read")
PAGE = _script("common", "page")
REGISTER = _script("register")
WANT = _script("want")
CENSUS = _script("census")
AGENDA = _script("agenda")
VISIT = _script("visit")
