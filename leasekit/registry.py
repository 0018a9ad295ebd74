"""URL scheme → backend, through the entry points of the group `leasekit.backends`.

An entry point is a callable `connect(url: str, *, worker: str) -> Backend`: it opens nothing yet, but refuses a URL
that it does not understand with `ConfigError`. `worker` is the name under which this process claims.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from leasekit.backend import Backend
from leasekit.errors import MissingDependency, UnknownScheme

__all__ = ["GROUP", "open_backend", "schemes"]

GROUP = "leasekit.backends"


def schemes() -> list[str]:
    """The schemes that are installed, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def open_backend(url: str, *, worker: str) -> Backend:
    """The backend that answers to this URL.

    Raises `UnknownScheme` (nothing installed answers to it) and `MissingDependency` (a library of it is not installed).
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    for entry in entry_points(group=GROUP, name=scheme):
        return _load(entry)(url, worker=worker)
    # The URL itself may carry a password: only its scheme is repeated.
    what = repr(scheme + "://") if scheme else "a URL without a scheme (write it as in http://127.0.0.1:8077)"
    raise UnknownScheme(f"no backend answers to {what}: installed are {', '.join(schemes())}")


def _load(entry: EntryPoint) -> Callable[..., Backend]:
    try:
        return entry.load()  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
        if missing == entry.module.partition(".")[0]:
            raise
        extra = _EXTRAS.get(entry.name, entry.name)
        raise MissingDependency(f"backend {entry.name!r} needs {missing!r}: pip install 'leasekit[{extra}]'") from error


_EXTRAS = {"https": "http", "redis+cluster": "redis", "rediss": "redis", "sqlite": "server"}
