"""The check of clients: good ones pass it in every scenario, and a client that breaks a rule is found."""

import asyncio
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leasekit.cli.app import app
from leasekit.server.conformance.record import Record
from leasekit.server.conformance.rules import RULES
from leasekit.server.conformance.runner import check
from leasekit.server.conformance.scenarios import SCENARIOS, Scenario

EXAMPLES = Path(__file__).parents[3] / "examples"
NODE = shutil.which("node")  # 20.3 or newer
PLAIN = (EXAMPLES / "15_any_language.py").read_text(encoding="utf-8")
OWN = """
import os, time, urllib.request
import leasekit

worker = leasekit.Worker(os.environ["LEASEKIT_URL"], concurrency=4)

@worker.handler("conformance")
def run(payload: dict, held: leasekit.Lease) -> object:
    end = time.monotonic() + payload["seconds"]
    while True:
        urllib.request.urlopen(f"{payload['sign']}?attempt={held.task.attempt}").close()
        held.check()
        if time.monotonic() >= end:
            break
        time.sleep(0.1)
    if payload["outcome"] == "fatal":
        raise leasekit.Fatal("as the payload says")
    return payload["result"]

worker.run()
"""
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name != "plain" else []) for name in BY_NAME]


def broken_rules(folder: Path, program: str, scenario: Scenario) -> dict[str, str]:
    path = folder / "client.py"
    path.write_text(program, encoding="utf-8")
    findings = asyncio.run(check(scenario, [sys.executable, str(path)]))
    return {finding.rule: finding.found for finding in findings}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("program", [OWN, PLAIN], ids=["leasekit", "plain"])
def test_a_good_client_breaks_no_rule(program: str, name: str, tmp_path: Path) -> None:
    assert broken_rules(tmp_path, program, BY_NAME[name]) == {}


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_good_client_in_another_language_breaks_no_rule(name: str) -> None:
    assert asyncio.run(check(BY_NAME[name], [str(NODE), str(EXAMPLES / "15_any_language.mjs")])) == []


KNOWN = """        answer = json.load(response)
        if "a_new_field" in answer:
            raise ValueError("a field that is not known")
        return answer"""
_BELIEVES = ("return self.lost.is_set() or time.monotonic() >= self.trusted_until", "return self.lost.is_set()")
MUTANTS = {
    "a new id for a repeated claim": (
        "lost-answers",
        "a_lost_claim_is_repeated_or_ended",
        [
            (
                "except (OSError, ValueError):\n            time.sleep(0.2)",
                'except (OSError, ValueError):\n            body["claim_id"] += "x"',
            )
        ],
    ),
    "one id for all claims": (
        "plain",
        "a_claim_id_names_one_claim",
        [('"claim_id": uuid.uuid4().hex', '"claim_id": WORKER')],
    ),
    "a run that never looks at the clock": ("outage", "no_run_outlives_its_lease", [_BELIEVES]),
    "an answer to another request is believed": (
        "stale-answers",
        "no_run_outlives_its_lease",
        [('if response.headers.get("leasekit-request", name) != name:', "if False:")],
    ),
    "the verdict gone is not heard": ("gone", "no_run_goes_on_after_gone", [('== "gone":', '== "never":')]),
    "heartbeats come too late": (
        "long",
        "heartbeats_come_in_time",
        [
            _BELIEVES,
            ('while not self.lost.wait(self.task["ttl"] / 4):', 'while not self.lost.wait(self.task["ttl"] * 2):'),
        ],
    ),
    "a result is sent once": (
        "lost-requests",
        "results_are_repeated_unchanged",
        [("        time.sleep(max(0, min(pause, until - time.monotonic())))", "        return {}")],
    ),
    "a result changes when it is repeated": (
        "lost-answers",
        "results_are_repeated_unchanged",
        [("            pass\n", '            body["results"][0]["result"] = "another"\n')],
    ),
    "a proxy's 404 is taken for a refusal": (
        "proxy",
        "results_are_repeated_unchanged",
        [("if error.code == 422 and b'\"urn:leasekit:problem:refused\"' in answer:", "if error.code == 404:")],
    ),
    "Retry-After is ignored": (
        "busy",
        "retry_after_is_obeyed",
        [('pause = max(pause, float(error.headers.get("retry-after") or 0))', "pass")],
    ),
    "one request header for all requests": (
        "plain",
        "request_headers_are_new",
        [("name = uuid.uuid4().hex", 'name = "x"')],
    ),
    "a token of its own": (
        "plain",
        "tokens_are_those_of_claims",
        [('"token": self.task["token"], **said', '"token": "mine", **said')],
    ),
    "an unknown outcome": ("plain", "requests_fit_the_schema", [("**said}", '**said, "outcome": "done"}')]),
    "heartbeats that do not fit, where some are answered by others": (
        "stale-answers",
        "requests_fit_the_schema",
        [('beat = {"id": self.task["id"], "token"', 'beat = {"task": self.task["id"], "token"')],
    ),
    "results that do not fit, where some are lost": (
        "lost-requests",
        "requests_fit_the_schema",
        [('item = {"id": self.task["id"], "token"', 'item = {"task": self.task["id"], "token"')],
    ),
    "claims by another method": (
        "plain",
        "requests_fit_the_schema",
        [("json.dumps(body).encode(), headers)", "None, headers)")],
    ),
    "a refused request is repeated": (
        "plain",
        "a_refused_request_is_not_repeated",
        [("**said}", '**said, "outcome": "done"}'), ("raise Refused(answer.decode()) from None", "pass")],
    ),
    "a cancel is not heard": ("cancel", "tasks_end_as_they_should", [('verdict.get("cancel_requested")', "False")]),
    "unknown fields are refused": (
        "unknown-fields",
        "tasks_end_as_they_should",
        [
            (
                "        answer: Json = json.load(response)\n        return answer",
                KNOWN,
            )
        ],
    ),
    "SIGTERM ends it at once": (
        "stop",
        "tasks_end_as_they_should",
        [("    raise KeyboardInterrupt", "    os._exit(0)")],
    ),
    "SIGTERM is ignored": (
        "plain",
        "the_program_ends_when_it_is_told_to",
        [("    raise KeyboardInterrupt", "    return")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_client_that_breaks_a_rule_is_found(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, rule, changes = MUTANTS[mutant]
    program = PLAIN
    for old, new in changes:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    monkeypatch.setattr("leasekit.server.conformance.runner.STOP_TIMEOUT", 10.0)
    assert rule in broken_rules(tmp_path, program, shortened(BY_NAME[name]))


def shortened(scenario: Scenario) -> Scenario:
    """Return the scenario with less patience: a broken client may never end its tasks."""
    return replace(scenario, within=20.0)


def test_each_rule_has_a_client_that_breaks_it() -> None:
    assert {rule.__name__ for rule in RULES} <= {rule for _, rule, _ in MUTANTS.values()}


def test_an_empty_record_breaks_no_rule() -> None:
    assert [list(rule(Record())) for rule in RULES] == [[] for _ in RULES]


def test_a_program_that_ends_by_itself_is_found(tmp_path: Path) -> None:
    assert (
        "exit code 3"
        in broken_rules(tmp_path, "raise SystemExit(3)", BY_NAME["plain"])["the_program_ends_when_it_is_told_to"]
    )


def test_the_command_lists_its_scenarios_and_refuses_others() -> None:
    listed = CliRunner().invoke(app, ["conformance", "--list"])
    assert [line.partition("\t")[0] for line in listed.stdout.splitlines()] == list(BY_NAME)
    wrong = CliRunner().invoke(app, ["conformance", "--scenario", "storm", "--", "true"])
    assert (wrong.exit_code, "'storm' is not one of plain" in wrong.stderr) == (2, True)
    assert CliRunner().invoke(app, ["conformance"]).exit_code == 2


def test_the_command_says_which_rule_is_broken() -> None:
    done = CliRunner().invoke(app, ["conformance", "--scenario", "plain", "--", sys.executable, "-c", "pass"])
    assert done.exit_code == 1
    assert "BROKEN  plain" in done.stdout
    assert "ended with exit code 0 before it was told to" in done.stdout


def test_a_program_that_cannot_be_started_is_told() -> None:
    done = CliRunner().invoke(app, ["conformance", "--scenario", "plain", "--", "/no/such/program"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "cannot start '/no/such/program'" in done.stderr
