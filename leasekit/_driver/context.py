"""Context: what the parts of one keeper share."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

from leasekit._driver.clock import Clock
from leasekit._driver.explaining.loop_monitor import take_reading
from leasekit._driver.explaining.recorder import Recorder
from leasekit._driver.guarding.watchdog import UNGUARDED, Watchdog
from leasekit._driver.reachability import Reachability
from leasekit.backend import Backend
from leasekit.hooks import Hooks
from leasekit.task import Claimed

ClaimCall = Callable[..., Coroutine[Any, Any, Claimed]]
"""A call with the signature of `Backend.claim`."""


class Context:
    """The service of one keeper, and the clock, hooks and records that its calls go by."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        hooks: Hooks,
        chance: random.Random,
        watchdog: Watchdog = UNGUARDED,
        claim: ClaimCall | None = None,
    ) -> None:
        self.backend = backend
        self._claim = claim
        self.clock = clock
        self.hooks = hooks
        self.chance = chance
        self.watchdog = watchdog
        self.reachability = Reachability(clock)
        self.recorder = Recorder(take_reading(clock, None))
        self.wake = asyncio.Event()  # set when the keeper's loop has to look again …
        self.wakes_at = math.inf  # … before this instant

    @property
    def claim(self) -> ClaimCall:
        """The call that claims tasks: by way of queues, if the service has them."""
        return self._claim or self.backend.claim
