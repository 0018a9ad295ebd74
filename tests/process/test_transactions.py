"""Applications that are killed at each point of a transaction with a task: the task is there if the rest is."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import leasekit
import leasekit.sqlite
from leasekit.sqlite import Relay
from tests.postgres_server import PostgresServer
from tests.waiting import eventually

pytestmark = pytest.mark.slow

APPLICATION = """
import os, signal, sys
import sqlalchemy as sa
import leasekit.{module}
from leasekit import NewTask

url, number, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
left = steps

def step(*_, **__):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

engine = sa.create_engine(url)
sa.event.listen(engine, "before_cursor_execute", step)
sa.event.listen(engine, "after_cursor_execute", step)
sa.event.listen(engine, "commit", step)
with engine.begin() as connection:
    step()
    connection.execute(sa.text("INSERT INTO customer_order VALUES (:id)"), {{"id": number}})
    leasekit.{module}.schedule(connection, NewTask(kind="confirm", id=f"order-{{number}}"))
    step()
step()
print("whole")
"""
MOST = 20
"""More steps than there are."""


def killed_at_each_step(module: str, url: str, path: Path) -> None:
    """Run the application again and again, and kill it one step later each time, until it is not killed any more."""
    script = path / "application.py"
    script.write_text(APPLICATION.format(module=module))
    for number in range(MOST):
        ran = subprocess.run(
            [sys.executable, script, url, str(number), str(number)], check=False, capture_output=True, text=True
        )
        if ran.returncode == 0:
            assert number > 4, "it was killed at some steps"
            return
        assert ran.returncode == -signal.SIGKILL, ran.stderr
    pytest.fail("the application was never whole")


def test_on_postgresql_a_task_exists_if_and_only_if_its_order_does(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.emptied()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS customer_order (id int); DELETE FROM customer_order")
    with leasekit.connect(url) as client:  # a node, which takes rows in all the time
        client.stats()
        killed_at_each_step("postgres", url.replace("postgresql://", "postgresql+psycopg://"), tmp_path)
        with psycopg.connect(url) as connection:
            orders = {f"order-{number}" for (number,) in connection.execute("SELECT id FROM customer_order")}
        assert orders
        eventually(lambda: len(client.list_tasks().tasks) == len(orders))
        assert {task.id for task in client.list_tasks().tasks} == orders


def test_on_sqlite_a_task_exists_if_and_only_if_its_order_does(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE customer_order (id int)")
        connection.commit()
    with leasekit.connect(f"sqlite:///{tmp_path / 'tasks.db'}") as client, Relay(path, client):
        killed_at_each_step("sqlite", f"sqlite:///{path}", tmp_path)
        with closing(sqlite3.connect(path)) as connection:
            orders = {f"order-{number}" for (number,) in connection.execute("SELECT id FROM customer_order")}
        assert orders
        eventually(lambda: len(client.list_tasks().tasks) == len(orders))
        assert {task.id for task in client.list_tasks().tasks} == orders


def test_a_relay_that_is_killed_leaves_each_task_once(tmp_path: Path) -> None:
    """`leasekit relay`, killed at random moments, while an application goes on."""
    path, store = tmp_path / "app.db", f"sqlite:///{tmp_path / 'tasks.db'}"
    with closing(sqlite3.connect(path)) as connection, leasekit.connect(store) as client:
        client.stats()
        for round_ in range(6):
            with connection:
                tasks = [leasekit.NewTask(kind="k", id=f"{round_}-{number}") for number in range(50)]
                leasekit.sqlite.schedule(connection, tasks)
            command = [sys.executable, "-m", "leasekit", "relay", str(path), "--backend", store]
            relay = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})
            assert relay.stdout is not None
            relay.stdout.readline()
            if round_ == 5:
                eventually(lambda: connection.execute("SELECT count(*) FROM leasekit_outbox").fetchone() == (0,))
                relay.terminate()
                assert relay.wait(30) == 0
            else:
                if round_ > 2:
                    eventually(lambda: client.stats().kinds.get("k"))
                relay.kill()
                relay.wait()
            relay.stdout.close()
        assert client.stats().kinds == {"k": {"new": 300}}
