"""What Redis and its client library say when something is wrong, as leasekit's errors.

Full memory, a disk that cannot be written, a replica, a cluster without a primary: each is *Unavailable* and says what
it is; nothing is ever lost silently. Passwords are in no message.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager

from redis import exceptions

from leasekit.errors import BackendError, ProtocolError, Refused, Unavailable
from leasekit_redis.address import Address

__all__ = ["NotAllowed", "bearing", "is_displaced", "mapped"]

_CODE = re.compile(
    r"\b(OOM|MISCONF|READONLY|LOADING|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|TRYAGAIN|BUSY|UNKILLABLE|EVICTS"
    r"|NOAUTH|WRONGPASS|NOPERM|WRONGTYPE)\b"
)
_SAYS = {
    "OOM": "its memory is full (maxmemory): nothing new is accepted until there is room; nothing was lost",
    "MISCONF": "it cannot save to its disk, and refuses all writes until it can",
    "READONLY": "it is a replica, or was made one: writes go to the primary",
    "LOADING": "it is loading its data after a start",
    "CLUSTERDOWN": "the cluster has no primary for a part of its slots",
    "MASTERDOWN": "it is a replica whose primary is away",
    "NOREPLICAS": "too few replicas follow it (min-replicas-to-write)",
    "TRYAGAIN": "a slot of the cluster is on its way to another node",
    "BUSY": "a script of somebody else occupies it",
    "UNKILLABLE": "a script of somebody else occupies it",
}
_DISPLACED = {"READONLY", "MASTERDOWN", "LOADING", "CLUSTERDOWN", "NOREPLICAS", "MISCONF"}
_NOT_ALLOWED = {"NOAUTH", "WRONGPASS", "NOPERM"}


class NotAllowed(Refused):
    """Redis does not let this user do what leasekit needs, or is not set up for it."""


@contextmanager
def bearing() -> Generator[None]:
    """Who holds something waits until he is let in again: for a password that was changed no result is thrown away."""
    try:
        yield
    except NotAllowed as error:
        raise Unavailable(str(error)) from error


def is_displaced(error: BaseException) -> bool:
    """Whether the server that says so may no longer be the one that its address leads to; it has changed nothing."""
    return isinstance(error, exceptions.RedisClusterException) or _code(error) in _DISPLACED


@contextmanager
def mapped(address: Address) -> Generator[None]:
    """Raise what is wrong in the block as a `BackendError`."""
    try:
        yield
    except BackendError:
        raise
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise _as_ours(error, address) from None
    except (AttributeError, KeyError, RuntimeError) as error:
        # The library, when a node of a cluster goes away while several calls are under way.
        raise Unavailable(f"{address}: a connection was lost: {error!r}") from error


def _as_ours(error: Exception, address: Address) -> BackendError:
    text = str(error) or type(error).__name__
    code = _code(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or code in _NOT_ALLOWED:
        return NotAllowed(f"{address} does not accept this user or password, or does not allow it what leasekit needs")
    if code == "EVICTS":
        return NotAllowed(f"{address} deletes keys at will when its memory is full: set maxmemory-policy noeviction")
    if code == "WRONGTYPE":
        return ProtocolError(
            f"{address}: others keep something there under a key that begins with {address.prefix!r}: "
            "have a prefix of your own (prefix=… in the URL)"
        )
    if code:
        return Unavailable(f"{address}: {_SAYS[code]}")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return Unavailable(f"{address} cannot be reached: {_without_secret(text, address)}")
    if isinstance(error, exceptions.ClusterError | exceptions.RedisClusterException):
        return Unavailable(f"{address}: the cluster cannot be reached: {_without_secret(text, address)}")
    return ProtocolError(f"{address} answered what makes no sense: {_without_secret(text, address)}")


def _code(error: BaseException) -> str:
    status: object = getattr(error, "status_code", None)
    found = _CODE.search(f"{status or ''} {error}")
    return found[1] if found else ""


def _without_secret(text: str, address: Address) -> str:
    return text.replace(address.password, "***") if address.password else text
