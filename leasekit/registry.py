"""Registry: URL scheme → backend, first the backends registered in this process, then the installed ones.

An installed backend is an entry point of the group `leasekit.backends`, named for its scheme. Both kinds are a callable
`connect(url: str, *, worker: str) -> Backend`, which opens no connection yet, but raises `ConfigError` for a URL that
it does not understand. `worker` is the name under which this process claims. Options of `leasekit.connect` that have a
parameter of the same name, or `**options`, are passed on; another option is refused here.
"""

import inspect
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leasekit.backend import Backend
from leasekit.errors import ConfigError, MissingDependency, UnknownScheme
from leasekit.queues import TaskQueues

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

__all__ = ["GROUP", "QUEUES", "needs_extra", "open_backend", "open_queues", "register", "schemes"]

GROUP = "leasekit.backends"
"""The group of entry points by which backends are installed."""

QUEUES = "leasekit.queues"
"""The group of entry points by which queues are installed."""

_registered: dict[str, Callable[..., Backend]] = {}


def register(scheme: str, connect: Callable[..., Backend]) -> None:
    """Open URLs of this scheme with `connect(url, worker=…)` in this process, in place of an installed backend.

    The latest registration of a scheme counts. Raises `ConfigError` for an invalid scheme (RFC 3986, section 3.1).
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ConfigError(f"scheme must be lower-case letters, digits, '+', '-' and '.', got {scheme!r}")
    _registered[scheme] = connect


def schemes() -> list[str]:
    """Return the schemes that are installed or registered, sorted."""
    return sorted({*_registered, *(entry.name for entry in _installed())})


@contextmanager
def needs_extra(extra: str) -> Generator[None]:
    """Raise `MissingDependency`, which names this extra of leasekit, if an import in this block finds no library."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
        if missing.startswith("leasekit"):
            raise
        raise MissingDependency(
            f"{missing!r} is not installed: install the extra {extra} of leasekit, for example "
            f"pip install '/path/to/leasekit[{extra}]'"
        ) from error


def open_backend(url: str, *, worker: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Open the backend for this URL; `options` are passed to it as keyword arguments.

    Raises `UnknownScheme` (no backend has this scheme), `MissingDependency` (a library of it is not installed) and
    `ConfigError` (several installed packages have this scheme, or the backend does not know an option).
    """
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    options = options or {}
    if scheme in _registered:
        _check_options(_registered[scheme], scheme, options)
        return _registered[scheme](url, worker=worker, **options)
    installed = {entry.value: entry for entry in _installed().select(name=scheme)}
    if len(installed) > 1:
        several = " and ".join(sorted(installed))
        raise ConfigError(f"{scheme}:// is answered by {several}: uninstall one, or register() the one that you mean")
    for entry in installed.values():
        return _open(entry, url, worker=worker, options=options)
    # The URL itself may contain a password: only its scheme is repeated.
    what = repr(scheme + "://") if scheme else f"a URL without a scheme (write it as in {_like(url)})"
    plain = f"; write {scheme.partition('+')[0]}://" if scheme.startswith("postgres") and "+" in scheme else ""
    raise UnknownScheme(f"no backend answers to {what}: installed are {', '.join(schemes())}{plain}")


def open_queues(url: str) -> TaskQueues:
    """Open the queues of this URL: an entry point of the group `leasekit.queues`, named for the scheme of the URL.

    It is a callable `connect(url: str) -> TaskQueues`, which opens no connection yet. Raises `UnknownScheme`,
    `MissingDependency` and `ConfigError`.
    """
    from importlib.metadata import entry_points

    scheme = url.partition("://")[0].lower() if "://" in url else ""
    installed = entry_points(group=QUEUES)
    for entry in installed.select(name=scheme):
        try:
            return entry.load()(url)  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            raise MissingDependency(f"queues of {scheme}:// need {error.name!r}: install it") from error
    what = f"{scheme}://" if scheme else "a URL without a scheme"
    known = ", ".join(sorted({entry.name for entry in installed}))
    raise UnknownScheme(f"no queues answer to {what}: installed are {known}")


def _like(url: str) -> str:
    """Return how a URL without a scheme may have been meant: an absolute path is a file."""
    is_path = url.startswith("/") and not url.startswith("//")
    return f"sqlite:///{url}" if is_path else "http://127.0.0.1:8077 or sqlite:////home/ada/tasks.db"


def _installed() -> "EntryPoints":
    # Imported here, because this takes an eighth of the import of leasekit, and not every process opens a backend.
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _check_options(connect: Callable[..., Backend], scheme: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first option that this callable has no parameter for."""
    if not options:
        return
    _, *parameters = inspect.signature(connect).parameters.values()  # the first is the URL
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = {parameter.name for parameter in parameters} - {"worker"}
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(sorted(known))}" if known else "it has no options"
            raise ConfigError(f"{scheme}:// knows no option {option!r}: {has}")


def _open(entry: "EntryPoint", url: str, *, worker: str, options: Mapping[str, Any]) -> Backend:
    try:
        connect = entry.load()
        _check_options(connect, entry.name, options)
        return connect(url, worker=worker, **options)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
        if missing == entry.module.partition(".")[0]:
            raise
        raise MissingDependency(
            f"backend {entry.name!r} needs {missing!r}: install what {entry.module} requires"
        ) from error
