"""Check the arguments of `connect` and `Worker`, so that a wrong type is refused where it is given."""

from collections.abc import Sequence
from typing import cast

from leasekit.config import Heartbeats
from leasekit.errors import ConfigError

__all__ = ["check_arguments"]


def check_arguments(*, service: object, heartbeats: object, hooks: object, retry_for: object = None) -> None:
    """Raise `ConfigError` for the first argument of a wrong type. None stands for a default."""
    if not isinstance(service, str | None) and not hasattr(service, "capabilities"):
        given = f"an object of type {type(service).__name__!r}"
        raise ConfigError(f"service must be a URL, as in http://127.0.0.1:8077, or a backend, got {given}")
    if not isinstance(heartbeats, Heartbeats | None):
        raise ConfigError(f"heartbeats must be leasekit.Heartbeats(…), got {heartbeats!r}")
    if not (isinstance(hooks, Sequence) and all(callable(hook) for hook in cast("Sequence[object]", hooks))):
        raise ConfigError(f"hooks must be a list of callables that take an event, got {hooks!r}")
    if retry_for is not None and not (isinstance(retry_for, int | float) and retry_for >= 0):
        raise ConfigError(f"retry_for must be seconds, zero or more, got {retry_for!r}")
