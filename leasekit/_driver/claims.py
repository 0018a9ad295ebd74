"""Claims on their way: repeated until they are answered, and given back when nobody waits for the answer any more.

A task that was granted to nobody lies about until its lease has run out, so a claim keeps its
`claim_id` over all tries, and one that is abandoned is ended under it: what it got is released, and a try that still is
under way gets nothing.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from leasekit._driver.clock import Clock
from leasekit._driver.ledger import Ledger
from leasekit._driver.outbox import Delivery, Outbox
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit.backend import Backend
from leasekit.errors import BackendError, Closed, Throttled, Unavailable
from leasekit.task import Claimed, Settlement
from leasekit.wire import check_kinds

__all__ = ["Claims"]

logger = logging.getLogger("leasekit")

_SPARE = 10.0  # seconds that an answer may come after its wait


class Claims:
    """The claims of one connection. A claim is repeated for at most `patience` seconds beyond its wait."""

    def __init__(
        self, backend: Backend, *, clock: Clock, outbox: Outbox, patience: float, chance: random.Random
    ) -> None:
        self._backend = backend
        self._chance = chance
        self._clock = clock
        self._outbox = outbox
        self._patience = patience
        self._waiting: set[asyncio.Task[Claimed]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self.ledger: Ledger | None = None  # where a supervisor reads what is asked for

    async def claim(
        self, kinds: Sequence[str], *, limit: int, wait: float, failing: Callable[[BaseException], None] | None = None
    ) -> tuple[Claimed, float]:
        """What was granted, and when it was first asked for: a repeat may be answered with what that one was granted.

        Being cancelled gives back what may have been granted meanwhile; so does closing, which raises `Closed` here.
        Raises `Refused` where the kinds are too many for any service: nothing is asked.
        """
        check_kinds(kinds)
        if self._closed.is_set():
            raise Closed
        limit = min(limit, self._backend.traits.max_claim)
        claim_id = f"{self._chance.getrandbits(128):032x}"
        ask = partial(self._backend.claim, kinds, limit=limit, claim_id=claim_id)
        noted = self._note(claim_id, kinds)
        asked_at = self._clock.now()
        waiting = asyncio.create_task(self._answer(ask, wait, failing, noted))
        self._waiting.add(waiting)
        try:
            claimed = await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.exception() is None:  # answered at the very moment
                self._release(waiting.result())
            if waiting.cancelled():
                noted = None  # until what it was granted has been given back
            if self._closed.is_set():
                raise Closed from None
            raise
        finally:
            self._waiting.discard(waiting)
            if noted is not None and self.ledger is not None:
                # Soon, and not now: whoever waits notes first what was granted, in the same breath as this ends.
                asyncio.get_running_loop().call_soon(self.ledger.remove, noted)
        if self._closed.is_set():  # likewise
            self._release(claimed)
            raise Closed
        return claimed, asked_at

    def _note(self, claim_id: str, kinds: Sequence[str]) -> int | None:
        if self.ledger is None or not self._backend.traits.remembers_claims:
            return None
        return self.ledger.asks(claim_id, kinds)

    async def _answer(
        self,
        ask: Callable[..., Awaitable[Claimed]],
        wait: float,
        failing: Callable[[BaseException], None] | None,
        noted: int | None,
    ) -> Claimed:
        remembered, kept = self._backend.traits.remembers_claims, self._backend.traits.keeps_claims
        tries = 0

        async def call() -> Claimed:
            nonlocal tries
            tries += 1
            asking = asyncio.create_task(call_once(partial(ask, wait=wait), within=wait + _SPARE))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                if remembered:
                    asking.cancel()
                elif not (kept and asking.cancel()):  # nothing but this very call can say what it was granted
                    spawn(self._give_back(lambda: asking), self._returning)
                raise

        try:
            # Beyond its wait: an answer that is lost at the end of a long poll must be asked for again as well.
            claimed = await call_until(call, for_at_most=wait + self._patience, failing=failing)
        except asyncio.CancelledError:
            if remembered:
                self._end(ask, noted)
            raise
        except (Unavailable, Throttled):
            if remembered:
                self._end(ask)
            raise
        if remembered and tries > 1 and not claimed.tasks:  # an earlier try may still be on its way
            self._end(ask)
        return claimed

    def _end(self, ask: Callable[..., Awaitable[Claimed]], noted: int | None = None) -> None:
        """Have the service grant this claim nothing more, and release what it was granted."""
        end = partial(ask, wait=0, limit=0)
        spawn(self._give_back(lambda: call_once(end, within=_SPARE), noted), self._returning)

    async def _give_back(self, ask: Callable[[], Awaitable[Claimed]], noted: int | None = None) -> None:
        try:
            self._release(await ask())
        except BackendError as error:  # a courtesy: these leases run out by themselves
            logger.debug("an abandoned claim could not be given back: %s", error)
            return
        if noted is not None and self.ledger is not None:
            self.ledger.remove(noted)

    def _release(self, claimed: Claimed) -> None:
        for task in claimed.tasks:
            self._outbox.put(Delivery(Settlement(id=task.id, token=task.token, outcome="release")))

    async def abandon(self) -> None:
        """Claim no more: whoever waits gets `Closed`, and what they may have been granted is given back."""
        self._closed.set()
        for waiting in self._waiting:
            waiting.cancel()
        if self._waiting:
            await asyncio.wait(list(self._waiting))
        if self._returning:
            await asyncio.wait(list(self._returning))

    async def aclose(self) -> None:
        """End the tries to give back."""
        returning = list(self._returning)
        for task in returning:
            task.cancel()
        await asyncio.gather(*returning, return_exceptions=True)
