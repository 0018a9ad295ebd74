"""Check what users hand to `connect` and `Worker`, so that a wrong type is refused where it is given."""

from collections.abc import Sequence
from typing import cast

from leasekit.config import Beats
from leasekit.errors import ConfigError

__all__ = ["check_arguments"]


def check_arguments(*, service: object, beats: object, hooks: object, patience: object = None) -> None:
    """Raise `ConfigError` that names the first argument of a wrong type. None stands for a default."""
    if not isinstance(service, str | None) and not hasattr(service, "traits"):
        what = f"{type(service).__name__!r} object is no service"
        raise ConfigError(f"a {what}: give a URL, as in http://127.0.0.1:8077, or a backend")
    if not isinstance(beats, Beats | None):
        raise ConfigError(f"beats must be leasekit.Beats(…), got {beats!r}")
    if not (isinstance(hooks, Sequence) and all(callable(hook) for hook in cast("Sequence[object]", hooks))):
        raise ConfigError(f"hooks must be a list of callables that take an event, got {hooks!r}")
    if patience is not None and not (isinstance(patience, int | float) and patience >= 0):
        raise ConfigError(f"patience must be seconds, zero or more, got {patience!r}")
