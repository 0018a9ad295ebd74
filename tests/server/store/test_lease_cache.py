"""What the writer knows of leases without reading: never anything else than what the file has."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit.server.store import Entity, Trigger, Tx
from leasekit.server.store.sqlite.lease_cache import LeaseCache
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.task import Status

IDS = [f"t{seq}" for seq in range(1, 13)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    one = SqliteStore(tmp_path / "tasks.db")
    one.open()
    with one.transaction() as tx:
        seqs = range(1, len(IDS) + 1)
        tx.add(
            [
                Entity(seq, f"t{seq}", "k", None, 2, 1.0, 1.0, None, 5, None, 60.0, None, None, None, None, b"", b"1")
                for seq in seqs
            ],
            [Trigger(seq, f"t{seq}", "k", 2, 300.0, 200.0, next_trigger_at=1.0) for seq in seqs],
        )
    yield one
    one.close()


def leased(row: Trigger, now: float) -> Trigger:
    return replace(
        row, status=Status.CLAIMED, fence=row.fence + 1, owner="w", token=f"{row.id}/{now}", next_trigger_at=now + 300.0
    )


def waiting(row: Trigger, now: float) -> Trigger:
    return replace(row, status=Status.ENQUEUED, crashes=row.crashes + 1, owner=None, next_trigger_at=now)


def claim(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.save([leased(row, now) for row in rows])


def order(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.save([replace(row, cancel_requested=True) for row in rows])


def expire(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.save([waiting(row, now) for row in rows])


def renew(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.renew([row.seq for row in rows], Status.PROCESSING, now=now, at=now)


def end(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.end([row.seq for row in rows], Status.SUCCESS, now=9.0)


def restart(tx: Tx, rows: list[Trigger], now: float) -> None:
    tx.restart_leases(now=now, shift=7.0)


MOVES: list[Callable[[Tx, list[Trigger], float], None]] = [claim, order, expire, renew, end, restart]


@pytest.mark.parametrize("seed", range(8))
def test_a_transaction_is_told_what_the_file_has(store: SqliteStore, seed: int) -> None:
    chance = random.Random(seed)
    for step in range(60):
        now = 1000.0 + step / 3
        with suppress(ZeroDivisionError), store.transaction() as tx:
            some_move(tx, chance, now)
            assert tx.triggers(IDS)
            if chance.random() < 0.2:
                raise ZeroDivisionError  # it is undone
        with store.transaction() as tx, store.view() as view:
            assert tx.triggers(IDS) == view.triggers(IDS), f"step {step}"


def some_move(tx: Any, chance: random.Random, now: float) -> None:
    rows = list(tx.triggers(chance.sample(IDS, chance.randint(1, 6))).values())
    chance.choice(MOVES)(tx, rows, now)


def test_a_lease_that_was_granted_is_not_looked_up(store: SqliteStore) -> None:
    with store.transaction() as tx:
        claim(tx, list(tx.triggers(IDS).values()), 1000.0)
    with store.transaction() as tx:
        assert statements_of(tx, lambda: tx.triggers(IDS)) == []


def test_one_that_an_earlier_server_granted_is_looked_up_once(store: SqliteStore) -> None:
    with store.transaction() as tx:
        claim(tx, list(tx.triggers(IDS).values()), 1000.0)
    store.close()
    store.open()
    with store.transaction() as tx:
        assert len(statements_of(tx, lambda: tx.triggers(IDS))) == 1
        assert statements_of(tx, lambda: tx.triggers(IDS)) == []


def test_what_is_not_leased_is_not_remembered(store: SqliteStore) -> None:
    held = LeaseCache()
    with store.transaction() as tx:
        rows = list(tx.triggers(IDS).values())
    held.keep(rows)
    assert held.find(IDS) == {}
    held.keep([leased(row, 1.0) for row in rows])
    assert held.find(IDS).keys() == set(IDS)
    held.keep([waiting(row, 1.0) for row in rows])
    assert held.find(IDS) == {}


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    held = LeaseCache(most=2)
    for seq in range(1, 6):
        held.keep([leased(Trigger(seq, f"t{seq}", "k", 2, 300.0, 200.0), 1.0)])
        assert len(held.find(IDS)) <= 2
        assert f"t{seq}" in held.find(IDS)


def statements_of(tx: Any, call: Callable[[], object]) -> list[str]:
    """What SQLite is given to do in a call."""
    driver = tx._session.driver
    seen: list[str] = []
    driver.set_trace_callback(seen.append)
    call()
    driver.set_trace_callback(None)
    return seen
