"""Redrives of the server: a damaged task fails alone, a redrive is an event, and none is made on a full disk."""

import sqlite3
from pathlib import Path

import pytest

import leasekit
from leasekit import Client
from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.store.memory import MemoryStore
from leasekit.task import NewTask, Settlement
from leasekit.wire import RedriveRequest


def dead(client: Client, *ids: str) -> None:
    for task_id in ids:
        client.schedule("k", id=task_id, max_attempts=1)
    for task in client.tasks("k", until_idle=0):
        with leasekit.lease(task) as held:
            held.fail("boom")


def test_a_task_whose_payload_is_damaged_stays_dead_and_fails_no_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with leasekit.connect(url) as client:
        dead(client, "a", "bad", "b")
    with sqlite3.connect(tmp_path / "tasks.db") as file:
        file.execute("UPDATE task SET payload = ? WHERE id = 'bad'", (b"{no json",))
    file.close()
    with leasekit.connect(url) as client:
        for is_dry_run, word in ((True, "redrivable"), (False, "redriven")):
            verdicts = client.redrive(kind="k", dry_run=is_dry_run).tasks
            assert [(verdict.id, verdict.verdict) for verdict in verdicts] == [
                ("a", word),
                ("bad", "failed"),
                ("b", word),
            ]
            assert "its payload is not JSON" in (verdicts[1].reason or "")
        assert client.stats().kinds == {"k": {"dead": 1, "enqueued": 2}}


@pytest.mark.anyio
async def test_a_redrive_is_an_event_and_needs_room_on_the_disk() -> None:
    async with Engine(MemoryStore()) as engine:
        stream = engine.feed.follow(kind=None, task="a", after=None)
        await anext(stream)
        await engine.schedule([NewTask(kind="k", id="a")])
        claimed = await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
        await engine.results("w", [Settlement(id="a", token=claimed.tasks[0].token, outcome="fatal")])
        engine.room.lack = "the disk is almost full"
        with pytest.raises(Unavailable, match="almost full"):
            await engine.operations.redrive(RedriveRequest(ids=["a"]))
        assert [
            v.verdict for v in (await engine.operations.redrive(RedriveRequest(ids=["a"], dry_run=True))).tasks
        ] == ["redrivable"]
        engine.room.lack = None
        await engine.operations.redrive(RedriveRequest(ids=["a"]))
        seen = b""
        while b"redriven" not in seen:
            seen += await anext(stream)
        await stream.aclose()
    assert b'"event":"redriven"' in seen
    assert b'"status":"enqueued"' in seen
