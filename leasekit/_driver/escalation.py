"""The last rungs of the ladder: bodies that run on after their lease was lost.

lost ── … ──▶ all stacks are dumped ── … ──▶ last resort: a worker's process ends itself
                                             (the kernel's timer ends it where this file does not get its turn)
"""

import contextlib
import faulthandler
import logging
import math
import sys
from collections.abc import Callable

from leasekit._driver.holding import Holding
from leasekit.hooks import about

__all__ = ["Escalation"]

logger = logging.getLogger("leasekit")


class Escalation:
    """The bodies of one keeper that have been told that their lease is lost, and go on.

    `last_resort` is called just before the first of them must have ended.
    """

    def __init__(self, last_resort: Callable[[], None] | None) -> None:
        self._last_resort = last_resort
        self._lingering: list[Holding] = []
        self._dumped = False

    def add(self, holding: Holding) -> None:
        """Its lease was lost, and its body runs."""
        self._lingering.append(holding)

    def ended(self, holding: Holding) -> None:
        """Its body has ended. Who is not on the ladder is no error."""
        if holding in self._lingering:
            self._lingering.remove(holding)

    def step(self, now: float) -> None:
        """What is to be done at `now`."""
        for holding in self._lingering[:]:
            if now >= _dump_at(holding) and not self._dumped:
                self._dumped = True
                _dump(holding)
            if now >= _last_moment(holding):
                self._lingering.remove(holding)  # this is all that can be done
                if self._last_resort is not None:
                    self._last_resort()
        if not self._lingering:
            self._dumped = False

    @property
    def wake_at(self) -> float:
        """When there is something to do next."""
        return min(map(_last_moment if self._dumped else _dump_at, self._lingering), default=math.inf)


def _dump_at(holding: Holding) -> float:
    return holding.ends_at - min(1.0, holding.term.beats.grace / 2)


def _last_moment(holding: Holding) -> float:
    """A process that can still end by itself does so just before the kernel ends it: its exit code says why."""
    return holding.ends_at - min(0.02, holding.term.beats.grace / 5)


def _dump(holding: Holding) -> None:
    task = holding.task
    extra = about(task.id, task.token)
    logger.error("the body of lost task %s still runs; all stacks follow", task.id, extra=extra)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no usable stderr
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
