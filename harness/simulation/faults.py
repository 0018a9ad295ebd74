"""The faults of a history, planned before it starts, so that each can be left out."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from harness.history import Fault, FaultsOver
from harness.simulation.cluster import Cluster, Node
from harness.simulation.net import Net
from harness.simulation.operator import Operator
from harness.simulation.scenario import FAULTS, NODE_FAULTS, QUEUE_FAULTS
from harness.simulation.server import Server
from harness.simulation.worker import Worker
from harness.simulation.world import World

_WEATHER = frozenset({
    "cut", "refuse", "one_way", "drop_request", "drop_reply", "reset", "slow", "crawl", "jitter", "duplicate",
    "throttle", "throttle_most", "garble", "bad_items", "flaky", "foreign",
})  # fmt: skip
_UNHEARD = {"unheard_claim": "claim", "unheard_beat": "beat", "unheard_result": "settle", "heard_again": "claim"}
_OF_WORKERS = frozenset({"kill", "pause", "gil", "stall", "stop", "freeze", "suspend"})
_OF_SERVER = frozenset([*FAULTS[FAULTS.index("server_kill") : FAULTS.index("kill")], *NODE_FAULTS])
_OF_OPERATORS = frozenset({"gate", "limit", "key_limit", "bulk", "drain"})
_PLANNED = _WEATHER | _OF_WORKERS | frozenset(QUEUE_FAULTS) | _OF_SERVER | _OF_OPERATORS | _UNHEARD.keys()
_STANDING = {"pause": "paused", "freeze": "frozen", "suspend": "suspended"}
_STEPS = (2.0, 60.0, 400.0, 3600.0)  # of a wall clock


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault in the plan."""

    number: int
    name: str
    at: float
    lasts: float


def planned(world: World, *, until: float) -> list[Planned]:
    faults: list[tuple[float, str, float]] = []
    for name in (*FAULTS, *NODE_FAULTS, *QUEUE_FAULTS):
        rate = world.scenario.rates.get(name, 0.0)
        if name not in _PLANNED or not rate:
            continue
        chance = world.chance(f"plan/{name}")
        at = chance.expovariate(rate / 3600)
        while at < until:
            lengths = ((0.5, 20), (20, 135), (135, 320), (300, 700))
            faults.append((at, name, chance.choice([chance.uniform(*bounds) for bounds in lengths])))
            at += chance.expovariate(rate / 3600)
    return [Planned(number, name, at, lasts) for number, (at, name, lasts) in enumerate(sorted(faults))]


class Faults:
    """Inject the planned faults, and end them."""

    def __init__(self, world: World, net: Net, server: Server | Cluster, workers: Callable[[], list[Worker]]) -> None:
        self._world = world
        self._net = net
        self._server = server
        self._workers = workers
        self._undo: dict[int, Callable[[], object]] = {}
        self._operator: Operator | None = None  # none is there before the first change

    def plan(self, faults: list[Planned]) -> None:
        for fault in faults:
            if fault.number not in self._world.scenario.skip:
                self._world.at(fault.at, self._happen, fault)

    def end(self) -> None:
        for number in list(self._undo):
            self._take_back(number)
        self._net.unheard.clear()
        self._world.are_faults_over = True
        self._server.mend()
        if self._operator is not None:
            self._operator.mend()
        self._world.log(FaultsOver, "world")

    def _take_back(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            undo()

    def _happen(self, fault: Planned) -> None:
        chance = self._world.chance(f"fault/{fault.number}")
        if fault.name in _WEATHER:
            self._weather(fault, chance)
        elif fault.name in _UNHEARD:
            self._lose_answer(fault, chance)
        elif fault.name in _OF_WORKERS:
            self._to_worker(fault, chance)
        elif fault.name in QUEUE_FAULTS:
            self._to_queues(fault)
        elif fault.name in _OF_OPERATORS:
            self._by_operator(fault, chance)
        else:
            self._to_server(fault, chance)

    def _lasting(
        self, fault: Planned, undo: Callable[[], object], *, lasts: float | None = None, target: str = ""
    ) -> None:
        lasts = fault.lasts if lasts is None else lasts
        self._undo[fault.number] = undo
        self._world.after(lasts, self._take_back, fault.number)
        self._world.log(Fault, "world", name=fault.name, target=target, lasts=lasts)

    def _weather(self, fault: Planned, chance: random.Random) -> None:
        alive = self._workers()
        target = chance.choice(alive).who if alive and chance.random() < 0.4 else ""
        self._net.weather[fault.number] = (fault.name, target)
        self._lasting(fault, lambda: self._net.weather.pop(fault.number), target=target)

    def _lose_answer(self, fault: Planned, chance: random.Random) -> None:
        if alive := self._workers():
            who, op = chance.choice(alive).who, _UNHEARD[fault.name]
            away = max(self._world.scenario.ttls) * chance.uniform(1.0, 1.5)
            lose = self._lose_first if fault.name == "heard_again" else self._cut_off
            self._net.unheard[op, who] = lambda: lose(fault, op, who, away)

    def _cut_off(self, fault: Planned, op: str, who: str, away: float) -> bool:
        del self._net.unheard[op, who]
        self._world.fired[fault.name] += 1
        self._net.weather[fault.number] = ("cut", who)
        self._lasting(fault, lambda: self._net.weather.pop(fault.number), lasts=away, target=who)
        return False

    def _lose_first(self, fault: Planned, op: str, who: str, away: float) -> bool:
        """Lose this answer, deliver the next one, and cut the process off after it."""
        self._world.log(Fault, "world", name=fault.name, target=who)
        self._net.unheard[op, who] = lambda: not self._cut_off(fault, op, who, away)
        return False

    def _to_worker(self, fault: Planned, chance: random.Random) -> None:
        alive = self._workers()
        if not alive:
            return
        worker = chance.choice(alive)
        who, name = worker.who, fault.name
        match name:
            case "kill" | "stop":
                self._world.log(Fault, "world", name=name, target=who)
                worker.die("a fault") if name == "kill" else worker.stop()
            case "gil":
                running = list(worker.handlers.values())
                if not running or worker.gil is not None:
                    return
                worker.gil = chance.choice(running)
                worker.process.hold("gil")
                self._lasting(fault, lambda: self._give_back_gil(worker), target=who)
            case "stall":
                worker.process.hold("stall")
                self._lasting(fault, lambda: worker.process.let_go("stall"), target=who)
            case _:
                why = _STANDING[name]
                worker.process.hold(why)
                self._lasting(fault, lambda: worker.resume(why), target=who)
        self._world.fired[name] += 1

    def _to_queues(self, fault: Planned) -> None:
        """Disturb the queues. No promise of leases depends on them: the history does not have this as a fault."""
        queues = self._server.queues
        assert queues is not None, "faults of queues are for a scenario that has queues"
        queues.faults[fault.number] = fault.name
        self._undo[fault.number] = lambda: queues.faults.pop(fault.number)
        self._world.after(fault.lasts, self._take_back, fault.number)

    def _by_operator(self, fault: Planned, chance: random.Random) -> None:
        if self._operator is None:
            self._operator = Operator(self._world, self._net, lambda: [worker.who for worker in self._workers()])
        self._world.fired[fault.name] += 1
        self._undo[fault.number] = self._operator.change(fault.name, chance, fault.lasts)
        self._world.after(fault.lasts, self._take_back, fault.number)

    def _give_back_gil(self, worker: Worker) -> None:
        worker.gil = None
        worker.resume("gil")

    def _to_server(self, fault: Planned, chance: random.Random) -> None:
        server, name = self._server.for_request(), fault.name
        if name == "database_away":
            assert isinstance(self._server, Cluster)
            self._switch_on(fault, self._server, "is_away", lasts=min(fault.lasts, 60.0))
            return
        process = server.process
        if process is None or not process.is_alive:
            return
        match name:
            case "server_kill" | "server_reboot":
                self._world.log(Fault, "world", name=name, lasts=fault.lasts)
                server.kill(back_in=fault.lasts, is_rebooted=name == "server_reboot")
            case "server_stop":
                self._world.log(Fault, "world", name=name, lasts=min(fault.lasts, 60.0))
                server.stop(back_in=min(fault.lasts, 60.0))
            case "kill_before_commit" | "kill_after_commit":
                server.die_at = name
                return  # counted when it happens
            case "node_stall" | "node_kill":
                assert isinstance(server, Node)
                server.stands_in_commit_for, server.is_killed_in_commit = fault.lasts, name == "node_kill"
                return  # counted when it happens
            case "server_slow":
                server.latency = chance.choice((0.5, 2.0, 8.0))
                self._lasting(fault, lambda: setattr(server, "latency", 0.0))
                return
            case "store_error":
                self._switch_on(fault, server.store, "fails", lasts=fault.lasts)
                return
            case "store_ambiguous":
                self._switch_on(fault, server.store, "lies", lasts=min(fault.lasts, 60.0))
                return
            case "wall_forward" | "wall_back" | "wall_creep":
                self._step_clock(fault, server, chance)
            case _:
                why = _STANDING[name.removeprefix("server_")]
                process.hold(why)
                self._lasting(fault, lambda: process.let_go(why))
        self._world.fired[name] += 1

    def _switch_on(self, fault: Planned, what: object, switch: str, *, lasts: float) -> None:
        setattr(what, switch, True)
        self._lasting(fault, lambda: setattr(what, switch, False), lasts=lasts)

    def _step_clock(self, fault: Planned, server: Server, chance: random.Random) -> None:
        if fault.name == "wall_creep":
            self._world.log(Fault, "world", name=fault.name, lasts=0.0)
            self._creep(chance, until=self._world.now + fault.lasts)
        else:
            server.wall += chance.choice(_STEPS) * (1 if fault.name == "wall_forward" else -1)
            self._world.log(Fault, "world", name=fault.name)

    def _creep(self, chance: random.Random, *, until: float) -> None:
        """Step the wall clock ahead in small steps."""
        if self._world.now < until and not self._world.are_faults_over:
            self._server.wall += chance.uniform(0.05, 0.99)
            self._world.after(chance.uniform(1.0, 10.0), lambda: self._creep(chance, until=until))
