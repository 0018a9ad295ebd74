"""`leasekit dead redrive`, and `client.redrive` over a service in memory."""

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
    assert lines(run("dead", "redrive", "--kind", "k", "--dry-run")) == [["a", "redrivable"], ["b", "redrivable"]]
    assert client.stats().kinds == {"k": {"dead": 2}}
    assert lines(run("dead", "redrive", "--kind", "k")) == [["a", "redriven"], ["b", "redriven"]]
    assert client.stats().kinds == {"k": {"enqueued": 2}}
    assert lines(run("dead", "redrive", "--kind", "k")) == []


def test_a_bad_task_is_told_and_the_others_go(run: Run, client: Client) -> None:
    dead(client, "a")
    client.schedule("k", id="live")
    done = run("dead", "redrive", "live", "a", "nobody")
    assert [line[:2] for line in lines(done)] == [["live", "failed"], ["a", "redriven"], ["nobody", "gone"]]
    assert done.exit_code == 1
    assert "2 of 3 tasks cannot be redriven" in done.stderr


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_no_match_is_said_with_the_tasks_in_other_statuses(run: Run, client: Client, more: tuple[str, ...]) -> None:
    client.schedule("k")
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.fail("boom", retry=False)
    done = run("dead", "redrive", "--kind", "k", *more)
    no_match = "leasekit dead: no task matches (status dead, kind k); --status fatal_failure: 1\n"
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", no_match)


@pytest.mark.parametrize("arguments", [(), ("a", "--kind", "k")])
def test_a_redrive_names_tasks_or_selects_them(run: Run, arguments: tuple[str, ...]) -> None:
    done = run("dead", "redrive", *arguments)
    assert (done.exit_code, "name tasks, or select them" in done.stderr) == (2, True)


def test_a_limit_is_kept_and_what_is_left_out_is_said(run: Run, client: Client) -> None:
    dead(client, *(f"t{n}" for n in range(5)))
    done = run("dead", "redrive", "--status", "dead", "--limit", "3")
    assert [line[0] for line in lines(done)] == ["t0", "t1", "t2"]
    assert "raise --limit" in done.stderr
    rest = run("dead", "redrive", "--status", "dead", "--limit", "0")
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


def test_dead_tasks_are_listed_and_shown(run: Run, client: Client) -> None:
    dead(client, "a", "b")
    assert [line[:3] for line in lines(run("dead"))] == [["a", "k", "dead"], ["b", "k", "dead"]]
    assert lines(run("dead", "--error", "no such text")) == []
    cut = run("dead", "list", "--error", "BOOM", "--since", "1h", "--limit", "1")
    assert ([line[0] for line in lines(cut)], "raise --limit" in cut.stderr) == (["a"], True)
    assert lines(run("dead", "--until", "1h")) == []
    assert "boom" in run("dead", "show", "a").stdout


def test_a_purge_of_dead_tasks_counts_and_then_removes(run: Run, client: Client) -> None:
    dead(client, "a", "b")
    client.schedule("k", id="live")
    counted = run("dead", "purge", "--error", "boom")
    assert (lines(counted), "2 tasks would be removed" in counted.stderr) == ([["k", "dead", "2"]], True)
    assert lines(run("dead", "purge", "a", "live", "--yes")) == [["k", "dead", "1"]]
    assert lines(run("dead", "purge", "--kind", "k", "--yes")) == [["k", "dead", "1"]]
    assert client.stats().kinds == {"k": {"new": 1}}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bury",), "is no action"),
        (("list", "a"), "leasekit dead show ID"),
        (("show",), "leasekit dead show ID"),
        (("list", "--yes"), "goes with redrive and purge"),
        (("redrive", "a", "--yes"), "goes with purge"),
        (("purge", "a", "--yes", "--dry-run"), "contradicts --dry-run"),
        (("--status", "success"), "is no dead one"),
        (("--since", "yesterday"), "is not an RFC 3339 time"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_service_is_asked(
    run: Run, arguments: tuple[str, ...], says: str
) -> None:
    done = run("dead", *arguments)
    assert (done.exit_code, says in " ".join(done.stderr.split())) == (2, True)


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
        done = run("dead", "redrive", "--kind", "k", "--limit", "0", "--rate", "100")
    finally:
        over.set()
        failing.join()
    assert [line[0] for line in lines(done)] == [f"t{n}" for n in range(30)]
