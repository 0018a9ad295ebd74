"""The stresses under which mutants are looked for: presets of the simulation, and some that are sharper."""

from collections.abc import Mapping
from typing import Any

from harness.simulation.scenario import PRESETS, only
from leasekit.config import Heartbeats

# The margin is shorter than one call may take: a lease stays exclusive only if trust counts from the right moment.
_TIGHT = Heartbeats(margin=1.0, call_timeout=60.0)

STRESSES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"hours": 1.5, **preset} for name, preset in PRESETS.items()},
    # Answers that come late to holders that hear nothing after them and whose handlers do not check their leases.
    "tight": {
        "hours": 2.0,
        "rates": only(crawl=16.0, one_way=10.0, cut=8.0, deaf=100.0),
        "heartbeats": _TIGHT,
        "tasks_per_hour": 200.0,
    },
    # A claim may take longer than the granted lease lasts. The server is slow, so no claim is granted in the instant
    # of its arrival: errors in what `waited` is used for would not show then.
    "short": {
        "hours": 1.5,
        "rates": only(crawl=12.0, drop_reply=8.0, one_way=8.0, cut=6.0, pause=8.0, deaf=60.0, server_slow=12.0),
        "ttls": (30.0, 45.0),
        "tasks_per_hour": 200.0,
        "longest_handler": 400.0,
    },
    # A failed beat is retried after `retry_wait`, so a hundred strikes take longer than a lease lasts. Strikes may end
    # leases at any time: only their number counts.
    "strikes": {
        "hours": 2.0,
        "rates": only(cut=8.0, one_way=6.0, refuse=4.0, deaf=30.0),
        "heartbeats": Heartbeats(strike_after=0.0, max_failures=100),
    },
    # Clocks that drift far more than promised; the margin absorbs that. The ttls are long: clocks differ by a part of
    # the ttl, and a mutant shows if that is more than the time between two effects.
    "drift": {
        "hours": 2.0,
        "rates": only(cut=10.0, one_way=6.0, gil=8.0, deaf=70.0),
        "drift": 0.02,
        "ttls": (290.0, 300.0),
        "effect_every": 5.0,
        "tasks_per_hour": 150.0,
    },
    # Clocks that drift as much as promised, and no margin: only the drift in the formula for trust is left.
    "exact": {
        "hours": 0.75,
        "rates": only(cut=20.0, deaf=100.0),
        "heartbeats": Heartbeats(margin=0.0),
        "effect_every": 0.1,
        "longest_handler": 900.0,
        "period": 0.5,
        "workers": 12,  # some are idle, and claim a task as soon as its lease has ended
        "slots": 1,
        "tasks_per_hour": 60.0,
    },
    # Leases of one process that end at different times while its keeper gets no turn.
    "uneven": {
        "hours": 1.0,
        "rates": only(gil=20.0, stall=25.0, crawl=10.0, deaf=80.0),
        "ttls": (60.0, 90.0),
        "tasks_per_hour": 300.0,
        "longest_handler": 300.0,
    },
    # Heartbeats fail, then the process is stopped or its keeper gets no turn: only the timer is left.
    "unrenewed": {
        "hours": 1.5,
        "rates": only(cut=20.0, one_way=8.0, gil=30.0, pause=20.0, deaf=90.0),
        "ttls": (60.0, 90.0),
        "tasks_per_hour": 200.0,
        "longest_handler": 400.0,
    },
    # Answers to claims are lost, in outages too short to lose anything else.
    "leaks": {"hours": 1.5, "rates": only(drop_reply=10.0, reset=10.0), "poll": 5.0},
    "unequal": {"hours": 1.5, "rates": only(server_kill=12.0, unheard_beat=8.0, kill=4.0), "ttls": (60.0, 300.0)},
    # Leases expire, their beats are delivered again and late, and the server restarts right after one was answered
    # *gone*: before the consumer or a claim has seen the row.
    "revivals": {
        "hours": 2.0,
        "rates": only(kill=30.0, duplicate=90.0, kill_after_commit=60.0),
        "ttls": (30.0, 45.0),
        "period": 120.0,
        "workers": 3,
        "slots": 2,
    },
    # The wall clock only goes back: nothing but the store's own clock knows what is due.
    "set_back": {"hours": 1.5, "rates": only(wall_back=20.0)},
    # Three servers over one database whose clock is set ahead, while holders are cut off.
    "shared": {
        "hours": 0.4,
        "rates": only(wall_forward=24.0, node_stall=60.0, node_kill=30.0, kill=10.0, cut=10.0, one_way=6.0, deaf=50.0),
        "nodes": 3,
        "ttls": (60.0, 90.0),
        "longest_handler": 300.0,
        "tasks_per_hour": 200.0,
    },
    # Backlogs of few keys, which are at their limits, and claims of several tasks.
    "busy_keys": {
        "hours": 1.5,
        "rates": only(key_limit=60.0, kill=4.0),
        "tasks_per_hour": 400.0,
        "longest_handler": 400.0,
        "workers": 2,
    },
    "stops": {"hours": 0.25, "rates": only(stop=20.0)},
    "cancels": {"hours": 1.5, "rates": only(cancel=40.0, deaf=60.0)},
    "endless": {"hours": 1.5, "rates": only(hang=20.0), "longest_handler": 2500.0},
    "limits": {"hours": 1.5, "rates": only(kill=12.0, poison=40.0, hang=10.0), "tasks_per_hour": 120.0},
}
