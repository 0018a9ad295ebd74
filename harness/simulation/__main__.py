"""`python -m harness.simulation`: run one history by its seed, or as many as there is time for."""

import argparse
import os
import secrets
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from harness.history import encode
from harness.simulation import campaign
from harness.simulation.run import Outcome, simulate
from harness.simulation.scenario import CHANGES, FAULTS, PRESETS, Scenario, swarm
from harness.simulation.shrink import shrink

_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this history, and show its violations")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="stress one thing, instead of a swarm of faults")
    parser.add_argument("--hours", type=float, help="the length of the history of --seed, without its drain")
    parser.add_argument("--store", choices=("memory", "sql"), default="memory")
    parser.add_argument("--trace", type=Path, help="with --seed: write the events to this file, one a line")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a smaller history that fails too")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="without --seed: run histories for so long (default: 10)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    parser.add_argument("--sql-hours", type=float, default=20.0, help="simulated hours over a database (default: 20)")
    options = parser.parse_args()
    return _many(options) if options.seed is None else _one(options)


def _one(options: argparse.Namespace) -> int:
    preset = PRESETS.get(options.preset or "")
    scenario = swarm(options.seed) if preset is None else Scenario(seed=options.seed, **preset)  # type: ignore[arg-type]
    scenario = replace(scenario, store=options.store, hours=options.hours or scenario.hours)
    outcome = simulate(scenario)
    print(
        f"seed {scenario.seed}: {outcome.hours:.1f} h in {outcome.seconds:.1f} s of CPU, {outcome.faults} faults, "
        f"{len(outcome.events)} events, digest {outcome.digest[:16]}"
    )
    print(_counted(outcome.fired))
    _trace(outcome, options.trace)
    _show(outcome)
    if outcome.violations and not options.no_shrink:
        print("\nshrinking …")
        smallest = shrink(outcome, say=lambda line: print(f"  {line}", flush=True))
        rates = {name: rate for name, rate in smallest.scenario.rates.items() if rate}
        print(f"\nstill fails: {smallest.scenario.hours:g} h, {rates}, skip={sorted(smallest.scenario.skip)}")
        _trace(smallest, options.trace)
        _show(smallest)
    return bool(outcome.violations)


def _show(outcome: Outcome) -> None:
    for violation in outcome.violations[:_SHOWN]:
        print(violation)
    if len(outcome.violations) > _SHOWN:
        print(f"… and {len(outcome.violations) - _SHOWN} more")


def _trace(outcome: Outcome, path: Path | None) -> None:
    if path is not None:
        path.write_bytes(b"".join(encode(event) + b"\n" for event in outcome.events))


def _many(options: argparse.Namespace) -> int:
    first = secrets.randbelow(10**9) if options.first is None else options.first
    print(f"from seed {first}, {options.minutes:g} minutes, {options.processes} processes", flush=True)
    total = campaign.Campaign()
    for outcome in campaign.run(
        total, first=first, minutes=options.minutes, processes=options.processes, sql_hours=options.sql_hours
    ):
        if outcome.violations:
            again = f"python -m harness.simulation --seed {outcome.scenario.seed}"
            if outcome.scenario.store == "sql":
                again += f" --store sql --hours {outcome.scenario.hours:g}"
            print("\n".join([f"FAILED: {again}", *map(str, outcome.violations[:_SHOWN])]), flush=True)
    print(
        f"{total.hours:,.0f} simulated hours ({total.sql_hours:.0f} over a database) in {total.histories} histories, "
        f"{total.faults:,} faults planned; {total.hours / max(1e-9, total.seconds):.1f} hours a second, "
        f"{total.hours / max(1e-9, total.cpu_seconds):.1f} for each of a core; {len(total.failed)} histories failed"
    )
    print(_counted(total.fired))
    if total.silent:
        print(f"FAILED: these faults never fired: {', '.join(total.silent)}")
    return bool(total.failed or total.silent)


def _counted(fired: Counter[str]) -> str:
    return "fired: " + ", ".join(f"{name} {fired[name]:,}" for name in (*FAULTS, *CHANGES))


if __name__ == "__main__":
    sys.exit(main())
