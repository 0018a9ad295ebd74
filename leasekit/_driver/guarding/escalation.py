"""Escalation: the last measures against code that runs on after its lease was lost.

lost ── … ──▶ all stacks are dumped ── … ──▶ last resort: a worker's process ends itself
                                             (the kernel's timer ends it where this module gets no turn)
"""

import contextlib
import faulthandler
import logging
import math
import os
import sys
from collections.abc import Callable

from leasekit import _log
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.hooks import log_fields

logger = logging.getLogger("leasekit")


class Escalation:
    """The lost leases whose code goes on; `last_resort` is called just before the first deadline of that code."""

    def __init__(self, last_resort: Callable[[], None] | None) -> None:
        self._last_resort = last_resort
        self._lingering: list[HeldLease] = []
        self._dumped = False

    def add(self, held: HeldLease) -> None:
        self._lingering.append(held)

    def ended(self, held: HeldLease) -> None:
        """Remove a lease whose code has ended; unknown leases are ignored."""
        if held in self._lingering:
            self._lingering.remove(held)

    def step(self, now: float) -> None:
        # After a stop of the whole process a lease is lost, and due here, in the same turn in which its code ends.
        self._lingering = [held for held in self._lingering if not held.ended]
        for held in self._lingering[:]:
            if now >= _dump_at(held) and not self._dumped:
                self._dumped = True
                _dump_stacks(held)
            if now >= _last_moment(held):
                self._lingering.remove(held)  # no further measure exists
                if self._last_resort is not None:
                    self._last_resort()
        if not self._lingering:
            self._dumped = False

    @property
    def wake_at(self) -> float:
        return min(map(_last_moment if self._dumped else _dump_at, self._lingering), default=math.inf)


def _dump_at(held: HeldLease) -> float:
    return held.ends_at - min(1.0, held.term.heartbeats.grace / 2)


def _last_moment(held: HeldLease) -> float:
    """Return when a process can still end by itself, just before the kernel kills it: its exit code then says why."""
    return held.ends_at - min(0.02, held.term.heartbeats.grace / 5)


def _dump_stacks(held: HeldLease) -> None:
    task = held.task
    extra = log_fields(task.id, task.token)
    logger.error("the code of lost task %s still runs; all stacks follow", task.id, extra=extra)
    if sys.__stderr__ is None:  # started without one: descriptor 2 may be any file
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no usable stderr
        stderr = sys.__stderr__.fileno()
        if not hasattr(os, "memfd_create"):
            faulthandler.dump_traceback(stderr, all_threads=True)
            return
        # Not into stderr: the call would hold the interpreter lock while nobody reads that pipe.
        with open(os.memfd_create("stacks"), "w+b") as memory:  # noqa: PTH123 - a descriptor has no path
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            _log.write(_write_all, stderr, memory.read())


def _write_all(fd: int, text: bytes) -> None:
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(fd, text) :]
