"""`leasekit reschedule`: when waiting tasks are due, and how urgent they are."""

import json

import pytest

from leasekit.client import Client
from tests.cli.conftest import Run


def test_tasks_are_due_now_and_a_line_tells_of_each(run: Run, client: Client) -> None:
    client.schedule("k", id="a", delay=600)
    client.schedule("k", id="b", delay=600)
    done = run("reschedule", "a", "b", "--now", "--priority", "1")
    assert (done.exit_code, done.stderr) == (0, "")
    assert [line.split("\t")[::2] for line in done.stdout.splitlines()] == [["a", "1"], ["b", "1"]]
    assert next(client.tasks("k")).id == "a"


def test_json_has_the_answer(run: Run, client: Client) -> None:
    client.schedule("k", id="a")
    answer = json.loads(run("reschedule", "a", "--at", "2100-01-01T00:00:00Z", "--json").stdout)
    assert answer == {"id": "a", "status": "new", "at": "2100-01-01T00:00:00Z", "priority": 2}


def test_what_cannot_be_rescheduled_is_told_and_the_others_are(run: Run, client: Client) -> None:
    client.schedule("k", id="b")
    done = run("reschedule", "a", "b", "c", "--in", "60")
    assert (done.exit_code, done.stdout.split("\t")[0]) == (1, "b")
    assert [line.split(":")[:2] for line in done.stderr.splitlines()] == [
        ["leasekit reschedule", " there is no task 'a'"],
        ["leasekit reschedule", " there is no task 'c'"],
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "say what changes: --at, --in, --now or --priority"),
        (["--now", "--in", "5"], "give one of them"),
        (["--priority", "5"], "'--priority'"),  # Click's words differ by version
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told(run: Run, options: list[str], why: str) -> None:
    done = run("reschedule", "a", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.split())
