"""Reachability: whether the service answers, over all calls of one connection.

Rule 1: the begin and the end of an outage are logged once, not for each call, lease or kind. A single call that fails
is no outage yet.
Rule 2: calls of one sort end no outage of another sort: of several servers behind one URL, one may be away.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from leasekit._driver.clock import Clock
from leasekit._driver.retrying import call_once
from leasekit.errors import BackendError, Refused, Throttled

logger = logging.getLogger("leasekit")

T = TypeVar("T")
_QUIET = 30.0  # seconds: a sort of calls that has failed is repeated earlier, or not needed any more


class Reachability:
    """Make the calls of one connection, and log when the service is lost and back. For the driver's thread alone."""

    def __init__(self, clock: Clock) -> None:
        self.answered_at: float | None = None  # of the last answer, also a refusal; read by any thread
        self._reached = False  # at any time
        self._clock = clock
        self._lost_at = 0.0
        self._said = False  # the outage is logged
        self._failed_at: dict[str, float] = {}  # sort of calls → when the last of them failed
        self._on_reached: list[Callable[[], object]] = []

    @property
    def answers_claims(self) -> bool:
        """Whether claims are answered, as far as is known. That other calls fail tells nothing of them (Rule 2)."""
        return self._reached and "claim" not in self._failed_at

    def when_reached(self, call: Callable[[], object]) -> None:
        if self._reached:
            call()
        else:
            self._on_reached.append(call)

    async def call(
        self, sort: Literal["claim", "beat", "settle"], call: Callable[[], Awaitable[T]], *, within: float
    ) -> T:
        """Return the result of a backend's call within `within` seconds; any error becomes a `BackendError`."""
        try:
            answer = await call_once(call, within=within)
        except (Refused, Throttled):
            self._end_outage(sort)
            raise
        except BackendError as error:
            self._failed(sort, error)
            raise
        self._end_outage(sort)
        self._reached = True
        while self._on_reached:
            self._on_reached.pop(0)()
        return answer

    def _failed(self, sort: str, error: BackendError) -> None:
        now = self._clock.now()
        if not self._failed_at:
            self._lost_at = now
        elif not self._said:
            self._said = True
            why = f"{type(error).__name__}: {error}"
            logger.warning("the service does not answer, calls are repeated until it does: %s", why)
        self._failed_at[sort] = now

    def _end_outage(self, sort: str) -> None:
        self.answered_at = self._clock.now()
        if not self._failed_at:
            return
        now = self._clock.now()
        self._failed_at = {other: at for other, at in self._failed_at.items() if other != sort and now - at < _QUIET}
        if self._said and not self._failed_at:
            self._said = False
            logger.warning("the service answers again, after %.1f s", now - self._lost_at)
