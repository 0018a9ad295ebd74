"""Tasks that an application schedules in transactions of its SQLite file: each exists once that has committed."""

import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import leasekit
import leasekit.sqlite
from leasekit import Client, NewTask
from leasekit.codecs import Compressed
from leasekit.errors import AccessDenied, ConfigError, Refused
from leasekit.sqlite import Relay
from leasekit.testing import faults
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.tokens import Scope, new_secret
from tests.sampling import slow_after
from tests.server.http.conftest import run
from tests.waiting import eventually

Ending = Literal["commit", "rollback"]
Put = Callable[[Path, NewTask, Ending], None]
"""Schedules a task in a transaction, and ends that."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def application(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection


def with_sqlite3(path: Path, task: NewTask, ending: Ending) -> None:
    with closing(sqlite3.connect(path)) as connection:
        leasekit.sqlite.schedule(connection, task)
        getattr(connection, ending)()


def with_a_session(path: Path, task: NewTask, ending: Ending) -> None:
    with Session(sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)) as session:
        leasekit.sqlite.schedule(session, task)
        getattr(session, ending)()


def refused(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return [why for (why,) in connection.execute("SELECT refused FROM leasekit_outbox ORDER BY number")]


def ids(client: Client) -> list[str]:
    return sorted(task.id for task in client.list_tasks().tasks)


@pytest.mark.parametrize("put", [with_sqlite3, with_a_session], ids=lambda put: put.__name__)
def test_a_task_exists_if_and_only_if_its_transaction_commits(put: Put, path: Path, client: Client) -> None:
    put(path, NewTask(kind="k", id="never", payload={"a": 1}), "rollback")
    put(path, NewTask(kind="k", id="there", payload={"a": ':name ? "quoted" \0'}), "commit")
    with Relay(path, client):
        info = eventually(lambda: client.get("there"))
    assert info.payload == {"a": ':name ? "quoted" \0'}
    assert ids(client) == ["there"]
    eventually(lambda: refused(path) == [])


def test_a_savepoint_that_is_rolled_back_takes_only_its_tasks_along(
    path: Path, client: Client, application: sqlite3.Connection
) -> None:
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="before"))
    application.execute("SAVEPOINT inner")
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="never"))
    application.execute("ROLLBACK TO inner")
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="after"))
    application.commit()
    assert Relay(path, client).deliver() == 2
    assert ids(client) == ["after", "before"]


def test_an_open_transaction_is_not_seen(path: Path, client: Client, application: sqlite3.Connection) -> None:
    relay = Relay(path, client)
    leasekit.sqlite.schedule(application, [NewTask(kind="k", id="a"), NewTask(kind="k", id="b")])
    assert relay.deliver() == 0
    application.commit()
    assert relay.deliver() == 2
    assert ids(client) == ["a", "b"]


def test_a_file_without_an_outbox_and_no_file_have_nothing_to_hand_on(path: Path, client: Client) -> None:
    assert Relay(path, client).deliver() == 0
    assert not path.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customer (id)")
    assert Relay(path, client).deliver() == 0


def test_a_row_that_is_read_twice_makes_one_task(path: Path, client: Client, application: sqlite3.Connection) -> None:
    """A relay may die between the answer of the service and the removal of the row."""
    task_id = leasekit.sqlite.schedule(application, NewTask(kind="k", payload=[1]))
    application.commit()
    (kept,) = application.execute("SELECT task FROM leasekit_outbox").fetchone()
    Relay(path, client).deliver()
    application.execute("INSERT INTO leasekit_outbox (task) VALUES (?)", [kept])
    application.commit()
    Relay(path, client).deliver()
    assert ids(client) == [task_id]
    assert refused(path) == []


DYING_RELAY = """
import os, signal, sqlite3, sys
import leasekit
from leasekit.client import Client
from leasekit.sqlite import Relay

path, url, step = sys.argv[1:]
connect, deliver = sqlite3.connect, Client.__deliver__

def die_at(what):
    if what.startswith(step):
        os.kill(os.getpid(), signal.SIGKILL)

def connected(*args, **options):
    connection = connect(*args, **options)
    connection.set_trace_callback(die_at)
    return connection

def delivered(self, *args, **options):
    die_at("before the call")
    answers = deliver(self, *args, **options)
    die_at("after the answer")
    return answers

sqlite3.connect, Client.__deliver__ = connected, delivered
with leasekit.connect(url) as client:
    relay = Relay(path, client)
    relay.deliver()
    relay.deliver()
    die_at("all is done")
"""
STEPS = slow_after(3, ["after the answer", "DELETE", "COMMIT", "before the call", "BEGIN", "UPDATE", "all is done"])


@pytest.mark.parametrize("step", STEPS)
def test_a_relay_that_is_killed_leaves_one_task_of_each_row(
    step: str, path: Path, application: sqlite3.Connection, tmp_path: Path
) -> None:
    leasekit.sqlite.schedule(application, [NewTask(kind="k", id="a"), NewTask(kind="k", id="b")])
    application.execute("INSERT INTO leasekit_outbox (task) VALUES ('bad')")
    application.commit()
    with run(f"sqlite:///{tmp_path}/tasks.db") as server:
        url = f"http://127.0.0.1:{server.port}"
        dying = subprocess.run([sys.executable, "-c", DYING_RELAY, str(path), url, step], check=False)
        assert dying.returncode == -signal.SIGKILL
        with leasekit.connect(url) as client:
            relay = Relay(path, client)
            while relay.deliver():
                pass
            assert ids(client) == ["a", "b"]
    assert len(refused(path)) == 1


def test_many_relays_hand_each_task_on_once(path: Path, client: Client, application: sqlite3.Connection) -> None:
    tasks = [NewTask(kind="k", id=f"t{number}") for number in range(300)]
    leasekit.sqlite.schedule(application, tasks)
    application.commit()
    with Relay(path, client), Relay(path, client), Relay(path, client):
        eventually(lambda: refused(path) == [])
    assert len(ids(client)) == min(300, 100)  # a page
    assert client.stats().kinds["k"]["new"] == 300


BAD = {
    "no JSON": "{",
    "no task": "[]",
    "no id": '{"kind": "k"}',
    "an unknown option": '{"kind": "k", "id": "b", "colour": "red"}',
    "a bad kind": '{"kind": "", "id": "b"}',
    "another task": '{"kind": "k", "id": "taken", "payload": 2}',
    "deep": '{"kind": "k", "id": "b", "payload": ' + 100_000 * "[" + 100_000 * "]" + "}",
    "too large": '{"kind": "k", "id": "b", "payload": "' + 5_000_000 * "x" + '"}',
    "no UTF-8": b'{"kind": "\xff", "id": "b"}',
    "empty": "",
}


@pytest.mark.parametrize("task", BAD.values(), ids=BAD.keys())
def test_a_row_that_cannot_become_a_task_is_set_aside_alone(
    task: str | bytes, path: Path, client: Client, application: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    client.schedule("k", 1, id="taken")
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="good"))
    application.execute("INSERT INTO leasekit_outbox (task) VALUES (CAST(? AS TEXT))", [task])
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="good too"))
    application.commit()
    assert Relay(path, client).deliver() == 3
    assert ids(client) == ["good", "good too", "taken"]
    (why,) = refused(path)
    assert why
    assert Relay(path, client).deliver() == 0
    assert caplog.text.count("set aside") == 1


def test_what_comes_under_the_number_of_a_row_that_is_handed_on_is_handed_on_too(
    path: Path, client: Client, faulty: Faulty, application: sqlite3.Connection
) -> None:
    """The application restores its file from a backup, or mends the row, while the service answers."""
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="before"))
    application.commit()

    async def restored(call: Call) -> Any:
        other = '{"kind": "k", "id": "after"}'
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE leasekit_outbox SET task = ? WHERE number = 1", [other])
        return await call.send()

    faulty.script("schedule", Fault("restored", restored))
    relay = Relay(path, client)
    assert (relay.deliver(), relay.deliver(), relay.deliver()) == (1, 1, 0)
    assert ids(client) == ["after", "before"]


def test_a_batch_has_few_bytes(path: Path, client: Client, application: sqlite3.Connection) -> None:
    large = "x" * 900_000
    leasekit.sqlite.schedule(application, [NewTask(kind="k", payload=large) for _ in range(12)])
    application.commit()
    relay = Relay(path, client)
    assert (relay.deliver(), relay.deliver(), relay.deliver()) == (5, 5, 2)
    assert client.stats().kinds["k"]["new"] == 12


def test_a_task_that_the_token_of_the_relay_is_not_for_is_set_aside_alone(
    path: Path, application: sqlite3.Connection, tmp_path: Path
) -> None:
    leasekit.sqlite.schedule(application, [NewTask(kind=kind) for kind in ("own", "foreign", "own")])
    application.commit()
    with run(f"sqlite:///{tmp_path}/tasks.db") as server:
        server.give_token()
        url = f"http://127.0.0.1:{server.port}"
        with leasekit.connect(url, token=server.token) as admin:
            given: dict[str, Scope] = {"reader": "read", "shop": "submit"}
            secrets = [admin.create_token(name, scopes=[given[name]], kinds=["own"]).secret for name in given]
            for secret in (secrets[0], new_secret()):  # an operator is to mend this: nothing is set aside
                with leasekit.connect(url, token=secret) as blind, pytest.raises(AccessDenied):
                    Relay(path, blind).deliver()
            assert refused(path) == [None] * 3
            with leasekit.connect(url, token=secrets[1]) as shop:
                assert Relay(path, shop).deliver() == 3
            assert admin.stats().kinds == {"own": {"new": 2}}
    (why,) = refused(path)
    assert "not for 'foreign'" in why


def test_an_outage_keeps_the_rows_and_is_one_line_of_the_log(
    path: Path, client: Client, faulty: Faulty, application: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="t"))
    application.commit()
    faulty.always("schedule", faults.refuse)
    with Relay(path, client, interval=0.001):
        eventually(lambda: "tried again" in caplog.text)
        faulty.clear()
        eventually(lambda: client.get("t"))
    assert caplog.text.count("tried again") == 1
    assert refused(path) == []


def test_a_busy_file_is_waited_for(path: Path, client: Client, application: sqlite3.Connection) -> None:
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="t"))
    application.commit()
    application.execute("BEGIN IMMEDIATE")
    with Relay(path, client):
        eventually(lambda: client.get("t"))
        application.commit()
        eventually(lambda: refused(path) == [])


def test_a_delay_counts_from_the_call(path: Path, client: Client, application: sqlite3.Connection) -> None:
    before = datetime.now(UTC)
    leasekit.sqlite.schedule(application, NewTask(kind="k", id="t", delay=3600))
    application.commit()
    after = datetime.now(UTC)
    Relay(path, client).deliver()
    info = client.get("t")
    assert info is not None
    assert before + timedelta(seconds=3599) <= info.at <= after + timedelta(seconds=3601)


def test_what_no_service_would_take_is_refused_in_the_call(application: sqlite3.Connection) -> None:
    with pytest.raises(Refused, match="item 0 does not fit"):
        leasekit.sqlite.schedule(application, NewTask(kind=""))
    assert application.execute("SELECT name FROM sqlite_master").fetchall() == []


def test_the_file_has_only_encoded_payloads(path: Path, application: sqlite3.Connection) -> None:
    codec = Compressed()
    with leasekit.connect("memory://outbox", codec=codec) as client:
        leasekit.sqlite.schedule(application, NewTask(kind="k", id="t", payload="secret" * 100), codec=codec)
        application.commit()
        assert b"secret" not in path.read_bytes()
        Relay(path, client).deliver()
        info = client.get("t")
    assert info is not None
    assert info.payload == "secret" * 100


def test_a_relay_stops_with_its_block_and_is_entered_once(path: Path, client: Client) -> None:
    relay = Relay(path, client)
    with relay:
        assert "leasekit-relay" in {thread.name for thread in threading.enumerate()}
    assert "leasekit-relay" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match="make another"), relay:
        pass


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_an_interval_is_more_than_nothing(path: Path, client: Client, interval: float) -> None:
    with pytest.raises(ConfigError, match="raise interval"):
        Relay(path, client, interval=interval)
