"""`leasekit schedule`: one task, and what becomes of it."""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

import leasekit
from leasekit import Client, Status
from leasekit.cli.errors import sentence
from leasekit.errors import Refused
from leasekit.testing import memory
from tests.cli.conftest import Run, Start


def test_it_prints_the_id_of_a_task_that_is_there(run: Run, client: Client) -> None:
    done = run("schedule", "thumbnail", '{"pages": 3}')
    task = client.get(done.stdout.strip())
    assert done.exit_code == 0
    assert task is not None
    assert (task.kind, task.payload, task.status) == ("thumbnail", {"pages": 3}, Status.NEW)


def test_a_dash_reads_the_payload_from_stdin(run: Run, client: Client) -> None:
    task = client.get(run("schedule", "k", "-", stdin='["é"]'.encode()).stdout.strip())
    assert task is not None
    assert task.payload == ["é"]


def test_what_the_options_say_is_said_of_the_task(run: Run, client: Client) -> None:
    run("schedule", "k", "--id", "mine", "--priority", "0", "--collection", "c", "--max-attempts", "1", "--in", "3600")
    task = client.get("mine")
    assert task is not None
    assert (task.priority, task.collection) == (0, "c")
    assert timedelta(minutes=58) < task.at - datetime.now(UTC) < timedelta(minutes=62)


@pytest.mark.parametrize(("options", "status"), [([], "dead"), (["--max-attempts", "none"], "retriable_failure")])
def test_25_attempts_may_fail_unless_there_is_no_limit(
    run: Run, client: Client, options: list[str], status: str
) -> None:
    run("schedule", "k", "--id", "mine", "--retry-wait", "0", *options)
    for attempt, task in enumerate(client.tasks("k"), 1):
        with leasekit.lease(task) as held:
            held.fail("not now", retry=True if attempt < 25 else 3600)
        if attempt == 25:
            break
    info = client.get("mine")
    assert info is not None
    assert (info.status, info.attempt) == (status, 25)


@pytest.mark.parametrize("attempts", ["0", "1000001", "some", "-1", "9" * 5000])
def test_a_number_of_attempts_that_is_none_is_refused(run: Run, client: Client, attempts: str) -> None:
    done = run("schedule", "k", "--max-attempts", attempts)
    assert done.exit_code == 2
    assert "none for no limit" in " ".join(done.stderr.split())
    assert client.list_tasks().tasks == []


def test_the_waits_between_attempts_can_be_given(run: Run, client: Client) -> None:
    run("schedule", "k", "--id", "mine", "--retry-wait", "3600", "--retry-wait", "7200")
    with leasekit.lease(next(client.tasks("k"))) as held:
        held.fail("later")
    task = client.get("mine")
    assert task is not None
    assert timedelta(minutes=58) < task.at - datetime.now(UTC) < timedelta(minutes=62)


def test_the_limits_of_a_run_can_be_given(run: Run, client: Client) -> None:
    run("schedule", "k", "--max-crashes", "0", "--max-runtime", "9", "--claim-timeout", "7", "--heartbeat-timeout", "8")
    task = next(client.tasks("k"))
    assert (task.ttl, task.max_runtime) == (7, 9)
    with leasekit.lease(task) as held:
        held.complete()


@pytest.mark.parametrize(("expiry", "status"), [([], "claimed"), (["--expiry", "retry"], "dead")])
def test_a_time_out_can_count_as_an_attempt(run: Run, client: Client, url: str, expiry: list[str], status: str) -> None:
    run("schedule", "k", "--id", "mine", "--max-attempts", "1", *expiry)
    for task in client.tasks("k", until_idle=0):
        memory.connect(url, worker="thief").steal("mine", task.token)
    info = client.get("mine")
    assert info is not None
    assert info.status.value == status


def test_a_task_can_wait_for_others(run: Run, client: Client) -> None:
    assert run("schedule", "k", "--id", "mine", "--after", "a-1", "--after", "a-2").exit_code == 0
    info = client.get("mine")
    assert info is not None
    assert info.reason == 'waits for "a-1" and 1 more to succeed'
    done = run("schedule", "k", "--id", "a-1", "--after", "mine")
    assert done.exit_code == 1
    assert '"a-1" after "mine" after "a-1"' in done.stderr


def test_at_is_a_time_with_its_zone(run: Run, client: Client) -> None:
    run("schedule", "k", "--id", "mine", "--at", "2100-12-24T18:00:00+01:00")
    task = client.get("mine")
    assert task is not None
    assert task.at == datetime(2100, 12, 24, 17, tzinfo=UTC)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["k", "so"], "not JSON"),
        (["k", "--at", "tomorrow"], "not an RFC 3339 time"),
        (["k", "--at", "2100-12-24T18:00:00"], "no time zone"),
        (["k", "--at", "2100-12-24T18:00:00Z", "--in", "5"], "give one of them"),
        (["k", "--timeout", "5"], "--wait"),
        (["k", "--priority", "5"], "--priority"),
        (["k", "--expiry", "never"], "--expiry"),
        ([], "KIND"),
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str], says: str) -> None:
    done = run("schedule", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_the_same_id_again_is_done_and_says_so(run: Run) -> None:
    run("schedule", "k", "1", "--id", "mine")
    again = run("schedule", "k", "1", "--id", "mine")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "mine\n", "the task exists already: new\n")


def test_an_id_that_is_another_task_is_refused(run: Run) -> None:
    run("schedule", "k", "1", "--id", "mine")
    other = run("schedule", "k", "2", "--id", "mine")
    assert (other.exit_code, other.stdout) == (1, "")
    assert other.stderr.startswith("leasekit schedule: mine is the id of another task")


def test_what_the_service_refuses_is_one_sentence_that_names_the_field(run: Run) -> None:
    done = run("schedule", "a/b")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "kind" in done.stderr


def test_what_a_refusal_has_said_is_not_said_again() -> None:
    detail = {"item": 0, "field": "kind", "detail": "is too short"}
    assert sentence(Refused("item 0: kind: is too short", errors=[detail])) == "item 0: kind: is too short"
    more = {"item": 1, "field": "id", "detail": "is too long"}
    assert sentence(Refused("two do not fit", errors=[detail, more])).endswith("kind is too short; id is too long")


def test_json_is_the_whole_answer(run: Run) -> None:
    answer = json.loads(run("schedule", "k", "--id", "mine", "--json").stdout)
    assert answer == {"id": "mine", "created": True, "status": "new"}


@pytest.fixture
def worked(client: Client) -> Callable[[str], threading.Thread]:
    """Run the next task of a kind to its end; of kind `bad`, to a failure for good."""

    def work(kind: str) -> None:
        for task in client.tasks(kind):
            try:
                with leasekit.lease(task) as held:
                    if kind == "bad":
                        raise leasekit.Fatal("no \x1b[31mgood")
                    held.complete({"was": task.payload})
            except leasekit.Fatal:
                pass
            return

    def start(kind: str) -> threading.Thread:
        thread = threading.Thread(target=work, args=(kind,))
        thread.start()
        return thread

    return start


def test_wait_prints_the_result(run: Run, worked: Callable[[str], threading.Thread]) -> None:
    thread = worked("good")
    done = run("schedule", "good", "7", "--id", "mine", "--wait")
    thread.join()
    assert (done.exit_code, json.loads(done.stdout), done.stderr) == (0, {"was": 7}, "mine\n")


def test_waiting_for_a_task_that_fails_is_exit_code_1_and_says_why_without_control_characters(
    run: Run, worked: Callable[[str], threading.Thread]
) -> None:
    thread = worked("bad")
    done = run("schedule", "bad", "--id", "mine", "--wait")
    thread.join()
    assert (done.exit_code, done.stdout) == (1, "")
    assert "leasekit schedule: mine ended as fatal_failure" in done.stderr
    assert "good" in done.stderr
    assert "\x1b" not in done.stderr


def test_waiting_with_json_prints_the_task_however_it_ended(
    run: Run, worked: Callable[[str], threading.Thread]
) -> None:
    thread = worked("bad")
    done = run("schedule", "bad", "--wait", "--json")
    thread.join()
    assert done.exit_code == 1
    assert json.loads(done.stdout)["status"] == "fatal_failure"


def test_a_wait_that_takes_too_long_ends_and_the_task_goes_on(run: Run, client: Client) -> None:
    done = run("schedule", "k", "--id", "mine", "--wait", "--timeout", "0.1")
    task = client.get("mine")
    assert done.exit_code == 1
    assert "leasekit status mine --watch" in done.stderr
    assert task is not None
    assert task.status is Status.NEW


def test_ctrl_c_while_waiting_says_that_the_task_goes_on(terminal: Start) -> None:
    waiting = terminal("schedule", "k", "--id", "waits-on", "--wait")
    waiting.until("k new, attempt 0")
    assert waiting.interrupt() == 130
    assert "the task goes on: leasekit status waits-on shows it, leasekit cancel waits-on ends it" in waiting.seen
