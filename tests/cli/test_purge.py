"""`leasekit purge`: counts first, removes with --yes."""

import json
from pathlib import Path

from leasekit.client import Client
from tests.cli.conftest import Run


def ended(client: Client, kind: str, count: int) -> None:
    for _ in range(count):
        client.cancel(client.schedule(kind).id)


def test_without_yes_nothing_is_removed(run: Run, client: Client) -> None:
    ended(client, "a", 2)
    with client.once("message-1"), client.once("message-2"):
        pass
    client.schedule("a")
    done = run("purge")
    assert done.exit_code == 0
    assert done.stdout == "a\tcancelled\t2\nonce:*\tsuccess\t2\n"
    assert done.stderr == "leasekit purge: 4 tasks would be removed: --yes removes them\n"
    assert run("purge", "--dry-run").stdout == done.stdout
    assert client.stats().kinds["a"] == {"cancelled": 2, "new": 1}


def test_with_yes_they_are_removed_and_counted(run: Run, client: Client) -> None:
    ended(client, "a", 2)
    ended(client, "b", 1)
    done = run("purge", "--kind", "a", "--yes", "--json")
    assert json.loads(done.stdout) == {"kinds": {"a": {"cancelled": 2}}}
    assert done.stderr == "leasekit purge: 2 tasks removed\n"
    assert client.stats().kinds == {"b": {"cancelled": 1}}


def test_filters_choose_what_is_removed(run: Run, client: Client) -> None:
    ended(client, "a", 1)
    assert "0 tasks would" in run("purge", "--older-than", "1d").stderr
    assert "0 tasks would" in run("purge", "--status", "dead").stderr
    assert "1 task would" in run("purge", "--status", "cancelled", "--older-than", "0").stderr


def test_what_cannot_be_meant_is_refused(run: Run) -> None:
    for arguments, why in (
        (["--status", "new"], "a task that is new has not ended"),
        (["--yes", "--dry-run"], "it contradicts --yes"),
        (["--vacuum"], "it goes with --yes"),
        (["--older-than", "yesterday"], "a number of seconds, or one with s, m, h or d behind"),
    ):
        done = run("purge", *arguments)
        assert done.exit_code == 2
        assert why in done.stderr


def test_a_service_without_a_file_says_that_there_is_none(run: Run, client: Client) -> None:
    ended(client, "a", 1)
    done = run("purge", "--yes", "--vacuum")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] == "leasekit purge: 1 task removed"
    assert "there is no file" in done.stderr.splitlines()[1]


def test_a_vacuum_makes_the_file_smaller(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tasks.db"
    url = f"sqlite:///{file}?retention=90d"
    with Client(url) as client:
        for _ in range(4):
            client.cancel(*(client.schedule("a", "x" * 500_000).id for _ in range(4)))
    before = file.stat().st_size
    done = run("purge", "--yes", "--vacuum", "--backend", url)
    assert done.exit_code == 0
    assert "16 tasks removed" in done.stderr
    assert file.stat().st_size < before / 10
    again = run("purge", "--yes", "--vacuum", "--backend", url)
    assert again.stderr.endswith("leasekit purge: the file keeps its size: no space was given back\n")
