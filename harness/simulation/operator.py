"""An operator, who changes gates and limits while tasks are scheduled, wait and run."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from harness.history import Began
from harness.simulation.net import Net, Remote
from harness.simulation.worker import COLLECTIONS, KINDS
from harness.simulation.world import Process, World
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit.errors import BackendError
from leasekit.server.roles.gates import Gated
from leasekit.task import KindSettings
from leasekit.wire import GateRequest

_WHO = "operator"
_LOOK = 60.0  # seconds between two looks for what is still set once the faults are over


class Operator:
    """Repeat each change until it is answered; the changes are made one after another."""

    def __init__(self, world: World, net: Net) -> None:
        self._world = world
        self.process = Process(world, _WHO)
        self._wall: Callable[[], float] = lambda: world.now + net.server.wall
        self._remote = Remote(net, self.process, worker=_WHO)
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        world.log(Began, self.process.who, role="scheduler")

    def change(self, name: str, chance: random.Random, lasts: float) -> Callable[[], None]:
        """Close a gate, or limit a kind; return what takes the change back."""
        match name:
            case "gate":
                return self._close(chance, lasts)
            case "key_limit":
                return self._limit_keys(chance)
            case _:
                return self._limit(chance)

    def _limit(self, chance: random.Random) -> Callable[[], None]:
        kind = chance.choice(KINDS)
        concurrency, rate = chance.choice((1, 2, 5)), chance.choice((0.004, 0.05, 1.0))
        burst = chance.choice((1, 3))
        settings = chance.choice((
            KindSettings(concurrency=concurrency),
            KindSettings(rate=rate, burst=burst),
            KindSettings(concurrency=concurrency, rate=rate),
        ))  # fmt: skip
        self._ask("set_kind", (kind, settings))
        return lambda: self._ask("set_kind", (kind, None))

    def _limit_keys(self, chance: random.Random) -> Callable[[], None]:
        kind = chance.choice(KINDS)
        concurrency, rate, burst = chance.choice((1, 2)), chance.choice((0.004, 0.05)), chance.choice((1, 3))
        settings = chance.choice((
            KindSettings(key_concurrency=concurrency),
            KindSettings(key_rate=rate, key_burst=burst),
            KindSettings(key_concurrency=concurrency, key_rate=rate),
            KindSettings(key_concurrency=concurrency, concurrency=3),
        ))  # fmt: skip
        self._ask("set_kind", (kind, settings))
        return lambda: self._ask("set_kind", (kind, None))

    def _close(self, chance: random.Random, lasts: float) -> Callable[[], None]:
        """Close a gate; return what opens it. Some gates open by themselves before, some have been over for long."""
        kinds, collections = [Gated.kind(name) for name in KINDS], [Gated.collection(name) for name in COLLECTIONS]
        gated = chance.choice([*kinds, *collections, *collections])
        modes = ("pause", "drop") if chance.random() < 0.3 else ("pause",)
        for mode in modes:
            self._ask("set_gate", gated.closed(self._request(mode, chance, lasts), _WHO))
        return lambda: self._ask("set_gate", gated.opened(_WHO))

    def _request(self, mode: Any, chance: random.Random, lasts: float) -> GateRequest:
        match chance.randrange(6):
            case 0:
                return GateRequest(mode=mode, duration=chance.uniform(0, lasts))
            case 1:
                until = datetime.fromtimestamp(self._wall() + chance.uniform(-60, lasts), UTC)
                return GateRequest(mode=mode, until=until)
            case _:
                return GateRequest(mode=mode, reason=chance.choice((None, "a bad release")))

    def mend(self) -> None:
        """Take all changes back until the end of the history: one may arrive late, and a second time."""
        self.process.call(spawn, self._tend(), self._running)

    async def _tend(self) -> None:
        while True:
            with suppress(BackendError):
                for gate in await call_once(partial(self._remote._call, "gates"), within=10.0):
                    scope, name = ("kind", gate.kind) if gate.kind is not None else ("collection", gate.collection)
                    await self._change("set_gate", Gated(scope, name).opened(_WHO))
            for kind in KINDS:
                await self._change("set_kind", (kind, None))
            await asyncio.sleep(_LOOK)

    def _ask(self, op: str, change: Any) -> None:
        self.process.call(self._spawn, op, change)

    def _spawn(self, op: str, change: Any) -> None:
        spawn(self._change(op, change), self._running)

    async def _change(self, op: str, change: Any) -> None:
        ask = partial(call_once, partial(self._remote._call, op, change), within=10.0)
        async with self._turn:
            with suppress(BackendError):
                await call_until(ask, for_at_most=600.0)
