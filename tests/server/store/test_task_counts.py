"""The counts that a store keeps in memory: what a scan would find, whatever happens."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit.errors import Unavailable
from leasekit.server.store import Entity, Trigger, Tx
from leasekit.server.store.sql import listing
from leasekit.server.store.sql.statements import Statement
from leasekit.server.store.sqlite.session import SqliteSession
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.server.store.sqlite.task_counts import TaskCounts
from leasekit.server.store.sqlite.tx import COUNT_COMMIT
from leasekit.task import Status

Counts = dict[str, dict[str, int]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    one = SqliteStore(tmp_path / "tasks.db")
    one.open()
    yield one
    one.close()


def add(tx: Tx, seqs: range) -> None:
    kinds = [f"k{seq % 3}" for seq in seqs]
    tx.add(
        [
            Entity(seq, f"t{seq}", kind, None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"1")
            for seq, kind in zip(seqs, kinds, strict=True)
        ],
        [
            Trigger(seq, f"t{seq}", kind, 2, 300.0, 200.0, next_trigger_at=1.0)
            for seq, kind in zip(seqs, kinds, strict=True)
        ],
    )


def scanned(store: SqliteStore) -> Counts:
    with store.view() as view:
        return view.counts()


def no_scan(*_: object, **__: object) -> Any:
    raise AssertionError("the rows are counted again")


def replace_statement(patch: pytest.MonkeyPatch, method: str, replaced: Statement, call: Callable[..., Any]) -> None:
    """Have sessions call `call` in place of `method` for this statement."""
    run = getattr(SqliteSession, method)

    def session(self: SqliteSession, statement: Statement, **values: Any) -> Any:
        return (call if statement is replaced else run)(self, statement, **values)

    patch.setattr(SqliteSession, method, session)


def change(tx: Tx, random: random.Random) -> None:
    """Do one of the things that servers do to tasks."""
    seqs = random.sample(range(1, 200), 20)
    held: dict[str, Any] = {"owner": "w", "token": "t", "next_trigger_at": 9.0}
    rows = list(tx.triggers_of(seqs).values())
    match random.randrange(5):
        case 0:
            first = tx.allocate_seqs(5)
            add(tx, range(first, first + 5))
        case 1:
            tx.save([replace(row, status=Status.CLAIMED, ended_at=None, **held) for row in rows])
        case 2:
            leased = [row.seq for row in rows if row.owner is not None]
            tx.renew(leased, Status.PROCESSING, now=2.0, at=2.0)
        case 3:
            tx.end([row.seq for row in rows], random.choice([Status.SUCCESS, Status.DEAD]), now=3.0)
        case _:
            tx.remove(seqs[:3])


@pytest.mark.parametrize("seed", range(5))
def test_the_counts_are_those_of_a_scan(store: SqliteStore, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    with store.transaction() as tx:
        add(tx, range(1, tx.allocate_seqs(100) + 100))
    assert store.counts() == scanned(store)
    for _ in range(60):
        with suppress(RuntimeError), store.transaction() as tx:
            for _ in range(rng.randrange(4)):
                change(tx, rng)
            if rng.random() < 0.2:
                raise RuntimeError("undone")
        expected = scanned(store)
        with monkeypatch.context() as patched:
            replace_statement(patched, "rows", listing.COUNTS, no_scan)
            assert store.counts() == expected


def test_a_change_during_the_scan_is_counted_once(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.transaction() as tx:
        add(tx, range(1, 10))
    count = SqliteSession.rows

    def changed_meanwhile(session: SqliteSession, statement: Statement) -> Any:
        rows = count(session, statement)
        with store.transaction() as tx:  # not in this snapshot
            tx.end([1], Status.SUCCESS, now=3.0)
        return rows

    replace_statement(monkeypatch, "rows", listing.COUNTS, changed_meanwhile)
    assert store.counts()["k1"] == {"new": 2, "success": 1}
    monkeypatch.undo()
    assert store.counts() == scanned(store)


def test_a_transaction_in_the_snapshot_that_is_reported_late_is_counted_once() -> None:
    counts = TaskCounts()
    counts.changes[b"k", b"new"] = 2
    assert counts.read(lambda: (7, [("k", "new", 2)])) == {(b"k", b"new"): 2}
    counts.commit(7)
    assert counts.read(no_scan) == {(b"k", b"new"): 2}
    counts.commit(8)
    assert counts.read(no_scan) == {(b"k", b"new"): 4}


def test_a_transaction_of_unknown_result_makes_the_store_count_again(store: SqliteStore) -> None:
    with store.transaction() as tx:
        add(tx, range(1, 4))
    store.counts()

    def fails(*_: object, **__: object) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    def end(seq: int) -> None:
        with store.transaction() as tx:
            tx.end([seq], Status.SUCCESS, now=3.0)

    with pytest.MonkeyPatch.context() as patched:
        replace_statement(patched, "run", COUNT_COMMIT, fails)
        with pytest.raises(Unavailable):
            end(1)
    assert store.counts() == scanned(store) == {"k1": {"new": 1}, "k2": {"new": 1}, "k0": {"new": 1}}
    for seq in (1, 2, 3):
        end(seq)
        assert store.counts() == scanned(store)
    with pytest.MonkeyPatch.context() as patched:
        replace_statement(patched, "rows", listing.COUNTS, no_scan)
        store.counts()


def test_a_failed_scan_fails_its_reader_only() -> None:
    counts = TaskCounts()
    with pytest.raises(AssertionError):
        counts.read(no_scan)
    counts.commit(1)
    assert counts.read(lambda: (1, [("k", "new", 2)])) == {(b"k", b"new"): 2}


def test_damaged_text_is_counted(store: SqliteStore) -> None:
    with store.transaction() as tx:
        add(tx, range(1, 4))
    driver = sqlite3.connect(store.url.removeprefix("sqlite:///") if store.url else "")
    driver.execute("UPDATE trigger SET kind = CAST(x'ff' AS TEXT), status = CAST(x'fe' AS TEXT) WHERE seq = 1")
    driver.commit()
    driver.close()
    assert store.counts() == scanned(store)
    with store.transaction() as tx:
        tx.triggers_of([1])  # sets the task aside
    assert store.counts() == scanned(store)
