"""The stresses under which mutants are looked for: presets of the simulation, and some that are sharper."""

from collections.abc import Mapping
from typing import Any

from leasekit.config import Beats
from simulation.scenario import FAULTS, PRESETS

__all__ = ["STRESSES"]


def _only(**rates: float) -> dict[str, float]:
    return dict.fromkeys(FAULTS, 0.0) | rates


# A margin below what one call may take: then nothing but the moment from which trust counts keeps a lease exclusive.
_TIGHT = Beats(margin=3.0, call_timeout=45.0)

STRESSES: Mapping[str, Mapping[str, Any]] = {
    "leaks": {"hours": 1.5, "rates": _only(drop_reply=10.0, reset=10.0), "poll": 5.0},
    **{name: {"hours": 1.5, **preset} for name, preset in PRESETS.items()},
    # Answers that come late, to holders who then hear nothing more, and whose bodies do not look.
    "tight": {
        "hours": 2.0,
        "rates": _only(crawl=12.0, one_way=8.0, cut=8.0, drop_reply=6.0, deaf=60.0),
        "beats": _TIGHT,
        "tasks_per_hour": 200.0,
    },
    # A claim may take longer than the lease lasts that it gets.
    "short": {
        "hours": 1.5,
        "rates": _only(crawl=12.0, drop_reply=8.0, one_way=8.0, cut=6.0, pause=8.0, deaf=60.0),
        "ttl": 60.0,
        "tasks_per_hour": 200.0,
        "longest_body": 400.0,
    },
    "strikes": {
        "hours": 2.0,
        "rates": _only(cut=8.0, one_way=6.0, refuse=4.0, deaf=30.0),
        "beats": Beats(strike_after=0.0),
    },
    # Clocks that are far worse than promised: what the margin absorbs.
    "drift": {
        "hours": 2.0,
        "rates": _only(cut=10.0, one_way=6.0, gil=8.0, deaf=70.0),
        "drift": 0.02,
        "effect_every": 5.0,
        "tasks_per_hour": 150.0,
    },
    "exact": {
        "hours": 1.0,
        "rates": _only(cut=16.0, one_way=10.0, deaf=100.0),
        "beats": Beats(margin=0.0),
        "effect_every": 0.1,
        "period": 0.2,
        "workers": 2,
        "slots": 2,
    },
    "endless": {"hours": 1.5, "rates": _only(hang=20.0), "longest_body": 2500.0},
    "limits": {"hours": 1.5, "rates": _only(kill=12.0, poison=40.0, hang=10.0), "tasks_per_hour": 120.0},
}
