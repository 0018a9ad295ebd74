"""Descriptors: a worker claims only while its process can open files and sockets.

A claim needs none where a connection is open; the heartbeats and results of its tasks may need several. A worker whose
handlers have left too many open would claim tasks that it can neither keep nor report, and make crashes of them.
"""

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

from leasekit.errors import LeasekitError

try:  # here: without a free descriptor no module can be loaded
    import resource
except ImportError:  # not every system has it
    resource = None  # type: ignore[assignment]

logger = logging.getLogger("leasekit")

_NEEDED = 8  # heartbeats, results and cancel requests at once, each with a name to resolve
_PATIENCE = 5.0  # seconds without descriptors after which a worker ends
_USED_UP = (errno.EMFILE, errno.ENFILE)


class Descriptors:
    """The free file descriptors of this process, for all controllers of a run. `failed` ends that run."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lacking_since: float | None = None
        self.has_ended_run = False

    def are_free(self, now: float) -> bool:
        """Return whether there are enough for a claim. Says once if not, and ends the run if that lasts."""
        lack = _lack()
        if lack is None:
            if self._lacking_since is not None:
                logger.info("files and sockets can be opened again: tasks are claimed")
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = now
            logger.error("%s: nothing is claimed, and the worker ends if that lasts for %g s", lack, _PATIENCE)
        elif now - self._lacking_since >= _PATIENCE and not self.has_ended_run:
            self.has_ended_run = True
            self._failed(LeasekitError(f"{lack}. This has lasted for {_PATIENCE:g} s, so the worker ends"))
        return lack is None


def _lack() -> str | None:
    """Return what is wrong if this process cannot open some files at once; None if it can, or something else is."""
    opened: list[int] = []
    try:
        for _ in range(_NEEDED):
            opened.append(os.dup(opened[0]) if opened else os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in _USED_UP:
            return (
                f"this process can open no more files and sockets ({error.strerror}, {_limit()}), which heartbeats and "
                "results need; find the handler that leaves some open, or raise the limit (LimitNOFILE in a unit)"
            )
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def _limit() -> str:
    return "the limit is that of the system" if resource is None else f"ulimit -n is {_soft_limit(resource)}"


def _soft_limit(module: Any) -> int:
    return int(module.getrlimit(module.RLIMIT_NOFILE)[0])
