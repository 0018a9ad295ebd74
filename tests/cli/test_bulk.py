"""`leasekit cancel` and `reschedule` with filters: a dry run, and the act with its token."""

import json

import pytest

from leasekit.client import Client
from tests.cli.conftest import Run


def test_what_a_dry_run_has_counted_is_cancelled(run: Run, client: Client) -> None:
    client.schedule("k", id="a")
    tried = run("cancel", "--kind", "k", "--dry-run")
    count, (_, token) = [line.split("\t") for line in tried.stdout.splitlines()]
    assert (tried.exit_code, count) == (0, ["k", "new", "1"])
    client.schedule("k", id="b")
    assert run("cancel", "--kind", "k", "--token", token).stdout == "k\tnew\t1\n"
    assert client.stats().kinds == {"k": {"cancelled": 1, "new": 1}}


def test_what_a_dry_run_has_counted_is_rescheduled(run: Run, client: Client) -> None:
    client.schedule("k", id="a", delay=600)
    wanted = ("reschedule", "--kind", "k", "--now", "--json")
    token = json.loads(run(*wanted, "--dry-run").stdout)["token"]
    assert json.loads(run(*wanted, "--token", token).stdout)["kinds"] == {"k": {"new": 1}}
    assert next(client.tasks("k")).id == "a"


@pytest.mark.parametrize("command", [("cancel",), ("reschedule", "--now")], ids=str)
def test_no_match_is_said_beside_the_token_and_the_act(run: Run, client: Client, command: tuple[str, ...]) -> None:
    client.schedule("k", tags=["other"])
    wanted, why = (*command, "--kind", "k", "--tag", "t"), "no task that can be changed matches (kind k, tags t)"
    tried = run(*wanted, "--dry-run")
    ((name, token),) = [line.split("\t") for line in tried.stdout.splitlines()]
    assert (tried.exit_code, name, tried.stderr) == (0, "token", f"leasekit {command[0]}: {why}\n")
    done = run(*wanted, "--token", token)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"leasekit {command[0]}: {why}\n")


@pytest.mark.parametrize("command", [("cancel",), ("reschedule", "--now")], ids=str)
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "name tasks, or select them by --kind"),
        (("a", "--kind", "k"), "name tasks, or select them by --kind"),
        (("--kind", "k"), "count the tasks first"),
        (("--kind", "k", "--dry-run", "--token", "t"), "count the tasks first"),
        (("a", "--dry-run"), "it goes with filters"),
    ],
    ids=str,
)
def test_wrong_usage_is_told(run: Run, command: tuple[str, ...], options: tuple[str, ...], why: str) -> None:
    done = run(*command, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.split())
