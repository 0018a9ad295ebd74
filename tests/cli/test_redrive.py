"""`leasekit redrive`, and `client.redrive` over a service in memory."""

import threading
from typing import Any

import pytest

import leasekit
from leasekit import Client, Status
from leasekit.hooks import Event, Redriven
from tests.cli.conftest import Run


def dead(client: Client, *ids: str, **options: Any) -> None:
    for task_id in ids:
        client.schedule("k", id=task_id, max_attempts=1, **options)
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.fail("boom")


def lines(done: Any) -> list[list[str]]:
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_a_dry_run_shows_what_a_redrive_then_does(run: Run, client: Client) -> None:
    dead(client, "a", "b")
    assert lines(run("redrive", "--kind", "k", "--dry-run")) == [["a", "redrivable"], ["b", "redrivable"]]
    assert client.stats().kinds == {"k": {"dead": 2}}
    assert lines(run("redrive", "--kind", "k")) == [["a", "redriven"], ["b", "redriven"]]
    assert client.stats().kinds == {"k": {"enqueued": 2}}
    assert lines(run("redrive", "--kind", "k")) == []


def test_a_bad_task_is_told_and_the_others_go(run: Run, client: Client) -> None:
    dead(client, "a")
    client.schedule("k", id="live")
    done = run("redrive", "live", "a", "nobody")
    assert [line[:2] for line in lines(done)] == [["live", "failed"], ["a", "redriven"], ["nobody", "gone"]]
    assert done.exit_code == 1
    assert "2 of 3 tasks cannot be redriven" in done.stderr


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_no_match_is_said_with_the_tasks_in_other_statuses(run: Run, client: Client, more: tuple[str, ...]) -> None:
    client.schedule("k")
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.fail("boom", retry=False)
    done = run("redrive", "--kind", "k", *more)
    no_match = "leasekit redrive: no task matches (status dead, kind k); --status fatal_failure: 1\n"
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", no_match)


@pytest.mark.parametrize("arguments", [(), ("a", "--kind", "k")])
def test_a_redrive_names_tasks_or_selects_them(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("redrive", *arguments)
    assert (done.exit_code, "name tasks, or select them" in done.stderr) == (2, True)


def test_a_limit_is_kept_and_what_is_left_out_is_said(run: Run, client: Client) -> None:
    dead(client, *(f"t{n}" for n in range(5)))
    done = run("redrive", "--status", "dead", "--limit", "3")
    assert [line[0] for line in lines(done)] == ["t0", "t1", "t2"]
    assert "raise --limit" in done.stderr
    rest = run("redrive", "--status", "dead", "--limit", "0")
    assert ([line[0] for line in lines(rest)], rest.stderr) == (["t3", "t4"], "")


def test_a_client_goes_through_batches_at_its_rate(url: str) -> None:
    events: list[Event] = []
    with leasekit.connect(url, hooks=[events.append]) as client:
        dead(client, *(f"t{n}" for n in range(5)))
        begun = client.__connection__().clock.now()
        answer = client.redrive(kind="k", rate=20, limit=4)
        assert [verdict.verdict for verdict in answer.tasks] == ["redriven"] * 4
        assert client.__connection__().clock.now() - begun >= 4 / 20
        rest = client.redrive(kind="k", cursor=answer.cursor)
        assert ([verdict.id for verdict in rest.tasks], rest.cursor) == (["t4"], None)
    assert [event.task_ids for event in events if isinstance(event, Redriven)] == [["t0", "t1", "t2", "t3"], ["t4"]]


@pytest.mark.anyio
async def test_the_same_from_an_event_loop(client: Client) -> None:
    dead(client, "a")
    assert [verdict.verdict for verdict in (await client.aredrive("a")).tasks] == ["redriven"]


def test_ids_and_filters_exclude_each_other(client: Client) -> None:
    with pytest.raises(TypeError, match="give either"):
        client.redrive("a", kind="k")
    with pytest.raises(leasekit.Refused):
        client.redrive()
    with pytest.raises(leasekit.Refused, match="status"):
        client.redrive(status=Status.SUCCESS)


def test_tasks_that_fail_again_are_not_taken_twice(run: Run, client: Client) -> None:
    """A worker fails every task at once, while all the dead are redriven."""
    dead(client, *(f"t{n}" for n in range(30)))
    over = threading.Event()

    def fail_all() -> None:
        with leasekit.connect(client.url) as other:
            while not over.is_set():
                for task in other.tasks("k", until_idle=0):
                    with leasekit.lease(task) as held:
                        held.fail("again")

    failing = threading.Thread(target=fail_all)
    failing.start()
    try:
        done = run("redrive", "--kind", "k", "--limit", "0", "--rate", "100")
    finally:
        over.set()
        failing.join()
    assert [line[0] for line in lines(done)] == [f"t{n}" for n in range(30)]
