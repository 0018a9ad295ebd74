"""Scenarios: the amount of work, and the rate of each fault."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from leasekit.config import Heartbeats

FAULTS = (
    # Of the network: of one process or all, for a while.
    "cut", "refuse", "one_way", "drop_request", "drop_reply", "reset", "slow", "crawl", "jitter", "duplicate",
    "throttle", "throttle_most", "garble", "bad_items", "flaky",
    # A request is served, its answer is lost, and the network stays away for longer than every lease lasts.
    "unheard_claim", "unheard_beat", "unheard_result",
    # A claim is served, its answer is lost, its repeat is answered, and then the network stays away likewise.
    "heard_again",
    # Of the server.
    "server_kill", "kill_before_commit", "kill_after_commit", "server_stop", "server_pause", "server_freeze",
    "server_suspend", "server_reboot", "server_slow", "store_error", "store_ambiguous",
    "wall_forward", "wall_back", "wall_creep",
    # Of workers.
    "kill", "hand_back", "pause", "gil", "stall", "stop", "freeze", "suspend", "deaf", "poison", "hang",
    # Of scheduling clients.
    "again", "cancel", "same_key",
    # Of what stands between a worker and the server, and answers in its place.
    "foreign",
    # Of operators.
    "redrive",
    # Of operators, who close a gate for a while, set limits of a kind or of its keys, change all tasks of a kind, or
    # drain a worker.
    "gate", "limit", "key_limit", "bulk", "drain",
    # Of handlers that say `NotYet`.
    "poll",
)  # fmt: skip
"""All faults.

Rates are per hour; those of `deaf`, `poison`, `hang`, `redrive`, `poll` and of scheduling clients are a percentage of
tasks, and so are `require`, which no swarm has, and `prefer`: of tasks that require or prefer labels, of workers of
which not all have them.
"""

QUEUE_FAULTS = (
    # Messages are lost, come twice, come in another order, come minutes later, or no call is answered.
    "queue_lose", "queue_repeat", "queue_reorder", "queue_delay", "queue_away",
)  # fmt: skip
"""Faults of queues, for a while each, in a scenario that has queues."""

CHANGES = ("after", "reschedule", "late", "debounce", "periodic")
"""What clients do with tasks that wait, as percentages of tasks: some run after others, some are rescheduled, some have
a start deadline, and some replace one another or have a live key. `periodic` is the number of seconds between two
firings of a periodic task."""

NODE_FAULTS = (
    # A node stands still, or is killed, between the beginning and the end of a transaction.
    "node_stall", "node_kill",
    # The database that the nodes share is away.
    "database_away",
)  # fmt: skip
"""Faults of a server that is one of several nodes."""

_BEATS = Heartbeats()
_RATES = (0.0, 0.3, 1.0, 4.0)
_SHARES = (0.0, 0.0, 10.0, 40.0)  # of tasks
_INTERVALS = (0.0, 0.0, 300.0, 900.0)  # of a periodic task
_TTLS = ((120.0, 300.0), (60.0, 300.0), (60.0, 600.0), (30.0, 120.0, 300.0), (290.0, 300.0))
_EQUAL = 1 / 8  # of all tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The parameters of one history. Times are in seconds."""

    seed: int
    hours: float = 4.0  # the last quarter is without faults; a drain follows
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    skip: frozenset[int] = frozenset()  # numbers of faults to leave out, for shrinking
    workers: int = 3
    slots: int = 6
    heartbeats: Heartbeats = _BEATS
    ttls: tuple[float, ...] = (120.0, 300.0)  # each task draws one for its claims, and another for its beats
    tasks_per_hour: float = 80.0
    longest_handler: float = 1500.0
    effect_every: float = 30.0
    drift: float = 0.001  # the worst rate error of a clock
    poll: float = 60.0  # of one claim
    look: float = 30.0  # a controller's period
    period: float = 5.0  # of the server's consumer
    store: str = "memory"
    has_queues: bool = False  # between the server and its workers
    nodes: int = 1  # servers over one PostgreSQL, instead of `store`, if there are several

    def ttls_of_a_task(self, rng: random.Random) -> tuple[float, float]:
        """Draw the ttl of a task's claims and that of its beats: either is the longer one, and a few are equal."""
        is_equal = len(self.ttls) == 1 or rng.random() < _EQUAL
        of_claims, of_beats = [rng.choice(self.ttls)] * 2 if is_equal else rng.sample(self.ttls, 2)
        return of_claims, of_beats


def swarm(seed: int, **others: object) -> Scenario:
    """A scenario in which each kind of fault, and of change, has a random rate, zero for many."""
    chance = random.Random(f"swarm/{seed}")
    rates = {name: chance.choice(_RATES) for name in FAULTS}
    rates |= {name: chance.choice(_INTERVALS if name == "periodic" else _SHARES) for name in CHANGES}
    has_queues = chance.random() < 0.25
    if has_queues:
        rates |= {name: chance.choice(_RATES) for name in QUEUE_FAULTS}
    if chance.random() < 0.5:  # exclusion is not promised for frozen machines: half of all histories have none
        rates["freeze"] = 0.0
    ttls = chance.choice(_TTLS)
    rates["prefer"] = 0.0 if has_queues else chance.choice(_SHARES)  # any worker gets a message of a queue
    scenario = Scenario(seed=seed, rates=rates, ttls=ttls, has_queues=has_queues)
    return replace(scenario, **others)  # type: ignore[arg-type]


def only(**rates: float) -> Mapping[str, float]:
    return dict.fromkeys(FAULTS, 0.0) | rates


PRESETS: Mapping[str, Mapping[str, object]] = {
    "calm": {"rates": only()},
    "outages": {"rates": only(cut=4.0, refuse=2.0, one_way=2.0)},
    "fencing": {"rates": only(freeze=4.0, suspend=2.0, pause=4.0, duplicate=4.0, deaf=30.0)},
    "slow": {"rates": only(slow=4.0, crawl=4.0, jitter=4.0, drop_reply=4.0, duplicate=4.0, server_slow=4.0)},
    "late": {"rates": only(crawl=6.0, drop_reply=6.0, one_way=6.0, cut=8.0, deaf=30.0), "tasks_per_hour": 150.0},
    "unheard": {
        "rates": only(unheard_claim=4.0, unheard_beat=8.0, unheard_result=4.0, deaf=30.0),
        "ttls": (60.0, 300.0),
    },
    "repeats": {"rates": only(heard_again=12.0, deaf=60.0), "tasks_per_hour": 120.0},
    "restarts": {"rates": only(server_kill=6.0, kill_before_commit=4.0, kill_after_commit=4.0, server_stop=2.0)},
    "clocks": {"rates": only(wall_forward=6.0, wall_back=6.0, wall_creep=6.0, server_suspend=2.0, server_pause=2.0)},
    "steps": {
        "rates": only(wall_forward=15.0, wall_back=15.0, server_kill=10.0, server_stop=6.0, server_reboot=6.0),
        "ttls": (60.0, 300.0),
    },
    "deaths": {"rates": only(kill=8.0, pause=6.0, gil=6.0, stall=4.0, stop=4.0, deaf=30.0, poison=4.0, hand_back=50.0)},
    "guard": {"rates": only(gil=15.0, stall=10.0, pause=10.0, deaf=50.0)},
    "storms": {"rates": only(throttle=4.0, throttle_most=4.0, garble=4.0, bad_items=4.0, flaky=4.0, reset=4.0)},
    "strangers": {"rates": only(foreign=8.0)},
    "redrives": {
        "rates": only(redrive=60.0, poison=20.0, kill=6.0, cancel=10.0, same_key=20.0, duplicate=4.0, drop_reply=4.0),
        "tasks_per_hour": 120.0,
    },
    "nodes": {
        "rates": only(
            server_kill=6.0,
            kill_before_commit=4.0,
            kill_after_commit=4.0,
            server_stop=2.0,
            server_pause=4.0,
            server_freeze=1.0,
            server_slow=2.0,
            store_error=2.0,
            store_ambiguous=4.0,
            wall_forward=4.0,
            wall_back=4.0,
            wall_creep=2.0,
            node_stall=20.0,
            node_kill=10.0,
            database_away=2.0,
            require=3.0,
            prefer=6.0,
            kill=2.0,
            cut=2.0,
            drop_reply=2.0,
            duplicate=2.0,
            cancel=10.0,
            same_key=10.0,
            again=10.0,
        ),
        "nodes": 3,
    },
    "gates": {"rates": only(gate=60.0, drop_reply=4.0, duplicate=4.0, server_kill=4.0), "tasks_per_hour": 200.0},
    "drains": {
        "rates": only(
            drain=30.0, drop_reply=6.0, duplicate=6.0, server_kill=4.0, kill_after_commit=4.0, cut=2.0, pause=4.0
        ),
        "tasks_per_hour": 200.0,
    },
    "kind_limits": {
        "rates": only(limit=40.0, kill=6.0, server_kill=6.0, drop_reply=4.0, duplicate=4.0, store_ambiguous=2.0),
        "tasks_per_hour": 200.0,
    },
    "polls": {
        "rates": only(
            poll=70.0, kill=4.0, hand_back=50.0, stop=6.0, pause=4.0, cut=4.0, one_way=2.0, cancel=20.0, duplicate=2.0
        ),
        "tasks_per_hour": 150.0,
    },
    "key_limits": {
        "rates": only(key_limit=40.0, kill=6.0, server_kill=6.0, drop_reply=4.0, duplicate=4.0, gate=10.0),
        "tasks_per_hour": 200.0,
    },
    "labels": {
        "rates": only(
            require=60.0,
            prefer=60.0,
            kill=6.0,
            server_kill=6.0,
            drop_reply=4.0,
            duplicate=4.0,
            cut=2.0,
            again=10.0,
            redrive=10.0,
        ),
        "tasks_per_hour": 150.0,
    },
    "queues": {
        "rates": only(
            queue_lose=6.0,
            queue_repeat=6.0,
            queue_reorder=6.0,
            queue_delay=4.0,
            queue_away=4.0,
            kill=6.0,
            server_kill=6.0,
            kill_after_commit=4.0,
            server_pause=2.0,
            drop_reply=4.0,
            duplicate=4.0,
            cut=2.0,
            deaf=20.0,
            gate=10.0,
            limit=6.0,
            key_limit=6.0,
        ),
        "tasks_per_hour": 200.0,
        "has_queues": True,
    },
    "dependencies": {
        "rates": only(
            after=50.0,
            cancel=5.0,
            redrive=10.0,
            same_key=5.0,
            again=10.0,
            drop_reply=4.0,
            duplicate=4.0,
            server_kill=4.0,
            kill_before_commit=2.0,
            kill_after_commit=2.0,
            store_ambiguous=2.0,
        ),
        "tasks_per_hour": 150.0,
    },
    "changes": {
        "rates": only(
            after=20.0,
            reschedule=40.0,
            late=20.0,
            gate=15.0,
            debounce=10.0,
            cancel=5.0,
            drop_reply=4.0,
            duplicate=4.0,
            kill=4.0,
            server_kill=4.0,
            kill_after_commit=4.0,
            store_ambiguous=2.0,
        ),
        "tasks_per_hour": 150.0,
    },
    "debounces": {
        "rates": only(
            debounce=60.0,
            same_key=20.0,
            after=10.0,
            late=10.0,
            cancel=10.0,
            drop_reply=4.0,
            duplicate=4.0,
            kill=4.0,
            server_kill=4.0,
            kill_after_commit=4.0,
            store_ambiguous=2.0,
        ),
        "tasks_per_hour": 150.0,
    },
    "bulk": {
        "rates": only(
            bulk=12.0,
            after=10.0,
            late=10.0,
            debounce=10.0,
            drop_reply=4.0,
            duplicate=4.0,
            kill=4.0,
            server_kill=4.0,
            kill_after_commit=4.0,
            store_ambiguous=2.0,
        ),
        "tasks_per_hour": 300.0,
    },
    "firings": {
        "rates": only(
            periodic=60.0,
            server_kill=10.0,
            kill_before_commit=6.0,
            kill_after_commit=6.0,
            server_stop=4.0,
            store_ambiguous=4.0,
            store_error=2.0,
            drop_reply=2.0,
        ),
    },
    "schedules": {"rates": only(again=20.0, cancel=15.0, same_key=20.0, duplicate=4.0, drop_reply=4.0)},
}
"""Scenarios that stress one kind of fault: `Scenario(seed=1, **PRESETS["outages"])`."""
