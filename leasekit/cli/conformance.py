"""`leasekit conformance`: check a client of the protocol that is written in another language."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.server.conformance.runner import Finding, check
from leasekit.server.conformance.scenarios import SCENARIOS, Scenario

EXAMPLES = """\b
The program is started anew for each scenario. It finds the server in
LEASEKIT_URL, runs tasks of the kind 'conformance', and ends at SIGTERM; what
its handler does is described in the documentation, under 'Other languages'.
Exit code 1 if a rule was broken.

\b
Examples:
  leasekit conformance -- node worker.js
  leasekit conformance --scenario outage --scenario gone -- ./worker
  leasekit conformance --list
"""

_NAMES = [scenario.name for scenario in SCENARIOS]

Command = Annotated[list[str] | None, typer.Argument(metavar="PROGRAM...", help="The program, after --.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        "-s",
        metavar="NAME",
        autocompletion=lambda: _NAMES,
        help="Only this scenario; may be given several times.",
    ),
]
List = Annotated[bool, typer.Option("--list", help="List the scenarios instead.")]


@spoken
def conformance(
    program: Command = None, *, scenario: Names = None, list_only: List = False, as_json: options.Json = False
) -> None:
    """Check a client of the protocol, in any language.

    Runs its program against a server that loses answers, refuses, cancels and falls silent, and says which rules of the
    protocol the client breaks.
    """
    chosen = _chosen(scenario or _NAMES)
    if list_only:
        for each in chosen:
            output.print_line([each.name, each.about])
        return
    if not program:
        raise typer.BadParameter("name the program that is to be checked, after --", param_hint="PROGRAM")
    broken = sum(_report(each, asyncio.run(check(each, program)), as_json=as_json) for each in chosen)
    if broken:
        typer.echo(f"leasekit conformance: {broken} of {len(chosen)} scenarios found a broken rule", err=True)
        raise typer.Exit(1)


def _chosen(names: Sequence[str]) -> list[Scenario]:
    if unknown := next((name for name in names if name not in _NAMES), None):
        raise typer.BadParameter(f"{unknown!r} is not one of {', '.join(_NAMES)}", param_hint="--scenario")
    return [scenario for scenario in SCENARIOS if scenario.name in names]


def _report(scenario: Scenario, findings: Sequence[Finding], *, as_json: bool) -> bool:
    """Print what a scenario has found; return whether it found anything."""
    if as_json:
        output.print_json({"scenario": scenario.name, "about": scenario.about, "findings": findings})
        return bool(findings)
    typer.echo(output.plain(f"{'BROKEN' if findings else 'ok    '}  {scenario.name}: {scenario.about}"))
    for finding in findings:
        typer.echo(output.plain(f"        {finding.found}"))
        typer.echo(output.plain(f"        rule: {finding.must}"))
    return bool(findings)
