"""The Lua scripts, as they are sent: each script makes one change, in one round trip.

Redis keeps a script by the SHA-1 of its text, until Redis is restarted or told to flush its scripts.
"""

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files

from leasekit_redis.keys import OF_A_KIND

_LUA = files("leasekit_redis") / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its text, and the SHA-1 by which Redis knows it."""

    text: str
    sha: str


def _text(*names: str) -> str:
    return "".join((_LUA / f"{name}.lua").read_text(encoding="utf-8") for name in names)


def _script(*names: str) -> Script:
    return _of(_text(*names))


def _for_each_kind(*names: str) -> Script:
    """Return a script that runs another one for each of several kinds."""
    kinds_keys = ", ".join(f"'{name}'" for name in OF_A_KIND)
    return _of(
        f"local NAMES = {{{kinds_keys}}}\nlocal function of_kind(KEYS, ARGV)\n{_text(*names)}end\n{_text('each_kind')}"
    )


def _function(name: str) -> str:
    return f"local function {name}()\n{_text(name)}end\n"


def _of(text: str) -> Script:
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


SCHEDULE = _script("common", "schedule")
CLAIM = _script("common", "claim")
CLAIM_NAME = _of(f"{_text('common')}{_function('schedule')}{_function('claim')}{_text('claim_name')}")
BEAT = _script("common", "beat")
BEAT_EACH = _for_each_kind("common", "beat")
SETTLE = _script("common", "settle")
CANCEL = _script("common", "cancel")
ASIDE = _script("common", "aside")
NOTE_WAITS = _script("common", "note_waits")
RESOLVE_DEPENDENCY = _script("common", "resolve_dependency")
MAINTAIN = _script("common", "maintain")
DROP = _script("common", "drop")
FORGET_EACH = _for_each_kind("common", "forget_name")
PURGE = _script("common", "purge")
REDRIVE = _script("common", "redrive")
READ = _script("common", "read")
PAGE = _script("common", "page")
ROWS = _script("common", "rows")
CHAIN_JOIN = _script("chain_join")
CHAIN_LEAVE = _script("chain_leave")
REGISTER = _script("register")
NOTE_ID_WAITS = _script("note_id_waits")
COUNT_CLIENTS = _script("count_clients")
RESCHEDULE_KIND = _script("reschedule_kind")
DUE_KINDS = _script("due_kinds")
QUEUE_SEND = _script("queue_send")
QUEUE_RECEIVE = _script("queue_receive")
