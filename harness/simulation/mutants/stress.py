"""The stresses under which mutants are looked for: presets of the simulation, and some that are sharper."""

from collections.abc import Mapping
from typing import Any

from harness.simulation.scenario import FAULTS, PRESETS
from leasekit.config import Heartbeats

__all__ = ["STRESSES"]


def _only(**rates: float) -> dict[str, float]:
    return dict.fromkeys(FAULTS, 0.0) | rates


# A margin below what one call may take: then nothing but the moment from which trust counts keeps a lease exclusive.
_TIGHT = Heartbeats(margin=1.0, call_timeout=60.0)

STRESSES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"hours": 1.5, **preset} for name, preset in PRESETS.items()},
    # Answers that come late, to holders who then hear nothing more, and whose bodies do not look.
    "tight": {
        "hours": 2.0,
        "rates": _only(crawl=16.0, one_way=10.0, cut=8.0, deaf=100.0),
        "heartbeats": _TIGHT,
        "tasks_per_hour": 200.0,
    },
    # A claim may take longer than the lease lasts that it gets. No claim is granted in the instant in which it comes:
    # what is reckoned from how long it had waited would go unseen.
    "short": {
        "hours": 1.5,
        "rates": _only(crawl=12.0, drop_reply=8.0, one_way=8.0, cut=6.0, pause=8.0, deaf=60.0, server_slow=12.0),
        "ttls": (30.0,),
        "tasks_per_hour": 200.0,
        "longest_body": 400.0,
    },
    # What was failed is tried again in the next cycle, and so many strikes take longer than a lease lasts: the first
    # may come soon after the last renewal, with an early beat.
    "strikes": {
        "hours": 2.0,
        "rates": _only(cut=8.0, one_way=6.0, refuse=4.0, deaf=30.0),
        "heartbeats": Heartbeats(strike_after=0.0, retries_per_cycle=0, max_failures=5),
    },
    # Clocks that are far worse than promised: what the margin absorbs.
    "drift": {
        "hours": 2.0,
        "rates": _only(cut=10.0, one_way=6.0, gil=8.0, deaf=70.0),
        "drift": 0.02,
        "effect_every": 5.0,
        "tasks_per_hour": 150.0,
    },
    # As good as promised, and no margin: what the drift is reckoned with for.
    "exact": {
        "hours": 0.75,
        "rates": _only(cut=20.0, deaf=100.0),
        "heartbeats": Heartbeats(margin=0.0),
        "effect_every": 0.1,
        "longest_body": 900.0,
        "period": 0.5,
        "workers": 4,
        "slots": 1,
        "tasks_per_hour": 60.0,
    },
    # Bodies of one process whose leases end far from one another, while its keeper gets no turn.
    "uneven": {
        "hours": 1.0,
        "rates": _only(gil=20.0, stall=25.0, crawl=10.0, deaf=80.0),
        "ttls": (60.0,),
        "tasks_per_hour": 300.0,
        "longest_body": 300.0,
    },
    # Heartbeats fail, then the process is stopped or its keeper gets no turn: nothing but the timer is left.
    "unrenewed": {
        "hours": 1.5,
        "rates": _only(cut=20.0, one_way=8.0, gil=30.0, pause=20.0, deaf=90.0),
        "ttls": (60.0,),
        "tasks_per_hour": 200.0,
        "longest_body": 400.0,
    },
    # Answers to claims are lost, for too short a time to lose anything else.
    "leaks": {"hours": 1.5, "rates": _only(drop_reply=10.0, reset=10.0), "poll": 5.0},
    "unequal": {"hours": 1.5, "rates": _only(server_kill=12.0, unheard_beat=8.0, kill=4.0), "ttls": (60.0, 300.0)},
    # Leases that run out, beats of them that come once more and late, and a restart right after one was told so: before
    # the consumer, or a claim, has come by.
    "revivals": {
        "hours": 2.0,
        "rates": _only(kill=30.0, duplicate=30.0, kill_after_commit=60.0),
        "ttls": (30.0,),
        "period": 120.0,
        "workers": 3,
        "slots": 2,
    },
    "stops": {"hours": 0.25, "rates": _only(stop=20.0)},
    "cancels": {"hours": 1.5, "rates": _only(cancel=40.0, deaf=60.0)},
    "endless": {"hours": 1.5, "rates": _only(hang=20.0), "longest_body": 2500.0},
    "limits": {"hours": 1.5, "rates": _only(kill=12.0, poison=40.0, hang=10.0), "tasks_per_hour": 120.0},
}
