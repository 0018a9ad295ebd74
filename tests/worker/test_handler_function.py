"""Handlers are scheduled as they are called: what becomes of fields, options and clients."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import pytest

import leasekit
from leasekit import Client, ConfigError, Worker
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually
from tests.worker.conftest import AtWork


class Thumbnail(msgspec.Struct, rename="camel"):
    path: str
    max_width: int = 100


@dataclasses.dataclass
class Mail:
    to: str
    at: str = "noon"
    priority: str = "none"
    client: str = "nobody"


class Page(TypedDict):
    number: int


class Awkward(TypedDict):
    self: int
    payload: int


@pytest.fixture
def client(service: MemoryService) -> Iterator[Client]:
    with Client(MemoryBackend(service, worker="worker")) as client:
        yield client


@pytest.fixture
def worker(client: Client) -> Worker:
    return Worker(client)


def payload(client: Client, scheduled: leasekit.task.Scheduled) -> Any:
    info = client.get(scheduled.id)
    assert info is not None
    return info.payload


def test_the_fields_of_a_struct_are_named_as_in_python_and_travel_as_it_says(worker: Worker, client: Client) -> None:
    @worker.handler("thumbnail")
    def thumbnail(payload: Thumbnail) -> None: ...

    scheduled = thumbnail.schedule(path="a.png", max_width=7)
    assert payload(client, scheduled) == {"path": "a.png", "maxWidth": 7}
    assert payload(client, thumbnail.schedule(Thumbnail("b.png"))) == {"path": "b.png", "maxWidth": 100}
    info = client.get(scheduled.id)
    assert info is not None
    assert info.kind == "thumbnail"


def test_the_handler_gets_what_was_scheduled(worker: Worker, client: Client) -> None:
    seen: list[Thumbnail] = []

    @worker.handler("thumbnail")
    def thumbnail(payload: Thumbnail) -> None:
        seen.append(payload)
        worker.stop()

    thumbnail.schedule(path="a.png", max_width=7)
    worker.run()
    assert seen == [Thumbnail("a.png", 7)]


def test_the_fields_of_a_dataclass_may_have_the_names_of_options(worker: Worker, client: Client) -> None:
    @worker.handler("mail")
    def mail(payload: Mail) -> None: ...

    scheduled = mail.options(priority=0).schedule(to="a", at="night", priority="high", client="me")
    assert payload(client, scheduled) == {"to": "a", "at": "night", "priority": "high", "client": "me"}
    info = client.get(scheduled.id)
    assert info is not None
    assert info.priority == 0


def test_a_field_may_be_called_payload_or_self(worker: Worker, client: Client) -> None:
    @worker.handler("k")
    def handler(payload: Awkward) -> None: ...

    assert payload(client, handler.schedule(self=1, payload=2)) == {"self": 1, "payload": 2}


def test_the_fields_of_a_typed_dict_may_be_annotated_further(worker: Worker, client: Client) -> None:
    @worker.handler("page")
    def page(payload: Annotated[Page, msgspec.Meta(description="one page")]) -> None: ...

    assert payload(client, page.schedule(number=1)) == {"number": 1}


def test_other_payloads_are_positional(worker: Worker, client: Client) -> None:
    @worker.handler("any")
    def anything(payload: Any) -> None: ...

    @worker.handler("numbers")
    def numbers(payload: list[int]) -> None: ...

    assert payload(client, anything.schedule({"a": 1})) == {"a": 1}
    assert payload(client, anything.schedule()) is None
    assert payload(client, numbers.schedule([1, 2])) == [1, 2]
    with pytest.raises(TypeError, match="no fields"):
        numbers.schedule(a=1)
    with pytest.raises(TypeError, match="one payload"):
        numbers.schedule([1], a=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"path": "a", "heigth": 1}, TypeError, "no field heigth"),
        ({"max_width": 1}, TypeError, "needs path"),
        ({"path": 1}, ValueError, "Expected `str`, got `int`"),
        ({"path": object()}, ValueError, "not JSON"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    worker: Worker, client: Client, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    @worker.handler("thumbnail")
    def thumbnail(payload: Thumbnail) -> None: ...

    with pytest.raises(error, match=says):
        thumbnail.schedule(**fields)
    assert client.list_tasks().tasks == []


def test_options_are_kept_for_further_calls(worker: Worker, client: Client) -> None:
    @worker.handler("page")
    def page(payload: Page) -> None: ...

    urgent = page.options(priority=0, collection="book")
    infos = [client.get(urgent.schedule(number=number).id) for number in range(2)]
    assert [(info.priority, info.collection) for info in infos if info] == [(0, "book")] * 2


def test_a_handler_declares_defaults_of_its_tasks_and_what_a_call_says_wins(worker: Worker, client: Client) -> None:
    @worker.handler("page", max_attempts=1, priority=0, collection="book")
    def page(payload: Page) -> None:
        raise OSError

    for scheduled in (page, page.options(max_attempts=None, collection="paper")):
        scheduled.schedule(number=1)
    client.schedule("page", {"number": 1})  # by the name of the kind: no defaults
    assert worker.drain() == 3
    assert [(task.status, task.priority, task.collection) for task in client.list_tasks().tasks] == [
        ("dead", 0, "book"), ("retriable_failure", 0, "paper"), ("retriable_failure", 2, None),
    ]  # fmt: skip


def test_a_successor_that_is_given_as_a_handler_has_its_defaults_and_a_payload_that_fits(
    worker: Worker, client: Client
) -> None:
    @worker.handler("mail", priority=0, collection="mails", dedupe=lambda mail: mail.to)
    def mail(payload: Mail) -> None: ...

    client.schedule("first")
    with leasekit.lease(next(client.tasks("first"))) as held:
        held.then(mail, Mail("ada"))
        held.then(mail, Mail("ada"))
        held.then(mail.options(priority=1), Mail("bob"), collection="late")
        with pytest.raises(ValueError, match="does not fit"):
            held.then(mail)
    found = {info.payload["to"]: (info.priority, info.collection) for info in client.list_tasks(kind="mail").tasks}
    assert found == {"ada": (0, "mails"), "bob": (1, "late")}


def test_a_handler_declares_what_its_time_outs_count_as(worker: Worker, client: Client, service: MemoryService) -> None:
    @worker.handler("page", max_attempts=1, expiry="retry")
    def page(payload: Page) -> None: ...

    declared, chosen = page.schedule(number=1).id, page.options(expiry="crash").schedule(number=2).id
    for task in client.tasks("page", until_idle=0):
        service.steal(task.id)
    assert [client.get(task_id).status for task_id in (declared, chosen)] == ["dead", "claimed"]  # type: ignore[union-attr]


@pytest.mark.anyio
async def test_a_handler_makes_the_dedupe_key_of_the_payload(worker: Worker, client: Client) -> None:
    def key(thumbnail: Thumbnail) -> str | None:
        return thumbnail.path or None

    @worker.handler("thumbnail", dedupe=key)
    def thumbnail(payload: Thumbnail) -> None: ...

    assert thumbnail.schedule(path="a.png").created
    assert not thumbnail.schedule(Thumbnail("a.png", 7)).created
    assert not (await thumbnail.aschedule({"path": "a.png"})).created  # type: ignore[call-overload]
    assert thumbnail.schedule(path="b.png").created
    assert thumbnail.schedule(path="").created
    assert thumbnail.schedule(path="").created, "no key"
    assert thumbnail.options(dedupe_key="mine").schedule(path="a.png").created, "what the call says wins"


@pytest.mark.parametrize(
    ("defaults", "error", "says"),
    [
        ({"max_attempt": 3}, TypeError, r"^'max_attempt' is no default .*: did you mean 'max_attempts'\?$"),
        ({"id": "a"}, TypeError, "^'id' is no default of tasks that a handler declares$"),
        ({"max_attempts": 0}, ConfigError, r"handler 'k' \(.*max_attempts"),
        ({"max_crashes": "5"}, ConfigError, "max_crashes"),
        ({"max_runtime": float("nan")}, ConfigError, "max_runtime holds NaN"),
        ({"retry": 5}, ConfigError, "write max_attempts=5"),
        ({"expiry": "never"}, ConfigError, "expiry"),
        ({"dedupe": "key"}, ConfigError, "dedupe must be a function of the payload that returns the key, got 'key'"),
    ],
)
def test_a_wrong_default_is_refused_where_it_is_declared(
    worker: Worker, defaults: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        worker.handler("k", **defaults)(lambda payload: None)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_attempt": 3}, TypeError, r"^'max_attempt' is no option of a task: did you mean 'max_attempts'\?$"),
        ({"priority": 9}, ValueError, "this task of kind 'page' cannot be scheduled: .*priority"),
        ({"retry": 5}, TypeError, "write max_attempts=5"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(
    worker: Worker, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    @worker.handler("page")
    def page(payload: Page) -> None: ...

    with pytest.raises(error, match=says):
        page.options(**options)


def test_a_client_that_is_given_schedules(worker: Worker, client: Client) -> None:
    elsewhere = MemoryService()

    @worker.handler("page")
    def page(payload: Page) -> None: ...

    with Client(MemoryBackend(elsewhere, worker="another")) as other:
        scheduled = page.options(client=other).schedule(number=1)
        assert other.get(scheduled.id) is not None
    assert client.get(scheduled.id) is None


def test_a_worker_with_a_url_opens_a_client_for_each_call(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    worker = Worker(url)

    @worker.handler("page")
    def page(payload: Page) -> None: ...

    scheduled = page.schedule(number=1)
    with leasekit.connect(url) as client:  # the file is free again
        assert payload(client, scheduled) == {"number": 1}


def test_where_there_is_no_service_that_is_said(monkeypatch: pytest.MonkeyPatch, faulty: Faulty) -> None:
    monkeypatch.delenv("LEASEKIT_URL", raising=False)

    def page(payload: Page) -> None: ...

    with pytest.raises(ConfigError, match="which service"):
        Worker().handler("page")(page).schedule(number=1)
    with pytest.raises(ConfigError, match="give a client"):
        Worker(faulty).handler("page")(page).schedule(number=1)


def test_a_worker_at_work_schedules_with_the_client_that_it_works_with(
    tmp_path: Path, at_work: AtWork, door: str
) -> None:
    """Another one could not even open the file."""
    worker = Worker(f"sqlite:///{tmp_path}/tasks.db")
    seen: list[int] = []

    @worker.handler("page")
    def page(payload: Page) -> None:
        seen.append(payload["number"])
        if payload["number"] < 2:
            page.schedule(number=payload["number"] + 1)

    @worker.handler("book")
    async def book(payload: None) -> None:
        await page.aschedule(number=0)

    book.schedule()
    with at_work(worker):
        eventually(lambda: seen == [0, 1, 2])


@pytest.mark.anyio
async def test_from_an_event_loop_there_is_aschedule(worker: Worker, client: Client) -> None:
    @worker.handler("page")
    async def page(payload: Page) -> None: ...

    assert payload(client, await page.aschedule(number=1)) == {"number": 1}
    assert payload(client, await page.options(priority=0).aschedule({"number": 2})) == {"number": 2}


@pytest.mark.anyio
async def test_aschedule_opens_a_client_by_url_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"

    @Worker(url).handler("page")
    async def page(payload: Page) -> None: ...

    scheduled = await page.aschedule(number=1)
    async with leasekit.connect(url) as client:
        assert (await client.aget(scheduled.id)) is not None


def test_more_kinds_than_a_claim_may_have_are_refused_when_the_worker_begins(worker: Worker) -> None:
    for n in range(101):
        worker.handler(f"k{n}")(lambda payload: None)
    with pytest.raises(ConfigError, match="101 kinds share the thread slots of this worker, and a claim has 100"):
        worker.run()


def test_kinds_with_slots_of_their_own_are_claimed_apart(worker: Worker, client: Client) -> None:
    for n in range(101):
        worker.handler(f"k{n}", concurrency=None if n else 1)(lambda payload: worker.stop())
    scheduled = client.schedule("k100")
    worker.run()
    info = client.get(scheduled.id)
    assert info is not None
    assert info.status.value == "success"
