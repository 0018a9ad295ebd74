"""`leasekit tasks` and `leasekit cancel`: lists that scripts can read."""

import io
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

import leasekit
from leasekit import Client, NewTask, Status
from leasekit.cli.tail import Tail
from leasekit.cli.tasks import tasks_table
from leasekit.task import Page, TaskInfo
from leasekit.testing.clock import FakeClock
from leasekit.testing.memory import MemoryService, shared
from tests.cli.conftest import Run


def fields(done: Any) -> list[list[str]]:
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_a_task_is_a_line_of_six_fields(run: Run, client: Client) -> None:
    at = datetime(2100, 1, 1, tzinfo=UTC)
    client.schedule("k", id="mine", at=at)
    assert fields(run("tasks")) == [["mine", "k", "new", "0", at.astimezone().isoformat(), "-"]]


@pytest.mark.parametrize("character", ["\x1b", "\x9b", "\u202e", "\u2028", "\U000e0001"], ids=ascii)
def test_what_a_terminal_would_obey_is_escaped_in_json(run: Run, client: Client, character: str) -> None:
    text = f"a{character}[2Jé€😀"
    client.schedule("k", text)
    printed = run("tasks", "--json").stdout
    assert printed.removesuffix("\n").isprintable()
    assert "é€😀" in printed
    assert json.loads(printed)["payload"] == text


def test_filters_are_applied_together(run: Run, client: Client) -> None:
    client.schedule_all(
        [NewTask(kind="k", id="a", collection="c"), NewTask(kind="k", id="b"), NewTask(kind="l", id="c")]
    )
    client.cancel("b")
    assert [line[0] for line in fields(run("tasks", "--kind", "k"))] == ["a", "b"]
    assert [line[0] for line in fields(run("tasks", "--kind", "k", "--status", "new"))] == ["a"]
    assert [line[0] for line in fields(run("tasks", "--collection", "c"))] == ["a"]
    assert fields(run("tasks", "--worker", "nobody")) == []


def test_tasks_are_found_by_their_tags(run: Run, client: Client) -> None:
    assert run("schedule", "k", "--id", "a", "--tag", "red", "--tag", "customer:42").exit_code == 0
    run("schedule", "k", "--id", "b", "--tag", "red")
    assert [line[0] for line in fields(run("tasks", "--tag", "red"))] == ["a", "b"]
    assert [line[0] for line in fields(run("tasks", "--tag", "red", "--tag", "customer:42"))] == ["a"]
    assert ["tags", "customer:42, red"] in fields(run("status", "a"))


def test_a_task_tells_that_no_worker_has_its_labels(run: Run, client: Client) -> None:
    assert run("schedule", "k", "--id", "a", "--requires", "gpu=a100").exit_code == 0
    assert list(client.tasks("k", until_idle=0)) == []
    status = run("status", "a")
    assert ["requires", "gpu=a100"] in fields(status)
    assert "no worker with gpu=a100 that handles 'k' is known" in status.stderr
    assert run("schedule", "k", "--requires", "gpu").exit_code == 2
    (task,) = (task.id for task in client.tasks("k", until_idle=0, labels={"gpu": "a100"}))
    assert task == "a"
    assert "no worker" not in run("status", "a").stderr


def test_a_task_tells_what_it_prefers(run: Run, client: Client) -> None:
    assert run("schedule", "k", "--id", "a", "--prefers", "zone=eu", "--prefer-for", "30").exit_code == 0
    told = fields(run("status", "a"))
    assert ["prefers", "zone=eu"] in told
    assert ["prefer_for", "30.0"] in told
    assert list(client.tasks("k", until_idle=0)) == []
    assert [task.id for task in client.tasks("k", until_idle=0, labels={"zone": "eu"})] == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prefer-for", "30"], "give `prefers` too"),
        (["--prefers", "zone=eu", "--prefer-for", "0"], "0.1"),
        (["--prefers", "zone=eu", "--key", "a"], "cannot prefer workers"),
        (["--prefers", "zone=eu", "--requires", "zone=us"], "'zone' is in `requires` and in `prefers`"),
        (["--debounce", "5"], "give one"),
    ],
    ids=str,
)
def test_options_that_contradict_one_another_are_refused(run: Run, options: list[str], message: str) -> None:
    done = run("schedule", "k", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", "").split())


def test_a_limit_is_kept_and_what_is_left_out_is_said(run: Run, client: Client) -> None:
    client.schedule_all([NewTask(kind="k", id=f"t{number:04}") for number in range(700)])
    cut = run("tasks", "--limit", "600")
    assert [line[0] for line in fields(cut)] == [f"t{number:04}" for number in range(600)]
    assert "raise --limit" in cut.stderr
    whole = run("tasks", "--limit", "0")
    assert len(fields(whole)) == 700
    assert whole.stderr == ""


def test_a_limit_that_is_just_met_leaves_nothing_to_say(run: Run, client: Client) -> None:
    client.schedule_all([NewTask(kind="k"), NewTask(kind="k")])
    assert run("tasks", "--limit", "2").stderr == ""


def test_json_is_a_line_for_each_task(run: Run, client: Client) -> None:
    client.schedule_all([NewTask(kind="k", id="a", payload={"x": "\x1b[31m"}), NewTask(kind="k", id="b")])
    lines = run("tasks", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    assert json.loads(lines[0])["payload"] == {"x": "\x1b[31m"}


def test_a_status_that_there_is_not_is_wrong_usage_and_those_that_are_are_named(run: Run) -> None:
    done = run("tasks", "--status", "done")
    assert done.exit_code == 2
    assert "retriable_failure" in done.stderr


# Following: see test_processes for the command itself ---------------------------------------------------------


def task(number: int, status: Status = Status.NEW, worker: str | None = None) -> TaskInfo:
    return TaskInfo(
        id=str(number), kind="k", status=status, priority=2, attempt=0, crashes=0, fence=0,
        at=datetime(2100, 1, 1, tzinfo=UTC), worker=worker,
    )  # fmt: skip


class Listing:
    """Pages of two; remembers where they were asked from."""

    def __init__(self, tasks: Sequence[TaskInfo]) -> None:
        self.tasks = list(tasks)
        self.asked: list[str | None] = []

    def page(self, cursor: str | None) -> Page:
        self.asked.append(cursor)
        start = int(cursor or 0)
        more = start + 2 < len(self.tasks)
        return Page(tasks=self.tasks[start : start + 2], cursor=str(start + 2) if more else None)


def ids(tasks: Sequence[TaskInfo]) -> list[str]:
    return [task.id for task in tasks]


def test_a_tail_shows_everything_once_and_then_what_changes() -> None:
    listing = Listing([task(0), task(1), task(2)])
    tail = Tail(listing.page)
    assert ids(tail.look()) == ["0", "1", "2"]
    assert ids(tail.look()) == []
    listing.tasks[1] = task(1, Status.CLAIMED, "w")
    listing.tasks.append(task(3))
    assert ids(tail.look()) == ["1", "3"]
    listing.tasks[1] = task(1, Status.CLAIMED, "another")
    assert ids(tail.look()) == ["1"]


def test_a_tail_does_not_read_again_the_pages_at_the_beginning_in_which_all_have_ended() -> None:
    over = Status.SUCCESS
    listing = Listing([task(0, over), task(1, over), task(2, over), task(3), task(4, over), task(5, over), task(6)])
    tail = Tail(listing.page)
    assert ids(tail.look()) == ["0", "1", "2", "3", "4", "5", "6"]
    listing.asked.clear()
    assert ids(tail.look()) == []
    assert listing.asked == ["2", "4", "6"]
    listing.tasks[3] = task(3, over)
    listing.tasks[6] = task(6, over)
    assert ids(tail.look()) == ["3", "6"]
    listing.asked.clear()
    listing.tasks += [task(7), task(8)]
    assert ids(tail.look()) == ["7", "8"]
    assert listing.asked == ["6", "8"]


def table(task: TaskInfo, width: int) -> list[str]:
    """The header and the rows of a table of two such tasks, as a terminal of this width shows them."""
    text = io.StringIO()
    Console(width=width, file=text).print(tasks_table([task, task], width=width))
    return [line for line in text.getvalue().splitlines() if line.startswith((" id", " 0"))]


def running(status: Status = Status.PROCESSING, *, reported: bool = True) -> TaskInfo:
    now = datetime.now(UTC)
    return TaskInfo(
        id="0" * 36, kind="thumbnail", status=status, priority=2, attempt=1, crashes=0, fence=1, at=now,
        worker="a-host.example:8377:d776de6c", progress={"page": 3}, claimed_at=now - timedelta(minutes=12),
        progress_at=now - timedelta(minutes=2 if reported else 15),
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 130, 160, 10_000])
@pytest.mark.parametrize("status", [Status.PROCESSING, Status.RETRIABLE_FAILURE])
def test_kinds_and_statuses_are_whole_on_any_terminal(width: int, status: Status) -> None:
    header, *rows = table(running(status), width)
    assert len(rows) == 2  # a line for each
    assert all(f" thumbnail   {status} " in row for row in rows)
    assert all(("0" * 36 in row) or width < 130 for row in rows)
    extra = {"running for": 0, "last progress": 100, "worker": 130}
    assert [name in header for name in extra] == [width >= least for least in extra.values()]


def test_a_running_task_says_for_how_long_and_when_its_run_reported_last() -> None:
    assert table(running(), 110)[1].split()[-5:] == ["12", "min", "2", "min", "ago"]
    assert table(running(reported=False), 110)[1].split()[-2:] == ["12", "min"]
    assert "12 min" not in table(running(Status.RETRIABLE_FAILURE), 110)[1]


def test_ended_tasks_say_when_and_why() -> None:
    dead = replace(running(Status.DEAD), ended_at=datetime.now(UTC) - timedelta(hours=3), reason="disk full " * 20)
    for width in (80, 100, 10_000):
        text = io.StringIO()
        Console(width=width, file=text).print(tasks_table([dead, dead], width=width, ended=True))
        rows = [line for line in text.getvalue().splitlines() if line.startswith(f" {dead.id} ")]
        assert len(rows) == 2  # a line for each
        assert all(" 3 h ago" in row and ("disk full" in row) is (width > 80) for row in rows)
        assert (dead.reason or "") in rows[0] or width < 10_000


def test_the_newest_are_shown_first(run: Run, client: Client) -> None:
    client.schedule_all([NewTask(kind="k", id=f"t{number:04}") for number in range(600)])
    newest = run("tasks", "--newest", "--limit", "2")
    assert [line[0] for line in fields(newest)] == ["t0599", "t0598"]
    assert "raise --limit" in newest.stderr


def test_what_failed_since_a_time_is_found_whatever_else_ended(run: Run) -> None:
    clock = FakeClock(time.time() - 3600)
    with shared(MemoryService(now=clock)) as url, leasekit.connect(url) as client:
        for task_id, fails in (("before", True), ("dead", True), ("good", False)):
            client.schedule("k", id=task_id, max_attempts=1)
            with suppress(ValueError), leasekit.lease(next(client.tasks("k"))):
                if fails:
                    raise ValueError("no such film")
            clock.advance(1200)
        client.schedule("k", id="fatal")
        with suppress(leasekit.Fatal), leasekit.lease(next(client.tasks("k"))):
            raise leasekit.Fatal("never")
        client.schedule("k", id="new")

        def ids(*options: str) -> list[str]:
            return [line[0] for line in fields(run("tasks", "--backend", url, *options))]

        assert ids("--status", "failed") == ["before", "dead", "fatal"]
        assert ids("--status", "failed", "--since", "50m") == ["dead", "fatal"]
        assert ids("--status", "failed", "--since", "50m", "--newest", "--limit", "1") == ["fatal"]
        assert ids("--status", "new", "--status", "dead") == ["before", "dead", "new"]
        assert ids("--since", "10m") == ["fatal", "new"]


def test_a_status_or_an_age_that_is_none_is_wrong_usage(run: Run) -> None:
    wrong = run("tasks", "--status", "bogus")
    assert (wrong.exit_code, "'bogus' is not one of new, " in wrong.stderr) == (2, True)
    assert run("tasks", "--since", "yesterday").exit_code == 2


# Cancel -------------------------------------------------------------------------------------------------------


def test_cancel_says_what_became_of_each(run: Run, client: Client) -> None:
    client.schedule_all([NewTask(kind="k", id="a"), NewTask(kind="k", id="b")])
    done = run("cancel", "a", "b")
    assert done.exit_code == 0
    assert fields(done) == [["a", "cancelled"], ["b", "cancelled"]]


def test_one_that_cannot_be_cancelled_is_exit_code_1(run: Run, client: Client) -> None:
    client.schedule("k", id="a")
    done = run("cancel", "a", "nope", "--json")
    assert done.exit_code == 1
    assert [json.loads(line)["verdict"] for line in done.stdout.splitlines()] == ["cancelled", "gone"]
    assert done.stderr == "leasekit cancel: nope cannot be cancelled: ended before, or unknown\n"


def test_more_than_a_batch_can_be_cancelled(run: Run, client: Client) -> None:
    names = [f"t{number}" for number in range(1001)]
    for start in (0, 1000):
        client.schedule_all([NewTask(kind="k", id=name) for name in names[start : start + 1000]])
    assert len(fields(run("cancel", *names))) == 1001


def test_the_holder_of_a_name_is_asked_to_give_it_back(run: Run, client: Client) -> None:
    with client.named("reports/nightly"):
        done = run("cancel", "--named", "reports/nightly")
        assert (done.exit_code, done.stdout) == (0, "named:reports%2Fnightly\tcancel_requested\n")
    with client.named("reports/nightly", wait=0):
        pass
