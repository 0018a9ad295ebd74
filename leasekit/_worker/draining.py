"""Draining: what happens to running handlers from a worker's stop until none is left.

    stop ─▶ claim no more, give back what has not begun
         ─ grace ───▶ handlers are told to end, and their tasks given back with their progress: async ones are
                      cancelled, processes ended, threads learn it at their next `held.check()`
         ─ timeout ─▶ the process ends, or is killed if it hangs; its supervisor gives back what it held

Leases are renewed all the while, to the very end: a stop is no reason to lose one. Cancel requests still come through.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leasekit._driver.connection import Connection
from leasekit._worker.controller import Controller
from leasekit.config import check_number
from leasekit.errors import ConfigError

logger = logging.getLogger("leasekit")

_LAST_WRITES = 2.0  # seconds to write results to the spool before the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainTimeouts:
    """Seconds after a stop (`math.inf`: for ever). The defaults fit into the 30 s of most container platforms."""

    grace: float = 20.0  # until then handlers end by themselves
    timeout: float = 25.0  # until then handlers end because they were told to; then the process ends

    def __post_init__(self) -> None:
        check_number("drain_grace", self.grace, or_infinity=True)
        check_number("drain_timeout", self.timeout, or_infinity=True)
        if not self.grace <= self.timeout:
            raise ConfigError(
                f"drain_timeout={self.timeout:g} ends the process before handlers are told to end: "
                f"raise it to drain_grace={self.grace:g} or more"
            )

    def but(self, *, grace: float | None, timeout: float | None) -> "DrainTimeouts":
        """Return these timeouts with the given ones replaced; a timeout not given grows to a longer grace."""
        check_number("drain_grace", grace, or_infinity=True, or_none=True)
        asked = self.grace if grace is None else grace
        return DrainTimeouts(grace=asked, timeout=max(asked, self.timeout) if timeout is None else timeout)


DEFAULT_DRAIN = DrainTimeouts()


class Drain:
    """Drain one run of a worker. Its methods are for the driver's loop."""

    def __init__(
        self,
        connection: Connection,
        controllers: Sequence[Controller],
        patience: DrainTimeouts,
        *,
        end: Callable[[], None] | None,
    ) -> None:
        self._connection = connection
        self._controllers = controllers
        self._patience = patience
        self._end = end
        self._begun = asyncio.Event()
        self._never = asyncio.Event()
        self._at: float | None = None

    def begin(self) -> None:
        """Start counting from now, unless the worker was asked to stop before."""
        if self._at is None:
            self._at = self._connection.clock.now()
        self._begun.set()

    async def run(self) -> None:
        """Enforce grace and timeout. The caller cancels this when all handlers have ended."""
        await self._begun.wait()
        await self._wait_until(self._patience.grace)
        if running := sum(controller.hurry() for controller in self._controllers):
            logger.info("%d handlers go on after %g s: they are told to end", running, self._patience.grace)
        if self._end is None:
            return
        await self._wait_until(self._patience.timeout)
        left = sum(controller.report_on_exit() for controller in self._controllers)
        logger.warning("%d handlers go on after %g s: the process ends", left, self._patience.timeout)
        try:
            async with asyncio.timeout(_LAST_WRITES):
                await self._connection.keeper.outbox.aclose()
        finally:
            self._end()

    async def reported(self, *, gives_up: bool = False) -> None:
        """Wait until all results are reported; if they are on disk too, for no longer than the timeout.

        `gives_up`: the process may be unable to report them, so this has an end in any case.
        """
        self.begin()
        outbox = self._connection.keeper.outbox
        reporting = asyncio.create_task(outbox.empty())
        try:
            if not (outbox.keeps or gives_up):
                await reporting
                return
            timeout = min(self._patience.timeout, DEFAULT_DRAIN.timeout) if gives_up else self._patience.timeout
            giving_up = asyncio.create_task(self._wait_until(timeout))
            await asyncio.wait([reporting, giving_up], return_when=asyncio.FIRST_COMPLETED)
            giving_up.cancel()
        finally:
            reporting.cancel()
        if not reporting.done() or len(outbox):
            then = "the next worker reports them" if outbox.keeps else "they are lost, and their tasks run again"
            logger.warning("%d results are not reported yet: %s", len(outbox), then)
            await outbox.aclose()

    async def _wait_until(self, after_stop: float) -> None:
        assert self._at is not None  # noqa: S101 - it has begun
        await self._connection.clock.wait(self._never, self._at + after_stop)
