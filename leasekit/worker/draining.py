"""From the moment when a worker was asked to stop until nothing runs any more: what happens to bodies that go on.

    stop ─▶ claim no more, give back what has not begun
         ─ grace ───▶ bodies are told to end, and their tasks given back with their progress: async ones are cancelled,
                      processes ended, threads hear of it at their next `held.check()`
         ─ timeout ─▶ the process ends; what it held is given back by its supervisor

Leases are beaten all the while, to the very last: a stop is no reason to lose one. Orders come through.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leasekit._driver.connection import Connection
from leasekit.errors import ConfigError
from leasekit.worker.controller import Controller

__all__ = ["PATIENT", "Drain", "Patience"]

logger = logging.getLogger("leasekit")

_LAST_WRITES = 2.0  # seconds for results to be written to the spool, before the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds after a stop; `math.inf` waits for ever.

    The defaults fit into the 30 seconds that most who run containers give them.
    """

    grace: float = 20.0  # bodies end by themselves
    timeout: float = 25.0  # bodies end because they were told to; then the process ends

    def __post_init__(self) -> None:
        if not self.grace >= 0:
            raise ConfigError(f"drain_grace={self.grace!r} is no number of seconds: set it to zero or more")
        if not self.grace <= self.timeout:
            raise ConfigError(
                f"drain_timeout={self.timeout:g} ends the process before bodies are told to end: "
                f"raise it to drain_grace={self.grace:g} or more"
            )

    def but(self, *, grace: float | None, timeout: float | None) -> "Patience":
        """The same with what is given here; a time-out that is not given gives way to a longer grace."""
        asked = self.grace if grace is None else grace
        return Patience(grace=asked, timeout=max(asked, self.timeout) if timeout is None else timeout)


PATIENT = Patience()


class Drain:
    """The end of a shift. It lives in the driver's loop."""

    def __init__(
        self,
        connection: Connection,
        controllers: Sequence[Controller],
        patience: Patience,
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
        """The worker was asked to stop, now or before."""
        if self._at is None:
            self._at = self._connection.clock.now()
        self._begun.set()

    async def run(self) -> None:
        """Until the process ends, or whoever awaits this has seen all bodies end, and cancels it."""
        await self._begun.wait()
        await self._until(self._patience.grace)
        if running := sum(controller.hurry() for controller in self._controllers):
            logger.info("%d bodies go on after %g s: they are told to end", running, self._patience.grace)
        if self._end is None:
            return
        await self._until(self._patience.timeout)
        left = sum(controller.bequeath() for controller in self._controllers)
        logger.warning("%d bodies go on after %g s: the process ends", left, self._patience.timeout)
        try:
            async with asyncio.timeout(_LAST_WRITES):
                await self._connection.keeper.outbox.aclose()
        finally:
            self._end()

    async def reported(self) -> None:
        """Wait until all results are reported; where they are on disk too, not for longer than the time-out."""
        self.begin()
        outbox = self._connection.keeper.outbox
        reporting = asyncio.create_task(outbox.empty())
        try:
            if not outbox.keeps:
                await reporting
                return
            giving_up = asyncio.create_task(self._until(self._patience.timeout))
            await asyncio.wait([reporting, giving_up], return_when=asyncio.FIRST_COMPLETED)
            giving_up.cancel()
        finally:
            reporting.cancel()
        if not reporting.done() or len(outbox):
            logger.warning("%d results are not reported yet: the next worker reports them", len(outbox))
            await outbox.aclose()

    async def _until(self, seconds: float) -> None:
        assert self._at is not None  # noqa: S101 - it has begun
        await self._connection.clock.wait(self._never, self._at + seconds)
