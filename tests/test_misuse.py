"""What is used in a wrong way says so at once, and what is shown holds no secret."""

import itertools
import math
import os
import pickle
import typing
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import leasekit
import leasekit_dramatiq
import leasekit_http
from leasekit import Client, Task, Worker
from leasekit.errors import ConfigError, NotHeld, Refused
from leasekit.task import Beat, Exponential, FixedDelays, NewTask, Settlement
from leasekit.testing.clock import FakeClock
from leasekit.testing.effects import Effects
from tests.waiting import eventually


def task_numbers() -> list[str]:
    """The options of a task that are numbers."""
    hints = typing.get_type_hints(NewTask)
    return [name for name, hint in hints.items() if {hint, *typing.get_args(hint)} & {int, float}]


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


NO_NUMBERS = (math.nan, -math.inf, -1, 1e308, 10**400, True, "30", timedelta(seconds=30))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("name", "give"),
    [
        ("retry_for", lambda client, value: leasekit.connect("memory://misuse", retry_for=value)),
        ("until_idle", lambda client, value: client.tasks("k", until_idle=value)),
        ("timeout", lambda client, value: client.wait_tasks(timeout=value)),
        ("wait", lambda client, value: client.named("a", wait=value)),
        ("wait", lambda client, value: client.once("a", wait=value)),
        ("ttl", lambda client, value: client.named("a", ttl=value)),
        ("ttl", lambda client, value: client.once("a", ttl=value)),
        ("idle_timeout", lambda client, value: leasekit.lease(client.named("a"), idle_timeout=value)),
        ("idle_timeout", lambda client, value: leasekit.leased(idle_timeout=value)),
        ("concurrency", lambda client, value: Worker(client, concurrency=value)),
        ("ahead", lambda client, value: Worker(client, ahead=value)),
        ("drain_grace", lambda client, value: Worker(client, drain_grace=value)),
        ("drain_timeout", lambda client, value: Worker(client, drain_timeout=value)),
        ("concurrency", lambda client, value: Worker(client).run(concurrency=value)),
        ("drain_grace", lambda client, value: Worker(client).run(drain_grace=value)),
        ("drain_timeout", lambda client, value: Worker(client).run(drain_timeout=value)),
        (
            "idle_timeout",
            lambda client, value: Worker(client).handler("k", idle_timeout=value)(lambda payload: payload),
        ),
        ("concurrency", lambda client, value: Worker(client).handler("k", concurrency=value)(lambda it: it)),
        ("timeout", lambda client, value: leasekit.Idle(value)),
        ("seconds", lambda client, value: FakeClock().advance(value)),
        ("lost", lambda client, value: Effects().assert_none_after_loss(lost=value)),
        ("within", lambda client, value: Effects().assert_none_after_loss(within=value)),
        ("timeout", lambda client, value: leasekit_http.HttpBackend("http://a", worker="w", timeout=value)),
        ("again_in", lambda client, value: leasekit_dramatiq.Leases("memory://misuse", again_in=value)),
    ],
)
def test_a_number_that_is_none_is_refused_where_it_is_given(
    client: Client, name: str, give: Callable[[Client, Any], object], value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a (whole )?number .*, got "):
        give(client, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=repr)
@pytest.mark.parametrize(
    ("field", "option"),
    [
        *((name, lambda value: value) for name in task_numbers()),
        ("retry", lambda value: Exponential(first=value)),
        ("retry", lambda value: Exponential(factor=value)),
        ("retry", lambda value: Exponential(max=value)),
        ("retry", lambda value: Exponential(jitter=value)),
        ("retry", lambda value: FixedDelays(waits=[1.0, value])),
    ],
)
def test_a_number_that_json_would_lose_is_refused_in_an_option_of_a_task(
    client: Client, task: Task, field: str, option: Callable[[Any], Any], value: float
) -> None:
    """It would arrive as null, which means *no limit*."""
    needs: dict[str, dict[str, Any]] = {"debounce": {"dedupe_key": "one"}, "prefer_for": {"prefers": {"gpu": "yes"}}}
    options: dict[str, Any] = {field: option(value), **needs.get(field, {})}
    wrong = NewTask(kind="k", **options)
    with pytest.raises(Refused, match=f"item 1: {field} holds NaN or an infinity: give a finite number") as refused:
        client.schedule_all([NewTask(kind="k"), wrong])
    assert (refused.value.errors[0]["item"], refused.value.errors[0]["field"]) == (1, field)
    with leasekit.lease(task) as held, pytest.raises(ValueError, match=f"this {field} holds NaN or an infinity"):
        held.then("k", **options)


@pytest.mark.parametrize("limit", [math.nan, 0, 2.5, "3"], ids=repr)
def test_a_page_has_a_whole_number_of_tasks(client: Client, limit: Any) -> None:
    with pytest.raises(Refused, match=f"limit is {limit!r}: give a whole number from 1 to 1000"):
        client.list_tasks(limit=limit)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("countdown", r": did you mean 'delay'\?"),
        ("eta", r": did you mean 'delay'\?"),
        ("max_attempt", r": did you mean 'max_attempts'\?"),
        ("colour", ""),
    ],
)
def test_an_unknown_option_gets_a_hint(client: Client, task: Task, name: str, hint: str) -> None:
    options: Any = {name: 5}
    with pytest.raises(TypeError, match=f"^'{name}' is no option of a task{hint}$"):
        client.schedule("k", **options)
    with leasekit.lease(task) as held, pytest.raises(TypeError, match=f"'{name}' is no option of a task"):
        held.then("k", **options)


def test_a_task_has_one_time_at_which_it_may_start(client: Client) -> None:
    with pytest.raises(ValueError, match="`at` and `delay` both say when the task may start: give one of them"):
        client.schedule("k", at=datetime.now(UTC), delay=5)


def test_a_delay_may_be_a_timedelta(client: Client) -> None:
    wait = timedelta(days=1)
    now, later = (client.get(client.schedule("k", delay=delay).id) for delay in (0, wait))
    assert now is not None
    assert later is not None
    assert timedelta() <= later.at - now.at - wait < timedelta(minutes=1)
    with pytest.raises(TypeError, match="the delay of a NewTask is in seconds: write delay=86400"):
        client.schedule_all([NewTask(kind="k", delay=wait)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "options", "says"),
    [
        (float("nan"), {}, r"^payload holds NaN"),
        ({1: object()}, {}, r"^the task is not JSON"),
        (None, {"priority": 9}, r"^the task does not fit, and nothing was applied: priority"),
        ("x" * 2_000_000, {}, r"^payload has 2,000,002"),
    ],
    ids=["nan", "object", "priority", "large"],
)
@pytest.mark.anyio
async def test_the_refusal_of_one_task_names_no_position(client: Client, payload: Any, options: Any, says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        client.schedule("k", payload, **options)
    assert refused.value.errors[0]["item"] == 0
    with pytest.raises(Refused, match=says):
        await client.aschedule("k", payload, **options)


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


def test_nothing_shows_what_users_put_into_a_task(client: Client) -> None:
    """A log would keep it."""
    options: dict[str, Any] = {"payload": {"card": "4111 1111"}, "id": "a"}
    client.schedule("k", **options)
    task = next(client.tasks("k"))
    with leasekit.lease(task) as held:
        held.progress("4111 1111")
        held.complete("4111 1111")
    info = client.get("a")
    assert info is not None
    assert info.result == "4111 1111"
    beat = Beat(id="a", token="t", progress="4111 1111")
    end = Settlement(id="a", token="t", outcome="fatal", error="4111 1111", then=[NewTask(kind="k", **options)])
    for value in (task, held, info, info.history, client.list_tasks(), NewTask(kind="k", **options), beat, end):
        assert "4111" not in repr(value)
    assert "payload=<20 bytes>" in repr(task)
    assert "progress=None" in repr(task)
    assert "result=<11 bytes>" in repr(info)
    assert "payload=<object>" in repr(NewTask(kind="k", payload=object()))


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
    client: Client, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    client.schedule("k", id="a")
    client.schedule("k", id="b")
    assert [task.id for task in itertools.islice(client.tasks("k", until_idle=0), 9)] == ["a", "b"]
    (warning,) = [record.getMessage() for record in caplog.records if "not leased" in record.message]
    assert warning.startswith("task a was not leased before the loop went on")
    assert warning.endswith("write `with leasekit.lease(task):` in the loop")
    eventually(lambda: client.stats().kinds["k"] == {"enqueued": 2})  # both were given back
    assert list(client.tasks("k", until_idle=0)) == []
    clock.advance(1)
    assert [task.id for task in client.tasks("k", until_idle=0)] == ["a", "b"]


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


def test_a_list_of_waits_is_a_policy_of_its_own(client: Client) -> None:
    retry: Any = [10, 60]
    with pytest.raises(TypeError, match=r"write retry=leasekit.FixedDelays\(waits=\[10, 60\]\)"):
        client.schedule("k", retry=retry)


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEKIT_URL", "memory://from-the-environment")
    with leasekit.connect() as client:
        assert client.url == "memory://from-the-environment"
    monkeypatch.delenv("LEASEKIT_URL")
    with pytest.raises(ConfigError, match="set LEASEKIT_URL"):
        leasekit.connect()
