"""`leasekit periodic`: periodic tasks from the shell."""

import json

import pytest

from leasekit.client import Client
from tests.cli.conftest import Run

NIGHTLY = ["--kind", "report", "--cron", "0 3 * * *"]


def test_a_periodic_task_is_set_listed_and_deleted(run: Run, client: Client) -> None:
    done = run(
        "periodic", "set", "nightly", *NIGHTLY, "--tz", "Europe/Berlin", "--payload", '{"pages": 3}', "--key", "a"
    )
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("leasekit periodic: 'nightly' fires next at 2")
    name, kind, rule, following, state = run("periodic").stdout.rstrip("\n").split("\t")
    assert (name, kind, rule, state) == ("nightly", "report", "0 3 * * * Europe/Berlin", "active")
    assert following.startswith("2")
    info = client.get_periodic("nightly")
    assert info is not None
    assert (info.task.payload, info.task.key) == ({"pages": 3}, "a")
    assert "there is no 'nightly' any more" in run("periodic", "delete", "nightly").stderr
    assert run("periodic").stdout == ""


def test_labels_of_its_workers_can_be_given(run: Run, client: Client) -> None:
    labels = ("--requires", "gpu=yes", "--requires", "zone=a", "--prefers", "warm=yes", "--prefer-for", "3")
    assert run("periodic", "set", "nightly", *NIGHTLY, *labels).exit_code == 0
    info = client.get_periodic("nightly")
    assert info is not None
    assert info.task.requires == {"gpu": "yes", "zone": "a"}
    assert (info.task.prefers, info.task.prefer_for) == ({"warm": "yes"}, 3.0)
    assert "'gpu' is not NAME=VALUE" in run("periodic", "set", "nightly", *NIGHTLY, "--requires", "gpu").stderr


def test_a_paused_one_fires_on_request_until_it_is_resumed(run: Run, client: Client) -> None:
    run("periodic", "set", "poll", "--kind", "poll", "--every", "5m", "--overlap", "queue", "--jitter", "10")
    assert run("periodic", "pause", "poll").stderr == "leasekit periodic: 'poll' is paused\n"
    task_id = run("periodic", "trigger", "poll").stdout.strip()
    assert client.get(task_id) is not None
    shown = run("periodic", "show", "poll")
    assert shown.stdout.split("\t")[1:3] == ["triggered", task_id]
    assert "fires next at" in run("periodic", "resume", "poll").stderr
    assert len(run("periodic", "show", "poll").stdout.splitlines()) == 6  # five that come, and the one that came


def test_json_has_all_about_it(run: Run) -> None:
    run("periodic", "set", "nightly", *NIGHTLY)
    listed = json.loads(run("periodic", "--json").stdout)
    shown = json.loads(run("periodic", "show", "nightly", "--json").stdout)
    assert (listed["task"]["cron"], shown["name"]) == ("0 3 * * *", "nightly")
    assert json.loads(run("periodic", "trigger", "nightly", "--json").stdout)["created"] is True


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fire", "x"], "'fire' is no action: use list, show, set"),
        (["show"], "write: leasekit periodic show NAME"),
        (["list", "x"], "write: leasekit periodic list"),
        (["pause", "x", "--kind", "k"], "it goes with set"),
        (["set", "x", "--cron", "0 3 * * *"], "name the kind of its tasks"),
        (["set", "x", "--kind", "k"], "give one of them"),
        (["set", "x", "--kind", "k", "--every", "1.5"], "--every must be whole seconds, got 1.5"),
        (["set", "x", "--kind", "k", "--every", "5m", "--tz", "UTC"], "`tz` is the time zone of a `cron`"),
        (["set", "x", "--kind", "k", "--every", "5m", "--payload", "{"], "the payload is not JSON"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], why: str) -> None:
    done = run("periodic", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr


def test_what_cannot_be_is_refused_in_a_sentence(run: Run) -> None:
    never = run("periodic", "set", "x", "--kind", "k", "--cron", "0 0 30 2 *")
    assert (never.exit_code, never.stdout) == (1, "")
    assert len(never.stderr.splitlines()) == 1
    assert "there is no periodic task 'x'" in run("periodic", "show", "x").stderr
    assert run("periodic", "pause", "x").exit_code == 1
