"""Descriptors: a worker claims only while its process can open files and sockets."""

import logging
from collections.abc import Callable

from leasekit._descriptors import lack_of_descriptors
from leasekit.errors import LeasekitError

logger = logging.getLogger("leasekit")

_PATIENCE = 5.0  # seconds without descriptors after which a worker ends


class Descriptors:
    """The free file descriptors of this process, for all controllers of a run. `failed` ends that run."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lacking_since: float | None = None
        self.has_ended_run = False

    def are_free(self, now: float) -> bool:
        """Return whether there are enough for a claim. Says once if not, and ends the run if that lasts."""
        lack = lack_of_descriptors()
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
