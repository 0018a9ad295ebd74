"""A command's help is enough to use it, and quick."""

import os
import subprocess
import sys

import pytest

from leasekit.cli import LAST_WORDS
from leasekit.cli.app import COMMANDS, load
from tests.cli.conftest import Run

ASKS_A_SERVICE = [
    "schedule",
    "status",
    "tasks",
    "tree",
    "cancel",
    "reschedule",
    "pause",
    "drop",
    "open",
    "gates",
    "workers",
    "kinds",
    "periodic",
    "flow",
    "nodes",
    "stats",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_mentions_each_option_and_an_example(run: Run, name: str) -> None:
    shown = run(name, "--help")
    assert shown.exit_code == 0
    options = [option for parameter in load(name).params for option in parameter.opts if option.startswith("-")]
    assert [option for option in options if option not in shown.stdout] == []
    assert f"  leasekit {name}" in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_of_a_command_is_explained(name: str) -> None:
    assert [parameter.name for parameter in load(name).params if not parameter.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_own_help(name: str) -> None:
    assert load(name).help.partition("\n")[0] == COMMANDS[name]


@pytest.mark.parametrize("name", ["dead", "purge"])
def test_an_option_of_one_value_that_is_given_twice_is_refused(run: Run, name: str) -> None:
    done = run(name, "--status", "dead", "-s", "fatal_failure")
    assert (done.exit_code, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    assert "'--status' / '-s'" in said
    assert "it takes one value, and is given twice" in said


def test_flags_and_options_of_several_values_may_be_repeated(run: Run) -> None:
    assert run("stats", "--json", "--json", "--header", "A: 1", "--header", "B: 2", "--help").exit_code == 0


@pytest.mark.parametrize("name", ASKS_A_SERVICE)
def test_a_command_that_asks_a_service_names_option_variable_and_default(run: Run, name: str) -> None:
    shown = " ".join(run(name, "--help").stdout.split())
    assert "-b, --backend" in shown
    assert "LEASEKIT_URL" in shown
    assert "http://127.0.0.1:8077" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_of_help_is_longer_than_a_terminal_is_wide(run: Run, name: str) -> None:
    # Lines that wrap by themselves are as wide as the window; those of examples do not wrap.
    assert [line for line in (load(name).epilog or "").splitlines() if len(line) > 78] == []


def test_the_help_of_a_worker_says_how_long_exit_handlers_have(run: Run) -> None:
    assert f"exit handlers (atexit) have {LAST_WORDS:g} s" in " ".join(run("work", "--help").stdout.split())


def test_the_root_lists_all_commands_and_the_exit_codes(run: Run) -> None:
    shown = run("--help").stdout
    assert all(f"  {name} " in shown and summary in shown for name, summary in COMMANDS.items())
    assert "Exit codes: 0 done; 1 refused" in shown


def test_a_wrong_command_is_wrong_usage_and_the_right_one_is_suggested(run: Run) -> None:
    done = run("shedule")
    assert done.exit_code == 2
    assert "'schedule'" in done.stderr


def test_the_help_loads_nothing_that_only_a_command_needs() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "leasekit", "--help"], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "leasekit.cli.app" in loaded
    heavy = {"rich", "httpx", "leasekit.server", "starlette", "sqlalchemy", "uvicorn", "pydantic"}
    commands = {f"leasekit.cli.{name}" for name in COMMANDS}
    assert loaded & (heavy | commands) == set()


def complete(words: str) -> list[str]:
    """What the shell offers for the last word."""
    ended = subprocess.run(
        [sys.executable, "-m", "leasekit"],
        env=os.environ
        | {"_LEASEKIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.stdout.split()


def test_the_shell_completes_commands_options_and_statuses() -> None:
    assert complete("leasekit sta") == ["status", "stats"]
    assert "--follow" in complete("leasekit tasks --f")
    assert complete("leasekit tasks --status f") == ["fatal_failure", "failed"]


def test_the_script_for_completion_is_shown() -> None:
    # Under a shell, which is how it finds out for which one.
    ended = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m leasekit --show-completion; exit $?"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "_LEASEKIT_COMPLETE=complete_bash" in ended.stdout


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.startswith("leasekit ")
