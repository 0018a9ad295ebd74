"""The socket beside a store, through which other processes of this machine reach the one that has the store open."""

import asyncio
import contextlib
import logging
import os
import socket
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

from leasekit.errors import ConfigError
from leasekit.server.store import Store

logger = logging.getLogger("leasekit.server")

_LOOK = 1.0  # seconds between two looks at the socket's place
LONGEST = 103
"""Bytes of a path that every platform takes for a socket."""


def socket_path(store: Store) -> Path | None:
    """Return the path of the store's socket; None: the store is not a file, or its path is too long for a socket."""
    if (file := store_path(store)) is None:
        return None
    path = file.with_name(file.name + ".sock")
    return path if len(os.fsencode(path)) <= LONGEST else None


def store_path(store: Store) -> Path | None:
    """Return the path of the store's file, if it is one."""
    return None if store.url is None else Path(store.url.removeprefix("sqlite:///"))


@contextlib.asynccontextmanager
async def beside(store: Store, listen: Callable[[socket.socket], Awaitable[None]]) -> AsyncGenerator[None]:
    """Bind a socket beside the store until the block ends, if it can have one, and have `listen` serve it.

    `listen` is called again, with another socket, when the socket was deleted (by a program that cleans up, say).
    """
    path = socket_path(store)
    if path is None:
        yield
        return
    with contextlib.ExitStack() as sockets:
        await listen(sockets.enter_context(bound(path)))
        binding = asyncio.create_task(_bind_again(path, sockets, listen))
        try:
            yield
        finally:
            binding.cancel()


async def _bind_again(
    path: Path, sockets: contextlib.ExitStack, listen: Callable[[socket.socket], Awaitable[None]]
) -> None:
    file = path.with_suffix("")
    served = _inode(file)
    while True:
        await asyncio.sleep(_LOOK)
        if _inode(path) is None and _inode(file) == served:  # else the socket of another store belongs there
            try:
                await listen(sockets.enter_context(bound(path)))
                logger.warning("%s was deleted: other processes could not join; it is there again", path)
            except (ConfigError, OSError) as error:  # the latter without a free descriptor, for example
                logger.warning("%s was deleted, and is tried again: %s", path, error)


@contextlib.contextmanager
def bound(path: Path) -> Generator[socket.socket]:
    """Listen at `path`, for processes of the same user, until the block ends.

    Only the process that has the store locked may do this: a socket that is there already was left by an earlier
    process, and is removed. Raises `ConfigError` if no socket can be made there.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(os.fspath(path))
        except OSError as error:
            raise ConfigError(f"no socket can be made at {path}: {error.strerror}; remove what is there") from error
        made = _inode(path)
        _listeners.add(listener)
        path.chmod(0o600)  # before `listen`, so that nobody can have connected
        listener.listen(128)
        listener.settimeout(0)  # connections are accepted by an event loop
        try:
            yield listener
        finally:
            if _inode(path) == made:  # else the store was deleted meanwhile, and another process serves a new one
                path.unlink(missing_ok=True)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child would keep the socket open, so that connections are accepted by a dead process, and never answered.
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)
