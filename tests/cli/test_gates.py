"""`leasekit pause`, `drop`, `open` and `gates`."""

import json

import pytest

from leasekit.client import Client
from tests.cli.conftest import Run


def test_a_kind_is_paused_listed_and_opened(run: Run, client: Client) -> None:
    client.schedule("report", id="a")
    done = run("pause", "report", "--for", "2h", "--reason", "the printer burns")
    assert done.stdout == ""
    assert done.stderr.startswith("leasekit pause: the kind 'report' is paused until 20")
    assert done.stderr.endswith(": the printer burns\n")
    assert run("pause", "--collection", "c", "--json").stdout.startswith('{"collection":"c","mode":"pause",')
    lines = [line.split("\t") for line in run("gates").stdout.splitlines()]
    assert [(line[0], line[1], line[2], line[6]) for line in lines] == [
        ("kind", "report", "pause", "the printer burns"),
        ("collection", "c", "pause", "-"),
    ]
    assert [json.loads(line)["mode"] for line in run("gates", "--json").stdout.splitlines()] == ["pause", "pause"]
    assert "the kind 'report' is paused until" in run("stats").stderr
    assert "the collection 'c' is paused" in run("status").stderr
    assert "it waits behind a gate: the kind 'report' is paused until" in run("status", "a").stderr
    for _ in range(2):
        assert run("open", "report").stderr == "leasekit open: the kind 'report' is open\n"
    run("open", "--collection", "c")
    assert client.gates() == []


def test_a_drop_counts_what_waits_and_needs_a_yes(run: Run, client: Client) -> None:
    client.schedule("report", collection="c")
    client.schedule("report", delay=60)
    counted = "leasekit drop: {}: --yes drops them when they are due\n"
    for arguments in (["report"], ["report", "--dry-run"]):
        assert run("drop", *arguments).stderr == counted.format("2 tasks of the kind 'report' wait")
    assert run("drop", "--collection", "c").stderr == counted.format("1 task of the collection 'c' waits")
    assert client.gates() == []
    assert run("drop", "report", "--yes").stderr == "leasekit drop: the kind 'report' is dropped\n"
    assert client.stats().kinds == {"report": {"cancelled": 1, "new": 1}}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["pause"], "name a kind, or a --collection"),
        (["open", "report", "--collection", "c"], "name a kind, or a --collection"),
        (["pause", "report", "--for", "1h", "--until", "2030-01-01T00:00:00Z"], "it contradicts --for"),
        (["drop", "report", "--yes", "--dry-run"], "it contradicts --yes"),
        (["pause", "report", "--until", "tomorrow"], "tomorrow"),
    ],
)
def test_wrong_usage_is_told(run: Run, arguments: list[str], why: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in done.stderr


def test_a_kind_of_names_is_refused(run: Run) -> None:
    done = run("pause", "named:x")
    assert done.exit_code == 1
    assert "stands for the lease of a name, which has no gate" in done.stderr
