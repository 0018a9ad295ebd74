"""A few of the histories that `make simulate` runs by the thousand."""

import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from harness.checker import Violation
from harness.simulation.run import Outcome, simulate
from harness.simulation.scenario import FAULTS, NODE_FAULTS, PRESETS, Scenario, swarm
from harness.simulation.shrink import shrink
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._lifecycle.states import LEASED
from leasekit._lifecycle.transitions import grant
from leasekit.server.roles import claims, consumer, hsc
from leasekit.server.store import Trigger
from tests.sampling import in_soak, slow_after

ROOT = Path(__file__).parents[2]


def preset(name: str, *, hours: float = 1.0, seed: int = 1, **others: Any) -> Scenario:
    return Scenario(seed=seed, hours=hours, **{**PRESETS[name], **others})


# Sample: a quarter of an hour of each stress; half an hour of two swarms of faults, and of one that is new in each run.
HOURS_OF_STRESS = in_soak(4.0, by_default=0.25)
HOURS = in_soak(4.0, by_default=0.5)


def shown(violations: Sequence[Violation]) -> str:
    return "\n".join(map(str, violations[:5]))


@pytest.mark.soak
@pytest.mark.parametrize("name", slow_after(6, sorted(PRESETS.keys() - {"nodes"})))
def test_all_promises_are_kept_under_this_stress(name: str) -> None:
    outcome = simulate(preset(name, hours=HOURS_OF_STRESS))
    assert not outcome.violations, shown(outcome.violations)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", in_soak(range(1, 41), by_default=[4, 20]))
def test_all_promises_are_kept_in_a_swarm_of_faults(seed: int) -> None:
    outcome = simulate(swarm(seed, hours=HOURS))
    assert not outcome.violations, shown(outcome.violations)


@pytest.mark.slow
def test_all_promises_are_kept_in_a_history_that_nobody_has_seen_before() -> None:
    seed = secrets.randbelow(10**9)
    outcome = simulate(swarm(seed, hours=HOURS))
    assert not outcome.violations, (
        f"python -m harness.simulation --seed {seed} --hours {HOURS}\n{shown(outcome.violations)}"
    )


@pytest.mark.slow
def test_all_promises_are_kept_over_a_database() -> None:
    outcome = simulate(replace(swarm(3, hours=0.5), store="sql"))
    assert not outcome.violations, shown(outcome.violations)


@pytest.mark.slow
@pytest.mark.soak
def test_all_promises_are_kept_by_servers_over_one_database() -> None:
    # Sample: a tenth of an hour, with the faults of one.
    hours = in_soak(1.0, by_default=0.1)
    rates = {name: rate / hours for name, rate in PRESETS["nodes"]["rates"].items()}  # type: ignore[attr-defined]
    outcome = simulate(preset("nodes", hours=hours, rates=rates, ttls=(60.0,), longest_handler=200.0))
    assert not outcome.violations, shown(outcome.violations)
    assert [name for name in NODE_FAULTS if not outcome.fired[name]] == []


@pytest.mark.slow
def test_every_kind_of_fault_fires() -> None:
    assert len(FAULTS) >= 30
    names = ("deaf", "poison", "hang", "again", "cancel", "same_key", "redrive", "hand_back", "gil")
    of_tasks = dict.fromkeys(names, 25.0)
    fired: Counter[str] = Counter()
    rates = {**dict.fromkeys(FAULTS, 3.0), **of_tasks}
    # Where all faults are frequent, the answer to a result is seldom lost alone.
    for scenario in (*(Scenario(seed=seed, hours=3.0, rates=rates) for seed in (1, 2)), preset("unheard")):
        outcome = simulate(scenario)
        assert not outcome.violations, shown(outcome.violations)
        fired += outcome.fired
    assert [name for name in FAULTS if not fired[name]] == []


@pytest.mark.slow
def test_one_seed_is_one_history() -> None:
    first, second, other = (simulate(swarm(seed, hours=0.5)) for seed in (7, 7, 8))
    assert first.digest == second.digest
    assert first.digest != other.digest


@pytest.mark.slow
def test_a_history_does_not_depend_on_the_order_of_sets() -> None:
    lines = [_run_with_hashes(seed) for seed in (1, 2)]
    assert "digest" in lines[0]
    assert lines[0].split("digest")[1] == lines[1].split("digest")[1]


def _run_with_hashes(hashes: int) -> str:
    command = [sys.executable, "-m", "harness.simulation", "--seed", "4", "--hours", "0.5", "--no-shrink"]
    environment = {**os.environ, "PYTHONHASHSEED": str(hashes)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout.splitlines()[0]


def _with_the_same_fence(row: Trigger, worker: str, token: str, *, now: float, at: float) -> Trigger:
    return changed(grant(row, worker, token, now=now, at=at), fence=max(1, row.fence))


# It can fail --------------------------------------------------------------------------------------------------------


def broken(outcome: Outcome) -> set[str]:
    return {violation.rule for violation in outcome.violations}


def is_found(rule: str, name: str) -> bool:
    """Whether one of a few histories under this stress breaks this rule."""
    return any(rule in broken(simulate(preset(name, hours=1.5, seed=seed))) for seed in range(1, 9))


@pytest.mark.slow
def test_it_finds_a_heartbeat_that_any_token_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_held(row: Trigger, token: str, now: float) -> bool:
        return row.status in LEASED and row.next_trigger_at is not None and row.next_trigger_at > now

    monkeypatch.setattr(hsc, "is_held", is_held)
    assert is_found("S3", "fencing")


@pytest.mark.slow
def test_it_finds_a_fence_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "grant", _with_the_same_fence)
    assert is_found("S1", "deaths")


@pytest.mark.slow
def test_it_finds_a_process_that_nobody_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "_update_timer", lambda self: None)
    assert is_found("S2", "guard")


@pytest.mark.slow
def test_a_history_that_fails_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "restart_leases", lambda turn, shift: None)
    outcomes = (simulate(preset("restarts", hours=2.0, seed=seed)) for seed in range(1, 9))
    outcome = next(outcome for outcome in outcomes if outcome.violations)
    smallest = shrink(outcome, tries=8)
    assert broken(smallest) & broken(outcome)
    assert size(smallest) < size(outcome)


def size(outcome: Outcome) -> tuple[int, float]:
    """Kinds of faults, and hours."""
    return sum(rate > 0 for rate in outcome.scenario.rates.values()), outcome.scenario.hours
