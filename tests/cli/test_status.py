"""`leasekit status`, `stats`, `workers` and `budget`: what is where, in words, lines and JSON."""

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from rich.console import Console

import leasekit
from leasekit import Client, NewTask, Unavailable
from leasekit.cli import service
from leasekit.cli.status import _Overview, _Task
from leasekit.cli.workers import print_workers, workers_table
from leasekit.task import Beat, Settlement, WorkerInfo
from leasekit.testing import memory
from leasekit.testing.memory import MemoryBackend
from tests.cli.conftest import Run


@pytest.fixture
def done(client: Client) -> None:
    """A task that has succeeded, one that was cancelled, one that waits."""
    client.schedule_all([NewTask(kind="k", id="good", payload={"n": 1}), NewTask(kind="k", id="off")])
    client.cancel("off")
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.complete({"pages": 3})
    client.schedule("l", id="waits")


@pytest.mark.usefixtures("done")
def test_a_task_is_lines_of_name_and_value_and_its_runs(run: Run) -> None:
    lines = [line.split("\t") for line in run("status", "good").stdout.splitlines()]
    facts = {line[0]: line[1] for line in lines}
    assert facts["status"] == "success"
    assert facts["payload"] == '{"n":1}'
    assert facts["result"] == '{"pages":3}'
    assert [line[3] for line in lines if line[0] == "run"] == ["success"]


def test_a_run_that_failed_is_a_line_with_its_error(run: Run, client: Client) -> None:
    client.schedule("k", id="bad", max_attempts=1)
    with pytest.raises(ValueError, match="no"), leasekit.lease(next(client.tasks("k"))):
        raise ValueError("no such film")
    (line,) = [line.split("\t") for line in run("status", "bad").stdout.splitlines() if line.startswith("run")]
    assert (line[3], line[6]) == ("retry", "ValueError: no such film")


@pytest.mark.usefixtures("done")
def test_a_task_as_json_is_one_document_with_its_history(run: Run) -> None:
    document = json.loads(run("status", "good", "--json").stdout)
    assert document["result"] == {"pages": 3}
    assert [entry["outcome"] for entry in document["history"]] == ["success"]


def test_a_task_that_there_is_not_is_exit_code_1_and_a_sentence(run: Run) -> None:
    done = run("status", "nope")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("leasekit status: there is no task 'nope': look for it with 'leasekit tasks'")


@pytest.mark.usefixtures("done")
def test_the_overview_is_a_line_for_each_kind(run: Run) -> None:
    assert run("status").stdout == "kind\ttasks\tended\trunning\tdead\nk\t2\t2\t0\t0\nl\t1\t0\t0\t0\n"


def test_the_kinds_of_names_that_are_run_once_are_one_line(run: Run, client: Client) -> None:
    for name in ("celery:1", "celery:2", "night"):
        with client.once(name):
            pass
    with client.once("celery:3"), client.named("leader"):
        assert run("status").stdout.splitlines()[1:] == [
            "named:leader\t1\t0\t1\t0",
            "once:*\t1\t1\t0\t0",
            "once:celery:*\t3\t2\t1\t0",
        ]
    assert len(run("stats").stdout.splitlines()) == 5


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend does not tell who works."""
    monkeypatch.setattr(memory, "MemoryBackend", type("MemoryBackend", (MemoryBackend,), {"workers": None}))


@pytest.mark.usefixtures("done", "silent")
def test_the_overview_as_json_has_counts_and_no_workers_where_the_backend_does_not_tell(run: Run) -> None:
    document = json.loads(run("status", "--json").stdout)
    assert document == {"kinds": {"k": {"success": 1, "cancelled": 1}, "l": {"new": 1}}, "workers": None}


@pytest.mark.usefixtures("done")
def test_watching_a_task_that_has_ended_well_is_exit_code_0_and_otherwise_1(run: Run) -> None:
    assert run("status", "good", "--watch").exit_code == 0
    assert run("status", "off", "--watch").exit_code == 1


@pytest.mark.usefixtures("done")
def test_showing_a_task_that_failed_is_no_failure(run: Run) -> None:
    assert run("status", "off").exit_code == 0


def shown(client: Client, task_id: str, *, width: int = 80) -> list[str]:
    """What a terminal of this width shows of a task."""
    view, page = _Task(client, task_id), io.StringIO()
    view.look()
    Console(file=page, width=width, highlight=False).print(view.picture())
    return [line.rstrip() for line in page.getvalue().splitlines()]


def test_the_overview_ends_its_last_line_in_a_terminal(client: Client) -> None:
    client.schedule("k")
    view, page = _Overview(client), io.StringIO()
    view.look()
    Console(file=page, force_terminal=True, width=80).print(view.picture())
    assert page.getvalue().endswith("\n")


def test_each_failed_run_is_shown_with_its_error_wrapped_below_it(client: Client) -> None:
    client.schedule("k", id="bad", max_attempts=2)
    words = " ".join(f"word{number}" for number in range(40))
    for task in islice(client.tasks("k"), 2):
        with leasekit.lease(task) as held:
            held.fail({"type": "ValueError", "message": f"{words} of {task.attempt}"}, retry=0.0)
    lines = shown(client, "bad")
    assert max(map(len, lines)) <= 80
    first, second = (at for at, line in enumerate(lines) if line.startswith("run "))
    assert lines[first].startswith("run 1, attempt 1: retry, 20")
    for begin, end, number in [(first + 1, second, 1), (second + 1, len(lines), 2)]:
        assert all(line.startswith("    ") for line in lines[begin : begin + 4])
        assert f"ValueError: {words} of {number}" in " ".join(line.strip() for line in lines[begin:end])


def test_a_success_is_shown_without_the_error_of_a_run_before(run: Run, client: Client) -> None:
    client.schedule("k", id="again")
    for task, retries in zip(client.tasks("k"), (True, False), strict=False):
        with leasekit.lease(task) as held:
            held.fail({"type": "ValueError", "message": "oops"}, retry=0.0) if retries else held.complete(1)
        if not retries:
            break
    facts = dict(line.split("\t")[:2] for line in run("status", "again").stdout.splitlines())
    assert (facts["status"], "error" in facts) == ("success", False)


def test_the_error_that_a_running_task_shows_is_that_of_the_run_before(run: Run, client: Client) -> None:
    client.schedule("k", id="again")
    for task, name in zip(client.tasks("k"), ("error", "error_of_the_run_before"), strict=False):
        with leasekit.lease(task) as held:
            if name != "error":
                assert f"\n{name}\t" in run("status", "again").stdout
                break
            held.fail("oops", retry=0.0)
        assert f"\n{name}\t" in run("status", "again").stdout


def test_without_the_library_of_the_default_service_a_command_says_that_none_was_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise leasekit.MissingDependency("'httpx' is not installed")

    monkeypatch.setattr(leasekit, "connect", connect)
    where = "http://127.0.0.1:8077 is used where no --backend and no LEASEKIT_URL names a service"
    assert (
        run("status", "-b", "http://127.0.0.1:8077").stderr == f"leasekit status: 'httpx' is not installed; {where}\n"
    )
    assert run("status", "-b", "http://host").stderr == "leasekit status: 'httpx' is not installed\n"


def test_a_running_task_whose_cancel_is_requested_says_so(run: Run, client: Client) -> None:
    client.schedule("k", id="held")
    with leasekit.lease(next(client.tasks("k"))) as held:
        assert "cancel_requested" not in run("status", "held").stdout
        client.cancel("held")
        assert "cancel_requested\tyes\n" in run("status", "held").stdout
        held.complete()


def test_a_task_whose_worker_may_be_dead_shows_the_end_of_its_lease(run: Run, client: Client) -> None:
    client.schedule("k", id="held", claim_timeout=600)
    task = next(client.tasks("k"))
    with leasekit.lease(task):
        facts = dict(line.split("\t")[:2] for line in run("status", "held").stdout.splitlines())
    left = datetime.fromisoformat(facts["lease_until"]) - datetime.now(UTC)
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)


def test_a_task_shows_when_its_run_was_claimed_and_how_long_it_lasts(run: Run, client: Client) -> None:
    client.schedule("k", id="held")
    with leasekit.lease(next(client.tasks("k"))) as held:
        facts = dict(line.split("\t")[:2] for line in run("status", "held").stdout.splitlines())
        assert facts["scheduled_at"] <= facts["claimed_at"]
        assert facts["running_for"].endswith(" s")
        assert any(re.match(r"claimed_at +\S+, \d+ s ago$", line) for line in shown(client, "held"))
        held.complete()
    facts = dict(line.split("\t")[:2] for line in run("status", "held").stdout.splitlines())
    assert "running_for" not in facts
    assert facts["claimed_at"] <= facts["ended_at"]
    assert re.match(r"run 1, attempt 1: success, \S+, after \d+ s, ", shown(client, "held", width=120)[-1])


def worker(*, running: int, silent: float | None, ttl: float | None = None) -> WorkerInfo:
    seen = None if silent is None else datetime.now(UTC) - timedelta(seconds=silent)
    return WorkerInfo(name="w", last_seen=seen, running=running, ttl=ttl)


@pytest.mark.parametrize(
    ("running", "silent", "ttl", "overdue"),
    [
        (1, 140.0, None, True),
        (1, 100.0, None, False),
        (0, 140.0, None, False),
        (1, None, None, False),
        (1, 50.0, 60.0, True),
        (1, 20.0, 60.0, False),
        (1, 140.0, 3600.0, False),
        (1, 20.0, 0.5, True),
    ],
)
def test_a_worker_that_holds_tasks_and_is_not_heard_is_overdue(
    running: int, silent: float | None, ttl: float | None, overdue: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [worker(running=running, silent=silent, ttl=ttl)]
    text = io.StringIO()
    Console(width=80, file=text).print(workers_table(found))
    print_workers(found, as_json=False)
    assert ("overdue" in text.getvalue()) == overdue
    assert capsys.readouterr().out.split("\t")[3] == ("overdue" if overdue else "-")


def test_a_renewal_is_no_change_that_a_watch_shows(run: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.schedule("k", id="held", heartbeat_timeout=60)
    connection = client.__connection__()
    [task] = connection.run(connection.backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks

    def looks(look: Callable[[], object], *, every: float) -> Iterator[object]:
        yield look()
        connection.run(connection.backend.beat([Beat(id="held", token=task.token, started=False)]))
        yield look()
        connection.run(connection.backend.settle([Settlement(id="held", token=task.token, outcome="success")]))
        yield look()

    monkeypatch.setattr("leasekit.cli.status.looks", looks)
    lines = run("status", "held", "--watch", "--json").stdout.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["claimed", "success"]


def test_a_run_that_gave_its_task_back_is_shown_as_no_attempt(client: Client) -> None:
    client.schedule("k", id="back")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.release()
    assert [line for line in shown(client, "back") if line.startswith("run 1, no attempt counted: release, 20")]


@pytest.fixture
def dead(client: Client) -> str:
    """A task that a crash killed."""
    client.schedule("k", id="dead", max_crashes=0)
    task = next(client.tasks("k"))
    error = {"type": "ExecutorDied", "message": "its executor exited with code 3"}
    client.__connection__().run(
        client.__connection__().backend.settle([Settlement(id=task.id, token=task.token, outcome="crash", error=error)])
    )
    return task.id


def test_the_error_that_killed_a_task_is_shown(run: Run, client: Client, dead: str) -> None:
    assert client.get(dead).status is leasekit.Status.DEAD  # type: ignore[union-attr]
    assert "    ExecutorDied: its executor exited with code 3" in shown(client, dead)
    assert "ExecutorDied" in run("status", dead).stdout
    waited = run("schedule", "k", "--id", dead, "--wait")
    assert waited.exit_code == 1
    assert "ended as dead" in waited.stderr
    assert "ExecutorDied: its executor exited with code 3" in waited.stderr


NOBODY = "no worker that handles 'l' is known: start one ('leasekit work MODULE:WORKER', or your loop)"


def test_a_task_that_no_known_worker_handles_is_said_to_be_one(run: Run, client: Client) -> None:
    client.schedule("l", id="waits", at=datetime(2100, 1, 1, tzinfo=UTC))
    assert run("status", "waits").stderr == f"leasekit status: {NOBODY}\n"
    assert NOBODY in " ".join(shown(client, "waits"))
    assert NOBODY in run("schedule", "l", "--id", "waits", "--wait", "--timeout", "0").stderr
    assert json.loads(run("status", "waits", "--json").stdout)["id"] == "waits"
    assert list(client.tasks("l", until_idle=0)) == []  # a claim makes it known
    assert run("status", "waits").stderr == ""
    assert NOBODY not in run("schedule", "l", "--id", "waits", "--wait", "--timeout", "0").stderr


@pytest.mark.usefixtures("silent")
def test_where_the_service_cannot_tell_who_works_nothing_is_said_of_it(run: Run, client: Client) -> None:
    client.schedule("l", id="waits")
    assert run("status", "waits").stderr == ""


def test_times_are_those_of_the_reader_with_their_offset(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "EAT-3")
    time.tzset()
    try:
        client.schedule("l", id="waits", at=datetime(2100, 1, 1, tzinfo=UTC))
        assert "at\t2100-01-01T03:00:00+03:00" in run("status", "waits").stdout
        assert "2100-01-01T03:00:00+03:00" in run("tasks").stdout
        assert json.loads(run("status", "waits", "--json").stdout)["at"] == "2100-01-01T00:00:00Z"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.usefixtures("done")
def test_stats_are_a_line_for_each_kind_and_status(run: Run) -> None:
    assert run("stats").stdout == "k\tsuccess\t1\nk\tcancelled\t1\nl\tnew\t1\n"


def test_stats_name_what_no_known_worker_can_have(run: Run, client: Client) -> None:
    client.schedule("k", requires={"gpu": "a100", "zone": "eu"})
    client.schedule("l", delay=3600)
    done = run("stats")
    assert done.stdout == "k\tnew\t1\nl\tnew\t1\n"
    none = "no worker with gpu=a100 and zone=eu that handles 'k' is known"
    assert done.stderr == f"leasekit stats: due tasks wait: {none}\n"
    assert json.loads(run("stats", "--json").stdout)["unmet"] == {"k": [{"gpu": "a100", "zone": "eu"}]}


@pytest.mark.usefixtures("done")
def test_stats_as_json_are_one_document(run: Run) -> None:
    assert json.loads(run("stats", "--json").stdout)["kinds"]["l"] == {"new": 1}


@pytest.mark.usefixtures("silent")
def test_a_backend_that_does_not_tell_who_works_says_so(run: Run) -> None:
    done = run("workers")
    assert done.exit_code == 1
    assert done.stderr == "leasekit workers: MemoryBackend cannot list its workers: ask the service itself\n"


def test_an_unknown_scheme_is_wrong_usage(run: Run) -> None:
    done = run("stats", "-b", "gopher://there")
    assert done.exit_code == 2
    assert "installed are http, http+unix, https, memory, postgres, postgresql, redis" in done.stderr


def test_where_nobody_answers_it_says_at_once_how_to_start_a_server(run: Run) -> None:
    done = run("stats", "-b", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "http://127.0.0.1:1 cannot be reached" in done.stderr
    assert "start a server with 'leasekit serve'" in done.stderr


def test_the_budget_is_printed_in_words_and_as_json(run: Run) -> None:
    assert "outage survived" in run("budget").stdout
    document = json.loads(run("budget", "--ttl", "30", "--json").stdout)
    assert (document["ttl"], document["cycle"]) == (30, 10)
    assert document["outage_survived"] == leasekit.Heartbeats().for_ttl(30).outage_survived


def test_a_budget_that_contradicts_itself_is_wrong_usage_and_says_what_to_change(run: Run) -> None:
    done = run("budget", "--ttl", "300", "--cycle", "180")
    assert done.exit_code == 2
    assert "lower cycle from 180 to 150" in done.stderr


# Looking again and again --------------------------------------------------------------------------------------


def answers(*said: object) -> Callable[[], object]:
    """A look that sees these one after the other; errors are raised."""
    rest: Iterator[object] = iter(said)

    def look() -> object:
        now = next(rest)
        if isinstance(now, Exception):
            raise now
        return now

    return look


def test_an_outage_is_waited_out_with_a_word_when_it_begins_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    seen = service.looks(answers(1, Unavailable("away"), Unavailable("away"), 2, 3), every=0)
    assert [next(seen) for _ in range(3)] == [1, 2, 3]
    assert capsys.readouterr().err == "leasekit: away; trying again\nleasekit: the service answers again\n"


def test_the_first_look_fails_at_once() -> None:
    with pytest.raises(Unavailable):
        next(service.looks(answers(Unavailable("away"), 1), every=0))
