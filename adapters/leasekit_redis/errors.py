"""Map the errors of Redis and of redis-py to leasekit's errors.

Full memory, a disk that cannot be written, a replica, a cluster without a primary: each is *Unavailable* with a message
that names the cause; no call fails silently. No message contains a password.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from leasekit.errors import BackendError, ProtocolError, Refused, Unavailable
from leasekit_redis.address import Address

_CODE = re.compile(
    r"\b(OOM|MISCONF|READONLY|LOADING|CLUSTERDOWN|MASTERDOWN|NOREPLICAS|TRYAGAIN|BUSY|UNKILLABLE|EVICTS"
    r"|NOAUTH|WRONGPASS|NOPERM|WRONGTYPE)\b"
)
_SAYS = {
    "OOM": "its memory is full (maxmemory): nothing new is accepted until there is room; nothing was lost",
    "MISCONF": "it cannot save to its disk and refuses all writes until it can",
    "READONLY": "it is a replica, or was made one: writes go to the primary",
    "LOADING": "it is loading its data after a start",
    "CLUSTERDOWN": "the cluster has no primary for a part of its slots",
    "MASTERDOWN": "it is a replica whose primary is away",
    "NOREPLICAS": "too few replicas follow it (min-replicas-to-write)",
    "TRYAGAIN": "a slot of the cluster is on its way to another node",
    "BUSY": "it is busy with a script of another program",
    "UNKILLABLE": "it is busy with a script of another program",
}
_DISPLACED = {"READONLY", "MASTERDOWN", "LOADING", "CLUSTERDOWN", "NOREPLICAS", "MISCONF"}
_OF_CLASS: dict[type[BaseException], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
}
_NOT_ALLOWED = {"NOAUTH", "WRONGPASS", "NOPERM"}
_OF_SCRIPTS = re.compile("user executing the script|ACL failure in script")  # *NOPERM* within a script: Redis 6, 7


class NotAllowed(Refused):
    """Redis does not let this user do what leasekit needs, or is not set up for it."""


class Replaced(exceptions.ConnectionError):
    """The Sentinels name another primary by now."""

    def __str__(self) -> str:
        return "its Sentinels name another primary by now"


class FullMemory(Unavailable):
    """Redis has no room, and has changed nothing."""


@contextmanager
def bearing() -> Generator[None]:
    """Raise `NotAllowed` as `Unavailable`, so that holders try again: a changed password must not cost results."""
    try:
        yield
    except NotAllowed as error:
        raise Unavailable(str(error)) from error


def is_displaced(error: BaseException) -> bool:
    """Return whether the address may lead to another server by now; one that is still there has changed nothing."""
    return isinstance(error, exceptions.RedisClusterException | Replaced) or _code(error) in _DISPLACED


@contextmanager
def mapped(address: Address) -> Generator[None]:
    try:
        yield
    except BackendError:
        raise
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise _as_ours(error, address) from None
    except (AttributeError, KeyError, RuntimeError) as error:
        # redis-py raises these when a node of a cluster goes away while several calls are under way.
        raise Unavailable(f"{address}: a connection was lost: {error!r}") from error


def _as_ours(error: Exception, address: Address) -> BackendError:
    text = str(error) or type(error).__name__
    code = _code(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or code in _NOT_ALLOWED:
        return NotAllowed(f"{address} does not accept this user or password, or does not allow it what leasekit needs")
    if form := _right_form(error, address):
        return NotAllowed(f"{address}: {form}")
    if code == "EVICTS":
        return NotAllowed(f"{address} deletes keys at will when its memory is full: set maxmemory-policy noeviction")
    if "DB index is out of range" in text:
        return NotAllowed(f"{address} has no database {address.db}: choose another, or raise its setting 'databases'")
    if code == "WRONGTYPE":
        return ProtocolError(
            f"{address}: another program uses a key that begins with {address.prefix!r}: "
            "give leasekit a prefix of its own (prefix=… in the URL)"
        )
    if code == "OOM":
        return FullMemory(f"{address}: {_SAYS[code]}")
    if code:
        return Unavailable(f"{address}: {_SAYS[code]}")
    if isinstance(error, MasterNotFoundError):  # its text may have the settings of the connections
        return Unavailable(f"{address}: no Sentinel answers that knows a primary of this name")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return Unavailable(f"{address} cannot be reached: {_without_secret(text, address)}")
    if isinstance(error, exceptions.ClusterError | exceptions.RedisClusterException):
        return Unavailable(f"{address}: the cluster cannot be reached: {_without_secret(text, address)}")
    return ProtocolError(f"{address} gave an unexpected answer: {_without_secret(text, address)}")


def _right_form(error: Exception, address: Address) -> str | None:
    """Return what to write, if the URL is that of another kind of Redis."""
    text = str(error)
    if "Cluster mode is not enabled" in text:
        return "it is no node of a cluster: write redis://…"
    if re.search(r"unknown command\W+SENTINEL", text, re.IGNORECASE):
        return "it is no Sentinel: write redis://…"
    if lacks := re.search(r"unknown command\W+(EVAL|SELECT)", text, re.IGNORECASE):
        return f"it has no command {lacks[1]}: if it is a Sentinel, write redis+sentinel://…/primary"
    if not address.is_cluster and (isinstance(error, exceptions.MovedError) or "not allowed in cluster mode" in text):
        return "it is a node of a cluster: write redis+cluster://…"
    return None


def _code(error: BaseException) -> str:
    # redis-py before 7.1 removes the code from the text of an error that has a class of its own.
    status: object = getattr(error, "status_code", None) or _OF_CLASS.get(type(error))
    text = f"{status or ''} {error}"
    match = _CODE.search(text)
    return match[1] if match else "NOPERM" if _OF_SCRIPTS.search(text) else ""


def _without_secret(text: str, address: Address) -> str:
    return text.replace(address.password, "***") if address.password else text
