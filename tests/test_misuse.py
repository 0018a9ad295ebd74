"""What is used in a wrong way says so at once, and what is shown holds no secret."""

import os
import pickle
from typing import Any

import pytest

import leasekit
from leasekit import Client, Task
from leasekit.errors import ConfigError, NotHeld
from leasekit.task import Beat, NewTask, Settlement


@pytest.fixture
def task(client: Client) -> Task:
    client.schedule("k", {"path": "a.png"}, id="a")
    return next(client.tasks("k"))


@pytest.mark.parametrize("make", [leasekit.connect, leasekit.Worker], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"url": 8077}, "int"),
        ({"url": ["memory://"]}, "list"),
        ({"heartbeats": 30}, "heartbeats"),
        ({"heartbeats": {"ttl": 30}}, "heartbeats"),
        ({"hooks": print}, "hooks"),
        ({"hooks": ["print"]}, "hooks"),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_where_it_is_given(make: Any, arguments: dict[str, Any], named: str) -> None:
    arguments = {"url": "memory://misuse", **arguments}
    with pytest.raises(ConfigError, match=named):
        make(arguments.pop("url"), **arguments)


@pytest.mark.parametrize("retry_for", ["30", -1, [30]])
def test_retry_for_is_a_number_of_seconds(retry_for: Any) -> None:
    with pytest.raises(ConfigError, match="retry_for must be seconds"):
        leasekit.connect("memory://misuse", retry_for=retry_for)


def test_what_is_not_claimed_is_to_be_claimed_first(client: Client) -> None:
    scheduled = client.schedule("k", id="a")
    for what in (scheduled, client.get("a"), NewTask(kind="k")):
        with pytest.raises(TypeError, match=r"claim the task first, as in `for task in client\.tasks"):
            leasekit.lease(what)  # type: ignore[arg-type]


def test_nothing_shows_a_token(task: Task) -> None:
    shown = [task, Beat(id="a", token=task.token), Settlement(id="a", token=task.token, outcome="success")]
    for value in shown:
        assert task.token not in repr(value)
        assert "id='a'" in repr(value)
        assert "token" not in dict(value.__rich_repr__())
    with leasekit.lease(task) as held:
        assert task.token not in repr(held)


def test_a_lease_says_how_it_stands(task: Task) -> None:
    held = leasekit.lease(task)
    assert repr(held).endswith(": not begun>")
    with held:
        assert repr(held).startswith("<Lease of Task(id='a'")
        assert repr(held).endswith(": held>")
    assert repr(held).endswith(": ended>")


def test_a_client_shows_its_service_and_no_password() -> None:
    client = leasekit.connect("redis://user:secret@127.0.0.1:6379/0?prefix=secret", worker="w")
    assert repr(client) == "<Client of redis://127.0.0.1:6379/0 as 'w'>"


def test_a_client_of_a_backend_object_is_shown(client: Client) -> None:
    assert repr(client).startswith("<Client of a backend object as ")


def test_a_worker_shows_its_kinds() -> None:
    worker = leasekit.Worker("memory://misuse")
    assert repr(worker) == "<Worker for no kinds yet: not running>"
    worker.handler("k")(lambda payload: None)
    assert repr(worker) == "<Worker for 'k': not running>"


def test_what_belongs_to_this_process_is_not_pickled(client: Client, task: Task) -> None:
    with leasekit.lease(task) as held:
        with pytest.raises(TypeError, match="a lease cannot be pickled"):
            pickle.dumps(held)
        with pytest.raises(TypeError, match="a client cannot be pickled"):
            pickle.dumps(client)


@pytest.mark.parametrize("ask", ["remaining", "complete", "release", "check"])
def test_a_fork_of_the_holder_is_told_that_it_holds_nothing(task: Task, ask: str) -> None:
    with leasekit.lease(task) as held:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                getattr(held, ask)()
            except NotHeld as refused:
                os.write(writing, str(refused).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert "this is a fork of it, and holds nothing" in pipe.read()
        os.waitpid(child, 0)


def test_a_loop_that_leases_nothing_is_told_so_once_and_is_not_busy(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.schedule("k", id="a")
    client.schedule("k", id="b")
    assert [task.id for task in client.tasks("k", until_idle=0)] == ["a", "b"]
    (warning,) = [record.getMessage() for record in caplog.records if "not leased" in record.message]
    assert warning.startswith("task a was not leased before the loop went on")
    assert warning.endswith("write `with leasekit.lease(task):` in the loop")


def test_ids_are_strings(client: Client) -> None:
    scheduled: Any = client.schedule("k", id="a")
    for call in (client.get, client.cancel, client.wait_tasks):
        with pytest.raises(TypeError, match="task ids are strings, got Scheduled: give its id"):
            call(scheduled)
    assert client.get("a") is not None


def test_a_status_has_one_of_the_names(client: Client) -> None:
    client.schedule("k", id="a")
    status: Any = "new"
    assert [task.id for task in client.list_tasks(status=status).tasks] == ["a"]
    status = "bogus"
    with pytest.raises(ValueError, match="no status is called 'bogus': they are new, enqueued, claimed"):
        client.list_tasks(status=status)


def test_a_number_of_retries_is_max_attempts(client: Client) -> None:
    retry: Any = 3
    with pytest.raises(TypeError, match="write max_attempts=3, or retry="):
        client.schedule("k", retry=retry)


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEKIT_URL", "memory://from-the-environment")
    with leasekit.connect() as client:
        assert client.url == "memory://from-the-environment"
    monkeypatch.delenv("LEASEKIT_URL")
    with pytest.raises(ConfigError, match="set LEASEKIT_URL"):
        leasekit.connect()
