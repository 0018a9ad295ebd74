"""Context: what the parts of one keeper share."""

import asyncio
import math
import random

from leasekit._driver.clock import Clock
from leasekit._driver.explaining.loop_monitor import take_reading
from leasekit._driver.explaining.recorder import Recorder
from leasekit._driver.guarding.watchdog import UNGUARDED, Watchdog
from leasekit._driver.reachability import Reachability
from leasekit.backend import Backend
from leasekit.hooks import Hooks


class Context:
    """The service of one keeper, and the clock, hooks and records that its calls go by."""

    def __init__(
        self, backend: Backend, *, clock: Clock, hooks: Hooks, chance: random.Random, watchdog: Watchdog = UNGUARDED
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.hooks = hooks
        self.chance = chance
        self.watchdog = watchdog
        self.reachability = Reachability(clock)
        self.recorder = Recorder(take_reading(clock, None))
        self.wake = asyncio.Event()  # set when the keeper's loop has to look again …
        self.wakes_at = math.inf  # … before this instant
