"""An operator, who changes gates, limits, workers, and all tasks of a kind, while tasks are scheduled, wait and run."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from harness.history import Began, BulkAnswered, BulkAsked
from harness.simulation.net import Net, Remote
from harness.simulation.worker import COLLECTIONS, KINDS
from harness.simulation.world import Process, World
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.thread import spawn
from leasekit.errors import BackendError
from leasekit.server.roles.gates import Gated
from leasekit.task import KindSettings, Matched
from leasekit.wire import CancelMatchingRequest, GateRequest, RescheduleMatchingRequest

_WHO = "operator"
_LOOK = 60.0  # seconds between two looks for what is still set once the faults are over


class Operator:
    """Repeat each change until it is answered; the changes are made one after another."""

    def __init__(self, world: World, net: Net, workers: Callable[[], list[str]]) -> None:
        self._world = world
        self._workers = workers
        self.process = Process(world, _WHO)
        self._wall: Callable[[], float] = lambda: world.now + net.server.wall
        self._remote = Remote(net, self.process, worker=_WHO)
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        world.log(Began, self.process.who, role="scheduler")

    def change(self, name: str, chance: random.Random, lasts: float) -> Callable[[], None]:
        """Close a gate, drain a worker, limit a kind, or change all its tasks; return what takes the change back."""
        match name:
            case "drain":
                return self._drain(chance)
            case "bulk":
                self.process.call(spawn, self._change_all(chance), self._running)
                return lambda: None
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

    def _drain(self, chance: random.Random) -> Callable[[], None]:
        worker = chance.choice(self._workers() or ["nobody"])
        self._ask("drain", worker)
        return lambda: self._ask("undrain", worker)

    def _limit_keys(self, chance: random.Random) -> Callable[[], None]:
        kind = chance.choice(KINDS)
        concurrency, rate, burst = chance.choice((1, 2)), chance.choice((0.004, 0.05)), chance.choice((1, 3))
        settings = chance.choice((
            KindSettings(key_concurrency=concurrency),
            KindSettings(key_rate=rate, key_burst=burst),
            KindSettings(key_concurrency=concurrency, key_rate=rate),
            KindSettings(key_concurrency=concurrency, concurrency=3),
            *(KindSettings(ordered=True),) * 3,
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

    async def _change_all(self, chance: random.Random) -> None:
        """Cancel or reschedule all tasks of a kind: count them, and change them somewhat later."""
        kind, now = chance.choice(KINDS), self._world.now
        act: Literal["cancel", "reschedule"] = chance.choice(("cancel", "reschedule", "reschedule"))
        due_by_store = None if act == "cancel" else max(0.0, self._wall() + chance.uniform(-600, 1800))
        request = CancelMatchingRequest(kind=kind, dry_run=True)
        if due_by_store is not None:
            at = datetime.fromtimestamp(due_by_store, UTC)
            request = RescheduleMatchingRequest(kind=kind, at=at, dry_run=True)
        with suppress(BackendError):
            counted = await self._matching(act, request)
            until = self._world.now
            await asyncio.sleep(chance.uniform(0, 120))
            if self._world.are_faults_over:
                return
            asked_at, about = self._world.now, {"act": act, "kind": kind, "counted_from": now}
            self._world.log(BulkAsked, self.process.who, **about, counted_until=until)
            request = replace(request, dry_run=False, token=counted.token)
            answer = await self._matching(act, request)
            while answer.cursor is not None:
                answer = await self._matching(act, replace(request, cursor=answer.cursor))
            self._world.log(BulkAnswered, self.process.who, **about, asked_at=asked_at, due_by_store=due_by_store)

    async def _matching(self, act: str, request: CancelMatchingRequest) -> Matched:
        ask = partial(call_once, partial(self._remote._call, f"{act}_matching", request), within=10.0)
        answer: Matched = await call_until(ask, for_at_most=60.0)
        return answer

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
