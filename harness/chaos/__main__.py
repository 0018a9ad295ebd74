"""`python -m harness.chaos`: run all rows and the big run, or the scenarios that the options name."""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from harness.chaos.scenarios import SCENARIOS, Report, Scenario, run

for _path in sorted(Path(__file__).parent.glob("rows_*.py")):  # these imports fill the table of scenarios
    import_module(f"harness.chaos.{_path.stem}")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = [scenario for scenario in SCENARIOS if _is_asked_for(scenario, options)]
    if options.list:
        for scenario in chosen:
            print(f"{scenario.row or 'big':>4}  {scenario.name:<28} {scenario.what}")
        return 0
    began_at, failed = time.monotonic(), 0
    for report in _reports(chosen, jobs=options.jobs, keep=options.keep):
        failed += bool(report.problems)
        _show(report)
    print(f"{len(chosen)} scenarios, {failed} failed, {time.monotonic() - began_at:.0f} s")
    return 1 if failed or not chosen else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.chaos", description="Inject faults into real processes, and check their history."
    )
    parser.add_argument("--list", action="store_true", help="show the scenarios")
    parser.add_argument("--row", type=int, action="append", default=[], help="a row of the fault matrix")
    parser.add_argument("--name", action="append", default=[], help="a scenario by its name")
    parser.add_argument("--all", action="store_true", help="all rows, without the big run and those that take minutes")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of passed scenarios, too")
    return parser


def _is_asked_for(scenario: Scenario, options: argparse.Namespace) -> bool:
    if options.row or options.name:
        return scenario.row in options.row or scenario.name in options.name
    return not options.all or not (scenario.row == 0 or scenario.long)


def _reports(chosen: list[Scenario], *, jobs: int, keep: bool) -> Iterator[Report]:
    beside = [scenario for scenario in chosen if not scenario.alone]
    with ThreadPoolExecutor(jobs) as threads, ThreadPoolExecutor(len(chosen) or 1) as idle:
        runs = [(idle if scenario.long else threads).submit(run, scenario, keep=keep) for scenario in beside]
        for done in as_completed(runs):
            yield done.result()
    for scenario in chosen:
        if scenario.alone:
            yield run(scenario, keep=keep)


def _show(report: Report) -> None:
    print(report.line, flush=True)
    for figure in report.figures:
        print("     ", figure, flush=True)
    for problem in report.problems[:20]:
        print("     ", problem.replace("\n", "\n      "), flush=True)
    if report.home:
        print("      kept:", report.home, flush=True)


if __name__ == "__main__":
    sys.exit(main())
