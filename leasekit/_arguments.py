"""Check the arguments of `connect` and `Worker`, so that a wrong type is refused where it is given."""

import re
from collections.abc import Mapping, Sequence, Set
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, cast

import msgspec

from leasekit.codecs import Codec, Codecs
from leasekit.config import Heartbeats, check_number
from leasekit.errors import ConfigError
from leasekit.task import NewTask, Selection, Status, TaskOptions
from leasekit.task.words import Labels

_MOST_KEY = 64  # bytes of a key that BLAKE2b takes
_DELAYS = frozenset({"countdown", "defer", "eta"})  # as other libraries name them


def check_arguments(*, service: object, heartbeats: object, hooks: object, retry_for: object = None) -> None:
    """Raise `ConfigError` for the first argument of a wrong type. None stands for a default."""
    if not isinstance(service, str | None) and not hasattr(service, "capabilities"):
        given = f"an object of type {type(service).__name__!r}"
        raise ConfigError(f"service must be a URL, as in http://127.0.0.1:8077, or a backend, got {given}")
    if not isinstance(heartbeats, Heartbeats | None):
        raise ConfigError(f"heartbeats must be leasekit.Heartbeats(…), got {heartbeats!r}")
    if not (isinstance(hooks, Sequence) and all(callable(hook) for hook in cast("Sequence[object]", hooks))):
        raise ConfigError(f"hooks must be a list of callables that take an event, got {hooks!r}")
    check_number("retry_for", retry_for, or_infinity=True, or_none=True)


def checked_codecs(codecs: Codecs) -> tuple[Codec, ...]:
    """Return the codecs of a client. Raises `ConfigError` for what is no codec, and for two of one name."""
    if codecs is None:
        return ()
    given = cast("Sequence[object]", codecs if isinstance(codecs, Sequence) else [codecs])
    known: dict[str, Codec] = {}
    for codec in given:
        if not isinstance(codec, Codec):
            what = f"codec must be an object of a subclass of leasekit.codecs.Codec, or a list of such, got {codec!r}"
            raise ConfigError(what)
        name, key = getattr(codec, "name", None), getattr(codec, "digest_key", None)
        if not isinstance(name, str) or not re.fullmatch(r"[ -~]{1,64}", name):
            raise ConfigError(f"the name of a codec is 1-64 printable ASCII characters, got {name!r}")
        if not isinstance(key, bytes) or len(key) > _MOST_KEY:
            raise ConfigError(f"codec {name!r} needs a digest_key of up to {_MOST_KEY} bytes")  # not shown: a secret
        if name in known:
            raise ConfigError(f"two codecs are called {name!r}: a name stands for one key, so give each its own")
        known[name] = codec
    return tuple(known.values())


def check_idle_timeout(idle_timeout: object, *, owner: str = "") -> None:
    """Raise `ConfigError` if no code can be idle for so many seconds; None is no limit. `owner` begins the message."""
    check_number(f"{owner}idle_timeout", idle_timeout, least=0.001, or_none=True)


def check_concurrency(concurrency: object, *, owner: str = "") -> None:
    """Raise `ConfigError` if this is not a number of slots, of which each may be a thread or a process."""
    check_number(f"{owner}concurrency", concurrency, unit="", least=1, most=100_000, whole=True)


def check_ids(task_ids: Sequence[object]) -> None:
    """Raise TypeError for the first that is no string."""
    for task_id in task_ids:
        if not isinstance(task_id, str):
            how = "give its id" if hasattr(task_id, "id") else "give strings"
            raise TypeError(f"task ids are strings, got {type(task_id).__name__}: {how}")


def check_names(options: Mapping[str, object], known: Set[str], what: str) -> None:
    """Raise TypeError if the name of an option is not `known`, with a hint at the one that may be meant."""
    if unknown := options.keys() - known:
        wrong = min(unknown)
        meant = ["delay"] if wrong in _DELAYS else get_close_matches(wrong, known, 1)
        raise TypeError(f"{wrong!r} is no {what}{''.join(f': did you mean {name!r}?' for name in meant)}")


def new_task(kind: str, payload: Any, options: TaskOptions) -> NewTask:
    """Return the task. Raises TypeError for an unknown option."""
    check_names(options, TaskOptions.__optional_keys__, "option of a task")
    fields: dict[str, Any] = {**options}
    if isinstance(delay := fields.get("delay"), timedelta):
        fields["delay"] = delay.total_seconds()
    return NewTask(kind=kind, payload=payload, **fields)


def check_fields(tasks: Sequence[NewTask]) -> None:
    """Raise TypeError for the first task whose `retry` is a number or a list, or whose `delay` is no number."""
    for task in tasks:
        retry = cast("object", task.retry)
        if isinstance(retry, list | tuple):
            waits = list(cast("Sequence[object]", retry))
            raise TypeError(f"retry must be a policy: write retry=leasekit.FixedDelays(waits={waits!r})")
        if isinstance(retry, int | float):
            raise TypeError(
                f"retry says how long to wait between attempts, got {retry!r}: write max_attempts={retry!r}, "
                "or retry=leasekit.FixedDelays(waits=[1, 10]) for waits of 1 and 10 seconds"
            )
        if isinstance(delay := cast("object", task.delay), timedelta):
            raise TypeError(f"the delay of a NewTask is in seconds: write delay={delay.total_seconds():g}")


def checked_selection(wanted: Selection) -> Selection:
    """Return what is given of these filters. Raises TypeError for an unknown one, and ValueError for a bad status."""
    check_names(wanted, Selection.__optional_keys__, "filter of tasks")
    given = {name: value for name, value in wanted.items() if value is not None}
    if "status" in given:
        given["status"] = checked_status(cast("str", given["status"]))
    return cast("Selection", given)


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a worker. Raises `ConfigError` for a name or value out of bounds, or too many."""
    try:
        return msgspec.convert(dict(labels), Labels)
    except msgspec.ValidationError as error:
        raise ConfigError(f"labels do not fit: {error}") from None


def checked_status(status: str | None) -> Status | None:
    """Return the status of this name. Raises ValueError for an unknown name."""
    try:
        return None if status is None else Status(status)
    except ValueError:
        raise ValueError(f"no status is called {status!r}: they are {', '.join(Status)}") from None
