"""Escalation: the last measures against code that runs on after its lease was lost.

lost ── … ──▶ the log shows where the code is ── … ──▶ last resort: a worker's process ends itself
                                                       (the kernel's timer ends it where this module gets no turn)

Where nothing ends the process, the log waits until the grace is over: code that ends within it has no such record.
"""

import logging
import math
from collections.abc import Callable

from leasekit._driver.guarding.stacks import Stack
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.hooks import log_fields

logger = logging.getLogger("leasekit")

_MOST_SHOWN = 20  # stacks, until no code of a lost lease runs


class Escalation:
    """The lost leases whose code goes on; `last_resort` is called just before the first deadline of that code."""

    def __init__(self, last_resort: Callable[[], None] | None) -> None:
        self._last_resort = last_resort
        self._lingering: list[HeldLease] = []  # no last measure was taken yet
        self._unseen: list[HeldLease] = []  # their stacks are not in the log yet
        self._shown = 0

    def add(self, held: HeldLease) -> None:
        self._unseen.append(held)
        if self._last_resort is not None:
            self._lingering.append(held)

    def ended(self, held: HeldLease) -> None:
        """Remove a lease whose code has ended; unknown leases are ignored."""
        for leases in (self._lingering, self._unseen):
            if held in leases:
                leases.remove(held)

    def step(self, now: float) -> None:
        # After a stop of the whole process a lease is lost, and due here, in the same turn in which its code ends.
        self._lingering = [held for held in self._lingering if not held.ended]
        self._unseen = [held for held in self._unseen if not held.ended]
        for held in [held for held in self._unseen if now >= self._show_at(held)]:
            self._unseen.remove(held)
            self._shown += 1
            if self._shown <= _MOST_SHOWN:
                _log_stack(held)
        for held in [held for held in self._lingering if now >= _last_moment(held)]:
            self._lingering.remove(held)  # no further measure exists
            if self._last_resort is not None:
                self._last_resort()
        if not self._lingering and not self._unseen:
            self._shown = 0

    @property
    def wake_at(self) -> float:
        moments = [*map(self._show_at, self._unseen), *map(_last_moment, self._lingering)]
        return min(moments, default=math.inf)

    def _show_at(self, held: HeldLease) -> float:
        is_killed = self._last_resort is not None or held.watchdog.guards
        return held.ends_at - (min(1.0, held.term.heartbeats.grace / 2) if is_killed else 0.0)


def _last_moment(held: HeldLease) -> float:
    """Return when a process can still end by itself, just before the kernel kills it: its exit code then says why."""
    return held.ends_at - min(0.02, held.term.heartbeats.grace / 5)


def _log_stack(held: HeldLease) -> None:
    task = held.task
    stack = Stack(held.thread, None if held.coroutine is None else held.coroutine())
    logger.error(
        "the code of lost task %s still runs, here (most recent call last):\n%s",
        task.id,
        stack,
        extra=log_fields(task.id, task.token),
    )
