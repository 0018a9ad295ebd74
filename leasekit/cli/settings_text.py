"""Settings of kinds as texts: how they are typed, written into a file, and shown."""

from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, cast

import msgspec

from leasekit.backend import checked
from leasekit.config import duration
from leasekit.errors import ConfigError, Refused
from leasekit.task import DEFAULTS, Exponential, FixedDelays, KindSettings, Polynomial
from leasekit.wire import KindRequest, given

UNSET_WORD = "default"
"""The value by which a setting is removed."""
_NONE = "none"
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))
_TTL = "2 s to a year, as 90 or 5m"
FORMS = {
    "priority": "0 (the most urgent) to 4",
    "max_attempts": "1 to 1000000, or none for no limit",
    "max_crashes": "0 to 1000000",
    "max_runtime": f"{_TTL}, or none for no limit",
    "expiry": "crash or retry",
    "enqueue_timeout": "1 s to a year (of a task in a queue)",
    "claim_timeout": f"{_TTL}, or none for heartbeat_timeout",
    "heartbeat_timeout": _TTL,
    "retry": "waits as 10,60,10m, or exponential, polynomial, or JSON",
    "dedupe_window": "0 to 10 years, as 60 or 7d, or none for no end",
    "start_deadline": "1 s to 10 years, as 60 or 5m, or none for no end",
    "retention": "a minute to 10 years, as 12h or 7d",
    "fair": "true (the collection of a task is its key) or false",
    "concurrency": "1 to 1000000 tasks that run at one time, in all workers",
    "key_concurrency": "1 to 1000000 tasks of one key that run at one time",
    "ordered": "true (tasks of one key run in order) or false",
    "rate": "starts in a second, as 10, or in a minute, as 30/m",
    "burst": "with a rate: 1 to 1000000 tasks that start at once",
    "key_rate": "starts of one key in a second, as 10, or as 30/m",
    "key_burst": "with a key_rate: 1 to 1000000 that start at once",
    "weight": "0.01 to 100: the share among kinds of one priority",
    "aging": "1 s to a year, as 5m: then as urgent as priority 0",
}
"""How each setting is written."""
_WORDS = {
    "priority": int, "max_attempts": int, "max_crashes": int, "expiry": str, "concurrency": int,
    "key_concurrency": int, "burst": int, "key_burst": int, "weight": float,
}  # fmt: skip
_RATES = {"rate", "key_rate"}
_GO_WITH = {"burst": {"rate": 1.0}, "key_burst": {"key_rate": 1.0}}  # what a setting must have beside it
_WITH_NONE = {"max_attempts", "max_runtime", "claim_timeout", "dedupe_window", "start_deadline"}
_FLAGS = {"fair", "ordered"}
BY_DEFAULT: dict[str, Any] = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__struct_fields__} | dict.fromkeys(
    _FLAGS, False
)
"""The defaults of settings that a kind does not set; the service decides on settings without a default here."""
_POLICIES = {"exponential": Exponential(), "polynomial": Polynomial()}


def unknown(name: str) -> str:
    """Return the sentence about a setting that does not exist."""
    meant = get_close_matches(name, FORMS, 1)
    hint = f"did you mean {meant[0]}?" if meant else f"they are {', '.join(FORMS)}"
    return f"there is no setting {name!r}: {hint}"


def parsed(name: str, value: object) -> Any:
    """Return the value that a text, or a value of a TOML file, means for this setting. Raises `ConfigError`."""
    if name not in FORMS:
        raise ConfigError(unknown(name))
    with suppress(ConfigError, Refused, ValueError, TypeError):
        meant = _typed(name, value.strip()) if isinstance(value, str) else _listed(name, value)
        return getattr(checked(KindRequest, {**_GO_WITH.get(name, {}), name: meant}), name)
    raise ConfigError(f"{name} cannot be {value!r}: write {FORMS[name]}")


def _typed(name: str, text: str) -> Any:
    if text == _NONE and name in _WITH_NONE:
        return None
    if name in _WORDS:
        return _WORDS[name](text)
    if name in _FLAGS:
        return msgspec.json.decode(text)
    if name in _RATES:
        return _rate(text)
    return _policy(text) if name == "retry" else duration(name, text)


def _rate(text: str) -> float:
    """Return starts a second: 30/m is half a start."""
    count, _, unit = text.partition("/")
    return float(count) / (duration("a time", f"1{unit}") if unit else 1.0)


def _policy(text: str) -> Any:
    if text in _POLICIES:
        return _POLICIES[text]
    if text.startswith("{"):
        return msgspec.json.decode(text)
    return FixedDelays(waits=[duration("a wait", wait.strip()) for wait in text.split(",")])


def _listed(name: str, value: object) -> Any:
    """Return a value of a TOML file; a list is one of waits, and a time is none of any setting."""
    if isinstance(value, list):
        return FixedDelays(waits=[_seconds(wait) for wait in cast("list[object]", value)])
    if isinstance(value, bool) and name not in _FLAGS:
        raise TypeError("a bool is no number")
    return value


def _seconds(wait: object) -> Any:
    return duration("a wait", wait) if isinstance(wait, str) else wait


def shown(name: str, value: Any) -> str:
    """Return a value of this setting as it can be typed."""
    match value:
        case None:
            return _NONE
        case bool():
            return str(value).lower()
        case FixedDelays():
            return ",".join(map(_span, value.waits))
        case Exponential() | Polynomial():
            names = [word for word, policy in _POLICIES.items() if policy == value]
            return names[0] if names else msgspec.json.encode(value).decode()
        case _ if name in _RATES:
            return _starts(value)
        case _:
            return f"{value:g}" if name == "weight" else str(value) if name in _WORDS else _span(value)


def _starts(rate: float) -> str:
    """Return starts a second, or by the first longer time in which they are a whole number."""
    for size, unit in ((1, ""), *((size, f"/{unit}") for size, unit in reversed(_UNITS))):
        if round(rate * size) / size == rate:
            return f"{round(rate * size)}{unit}"
    return f"{rate!r}"


def _span(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:f}".rstrip("0").rstrip(".")


def all_shown(settings: KindSettings) -> str:
    """Return settings as they can be typed, on one line."""
    return " ".join(f"{name}={shown(name, value)}" for name, value in given(settings).items())


def contradictions(settings: Mapping[str, Any]) -> list[str]:
    """Return why a kind cannot have all of these settings."""
    lacking = [(name, needed) for name, of in _GO_WITH.items() if name in settings for needed in of]
    return [f"{name} needs a {needed}: set that too" for name, needed in lacking if needed not in settings]


def differences(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting of a kind that would change."""
    return [
        f"{kind}: {name} {_shown_in(name, old)} → {_shown_in(name, new)}"
        for name in FORMS
        if (name in old, old.get(name)) != (name in new, new.get(name))
    ]


def _shown_in(name: str, settings: Mapping[str, Any]) -> str:
    if name in settings:
        return shown(name, settings[name])
    return f"{UNSET_WORD} ({shown(name, BY_DEFAULT[name])})" if name in BY_DEFAULT else UNSET_WORD
