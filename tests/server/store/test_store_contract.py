"""What every store does, row for row."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from leasekit.server.store import (
    Anchor,
    Checkpoint,
    ClaimMemory,
    Content,
    Dedupe,
    DrainRow,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindDeclaration,
    KindRow,
    Lane,
    Limits,
    MinuteRow,
    Run,
    Store,
    Trigger,
    Tx,
)
from leasekit.task import Status

START = (-1.0, -1)


@pytest.fixture
def store(make_store: Callable[[], Store]) -> Iterator[Store]:
    one = make_store()
    one.open()
    yield one
    one.close()


def entity(seq: int, **more: Any) -> Entity:
    fields: dict[str, Any] = {
        "seq": seq,
        "id": f"t{seq}",
        "kind": "k",
        "collection": None,
        "priority": 2,
        "created_at": 1.5,
        "at": 2.5,
        "max_attempts": None,
        "max_crashes": 5,
        "max_runtime": None,
        "enqueue_timeout": 60.0,
        "retry": None,
        "expiry": None,
        "dedupe_key": None,
        "traceparent": None,
        "digest": b"",
        "payload": b"null",
    }
    return Entity(**fields | more)


def trigger(seq: int, **more: Any) -> Trigger:
    one = Trigger(seq, f"t{seq}", "k", 2, 300.0, 30.0, next_trigger_at=2.5)
    return replace(one, **more)


def add(store: Store, *triggers: Trigger, **more: Any) -> None:
    with store.transaction() as tx:
        tx.allocate_seqs(len(triggers))
        tx.add([entity(t.seq, kind=t.kind, priority=t.priority, **more) for t in triggers], triggers)


def run(seq: int, fence: int, **more: Any) -> Run:
    fields: dict[str, Any] = {
        "seq": seq,
        "fence": fence,
        "attempt": 1,
        "outcome": "retry",
        "at": 3.5,
        "worker": "w",
        "claimed_at": 1.5,
        "started_at": None,
        "heartbeat_at": 2.5,
        "token": f"token-{fence}",
        "digest": b"\x00d",
        "result": b"1",
        "error": None,
    }
    return Run(**fields | more)


def test_what_was_added_is_found_as_it_was(store: Store) -> None:
    full = entity(
        1,
        collection="c",
        payload=b'"\\u0000\xc3\xa4"',
        max_attempts=3,
        max_runtime=9.5,
        retry=b"{}",
        dedupe_key=" key",
        traceparent="00-ab",
        digest=b"\xff\x00",
    )
    row = trigger(
        1, status=Status.PROCESSING, fence=2**40, attempt=3, crashes=1, failures=2, cancel_requested=True, owner="w"
    )
    with store.transaction() as tx:
        tx.add([full], [row])
    with store.view() as view:
        assert view.entities([1, 9]) == {1: full}
        assert view.creation_times([1, 9]) == {1: full.created_at}
    with store.transaction() as tx:
        assert tx.digests([1, 9]) == {1: b"\xff\x00"}
        assert tx.triggers(["t1", "nobody"]) == {"t1": row}
        assert tx.triggers_of([1, 9]) == {1: row}
        assert tx.limits([1, 9]) == {1: Limits(3, 5, b"{}")}
        assert tx.contents([1, 9]) == {1: Content(full.payload, "c", "00-ab", None)}
        assert tx.content_size([1, 9]) == len(full.payload)
        found = tx.triggers(["t1"])["t1"]
        assert type(found.status) is Status
        assert type(found.cancel_requested) is bool


def test_numbers_are_given_out_once_and_grow_after_a_restart_too(store: Store, make_store: Callable[[], Store]) -> None:
    with store.transaction() as tx:
        first = tx.allocate_seqs(3)
        second = tx.allocate_seqs(1)
        assert second == first + 3
        tx.add([entity(second)], [trigger(second)])
    store.close()
    again = make_store()
    again.open()
    with again.transaction() as tx:
        assert tx.allocate_seqs(1) > second
    again.close()


def test_an_id_is_taken_once(store: Store) -> None:
    add(store, trigger(1))
    with pytest.raises(Exception, match=r"t1|UNIQUE|keys"), store.transaction() as tx:
        tx.add([entity(2, id="t1")], [trigger(2, id="t1")])
    with store.transaction() as tx:
        assert tx.triggers_of([1, 2]).keys() == {1}


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    add(store, trigger(1), trigger(2, owner="w", status=Status.CLAIMED))
    with store.transaction() as tx:
        tx.set_progress({1: Checkpoint(b"1", 1, 0)})
        tx.set_dedupes([Dedupe("k", "key", "t1", None)])
        tx.add_runs([run(1, 1)])

    def everything() -> Any:
        with store.transaction() as tx:
            return (
                tx.triggers(["t1", "t2", "t3"]),
                tx.contents([1, 2, 3]),
                tx.runs([1, 2]),
                tx.dedupes([("k", "key"), ("k", "new")]),
                tx.claim_memories([("w", "c")]),
                tx.lanes(["k"]),
            )

    before = everything()

    def change_everything() -> None:
        with store.transaction() as tx:
            tx.add([entity(3)], [trigger(3)])
            tx.save([trigger(1, status=Status.SUCCESS, next_trigger_at=None)])
            tx.renew([2], Status.PROCESSING, now=100, at=100)
            tx.restart_leases(now=1000, shift=1.0)
            tx.set_anchor(Anchor("boot", 1.0, 2.0))
            tx.end([2], Status.SUCCESS, now=9.0)
            tx.set_progress({1: Checkpoint(b"2", 1, 0), 2: Checkpoint(b"3", 1, 0)})
            tx.forget_runs([(1, 1)])
            tx.add_runs([run(1, 2), run(2, 1)])
            tx.dedupes([("k", "key")])
            tx.set_dedupes([Dedupe("k", "key", "t2", 5.0), Dedupe("k", "new", "t2", None)])
            tx.remember_claims([ClaimMemory("w", "c", 1.0, 0.5, [(1, "t")])])
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        change_everything()
    assert everything() == before


def test_what_was_saved_is_found(store: Store) -> None:
    add(store, trigger(1), trigger(2))
    changed = [
        trigger(1, status=Status.CLAIMED, fence=1, attempt=1, owner="w", token="t", next_trigger_at=9.0),
        trigger(2, status=Status.DEAD, crashes=6, failures=1, next_trigger_at=None, reason="why"),
    ]
    with store.transaction() as tx:
        tx.save(changed)
        tx.save([])
    with store.transaction() as tx:
        assert list(tx.triggers_of([1, 2]).values()) == changed


def test_a_renewal_gives_each_its_own_timeout(store: Store) -> None:
    rows = [trigger(n, heartbeat_timeout=10.0 * n, owner="w", status=Status.CLAIMED) for n in (1, 2, 3)]
    add(store, *rows)
    with store.transaction() as tx:
        tx.renew([1, 2], Status.PROCESSING, now=100.0, at=100.0)
        tx.renew([], Status.CLAIMED, now=200.0, at=200.0)
        found = tx.triggers_of([1, 2, 3])
    assert [(row.status, row.next_trigger_at) for row in found.values()] == [
        (Status.PROCESSING, 110.0),
        (Status.PROCESSING, 120.0),
        (Status.CLAIMED, 2.5),
    ]


def test_a_renewal_brings_no_end_nearer(store: Store) -> None:
    add(store, trigger(1, owner="w", status=Status.CLAIMED, token="t", next_trigger_at=400.0))
    with store.transaction() as tx:
        tx.save(list(tx.triggers_of([1]).values()))  # what the writer has written last, it does not read
        for now, until in ((100.0, 400.0), (380.0, 410.0), (375.0, 410.0)):
            tx.renew([1], Status.PROCESSING, now=now, at=now)
            for found in (tx.triggers_of([1])[1], tx.triggers(["t1"])["t1"]):
                assert (found.status, found.next_trigger_at) == (Status.PROCESSING, until)


def test_a_renewal_notes_when_it_came_and_the_first_of_a_handler_when_that_began(store: Store) -> None:
    add(store, trigger(1, owner="w", status=Status.CLAIMED, token="t", claimed_at=90.0))
    times: list[tuple[float | None, ...]] = []
    with store.transaction() as tx:
        for at, status in ((100.5, Status.CLAIMED), (110.5, Status.PROCESSING), (120.5, Status.PROCESSING)):
            tx.renew([1], status, now=at - 3, at=at)
            stored, kept = tx.triggers_of([1])[1], tx.triggers(["t1"])["t1"]
            assert stored == kept
            times.append((kept.claimed_at, kept.started_at, kept.heartbeat_at))
    assert times == [(90.0, None, 100.5), (90.0, 110.5, 110.5), (90.0, 110.5, 120.5)]


def test_an_end_leaves_the_counts_and_nothing_due(store: Store) -> None:
    counted: dict[str, Any] = {"fence": 4, "attempt": 3, "crashes": 1, "failures": 1}
    held = trigger(1, owner="w", token="t", cancel_requested=True, status=Status.PROCESSING, **counted)
    add(store, held, trigger(2))
    with store.transaction() as tx:
        tx.end([1], Status.SUCCESS, now=9.0)
        tx.end([], Status.CANCELLED, now=9.0)
    with store.transaction() as tx:
        found = tx.triggers_of([1, 2])
        assert found == {
            1: trigger(1, status=Status.SUCCESS, next_trigger_at=None, ended_at=9.0, **counted),
            2: trigger(2),
        }
        assert tx.expired(now=1e9, limit=9) == []


def test_lanes_say_when_their_first_is_due(store: Store) -> None:
    add(
        store,
        trigger(1, priority=3, next_trigger_at=50.0),
        trigger(2, priority=3, next_trigger_at=40.0),
        trigger(3, kind="b", priority=0, next_trigger_at=60.0),
        trigger(4, kind="other"),
        trigger(5, kind="b", owner="w", status=Status.CLAIMED),
        trigger(6, kind="b", status=Status.SUCCESS, next_trigger_at=None),
    )
    with store.transaction() as tx:
        assert tx.lanes(["k", "b", "nothing"]) == [Lane(0, "b", 60.0), Lane(3, "k", 40.0)]
        assert tx.lanes([]) == []


def test_a_lane_gives_what_is_due_from_where_it_was_read(store: Store) -> None:
    add(
        store,
        trigger(1, next_trigger_at=30.0),
        trigger(2, next_trigger_at=10.0),
        trigger(3, next_trigger_at=10.0),
        trigger(4, next_trigger_at=20.0),
        trigger(5, next_trigger_at=5.0, owner="w", status=Status.CLAIMED),
        trigger(6, next_trigger_at=5.0, kind="b"),
        trigger(7, next_trigger_at=5.0, priority=1),
    )
    lane = Lane(2, "k", 10.0)
    with store.transaction() as tx:

        def seqs(now: float, after: tuple[float, int], limit: int) -> list[int]:
            return [row.seq for row in tx.ready(lane, now=now, after=after, limit=limit)]

        assert seqs(20.0, START, 10) == [2, 3, 4]
        assert seqs(19.9, START, 10) == [2, 3]
        assert seqs(100.0, START, 2) == [2, 3]
        assert seqs(100.0, (10.0, 2), 10) == [3, 4, 1]
        assert seqs(100.0, (10.0, 3), 1) == [4]
        assert seqs(100.0, (30.0, 1), 10) == []


def test_expired_are_leases_whose_end_has_come(store: Store) -> None:
    leased: dict[str, Any] = {"owner": "w", "status": Status.CLAIMED}
    add(
        store,
        trigger(1, next_trigger_at=10.0, **leased),
        trigger(2, next_trigger_at=5.0, **leased | {"status": Status.PROCESSING}),
        trigger(3, next_trigger_at=11.0, **leased),
        trigger(4, next_trigger_at=1.0),
    )
    with store.transaction() as tx:
        assert [row.seq for row in tx.expired(now=10.0, limit=10)] == [2, 1]
        assert [row.seq for row in tx.expired(now=10.0, limit=1)] == [2]


LEASED: dict[str, Any] = {"owner": "w", "token": "t", "status": Status.PROCESSING, "heartbeat_timeout": 30.0}


def expired(tx: Tx, now: float) -> list[int]:
    return [row.seq for row in tx.expired(now=now, limit=10)]


def followed(tx: Tx, now: float) -> None:
    tx.follow_leases(now=now, limit=10)


def not_followed(tx: Tx, now: float) -> None:
    """Leave the leases where they are."""


@pytest.mark.parametrize("follow", [followed, not_followed])
def test_a_renewed_lease_ends_at_its_new_end(store: Store, follow: Callable[[Tx, float], None]) -> None:
    add(store, trigger(1, next_trigger_at=50.0, **LEASED), trigger(2, next_trigger_at=55.0, **LEASED))
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=40.0, at=40.0)
    for now, ended in ((49.9, []), (50.0, []), (55.0, [2]), (69.9, [2])):
        with store.transaction() as tx:
            follow(tx, now)
            assert expired(tx, now) == ended, now
    with store.transaction() as tx:
        follow(tx, 70.0)
        assert sorted(expired(tx, 70.0)) == [1, 2]
        assert [row.next_trigger_at for row in tx.triggers_of([1, 2]).values()] == [70.0, 55.0]


@pytest.mark.parametrize("follow", [followed, not_followed])
def test_a_lease_that_is_renewed_again_and_again_never_ends(store: Store, follow: Callable[[Tx, float], None]) -> None:
    add(store, trigger(1, next_trigger_at=30.0, **LEASED))
    for now in range(10, 200, 10):
        with store.transaction() as tx:
            follow(tx, now)
            assert expired(tx, now) == []
            tx.renew([1], Status.PROCESSING, now=now, at=now)
    with store.transaction() as tx:
        assert expired(tx, 219.9) == []
        assert expired(tx, 220.0) == [1]


@pytest.mark.parametrize("followed_at", [[40.0, 45.0], [100.0], [40.0, 100.0]])
def test_expired_leases_that_were_renewed_are_sorted_by_their_ends(store: Store, followed_at: list[float]) -> None:
    ends = {1: 10.0, 2: 60.0, 3: 12.0, 4: 55.0, 5: 11.0}
    add(store, *(trigger(seq, next_trigger_at=until, **LEASED) for seq, until in ends.items()))
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=35.0, at=35.0)  # until 65
        tx.renew([3], Status.PROCESSING, now=28.0, at=28.0)  # until 58
    for now in followed_at:
        with store.transaction() as tx:
            tx.follow_leases(now=now, limit=10)
    with store.transaction() as tx:
        assert expired(tx, 100.0) == [5, 4, 3, 2, 1]
        assert [row.seq for row in tx.expired(now=100.0, limit=2)] == [5, 4]
        assert expired(tx, 58.0) == [5, 4, 3]


def test_a_few_leases_are_sorted_at_a_time(store: Store) -> None:
    add(store, *(trigger(seq, next_trigger_at=10.0 + seq, **LEASED) for seq in range(1, 6)))
    with store.transaction() as tx:
        tx.renew([1, 2, 3, 4, 5], Status.PROCESSING, now=40.0, at=40.0)
    for now in (50.0, 51.0, 52.0):
        with store.transaction() as tx:
            tx.follow_leases(now=now, limit=2)
            assert expired(tx, now) == []
            assert {row.next_trigger_at for row in tx.triggers_of(range(1, 6)).values()} == {70.0}
    with store.transaction() as tx:
        assert expired(tx, 70.0) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("follow", [followed, not_followed])
@pytest.mark.parametrize("until", [45.0, 90.0])
def test_a_lease_that_was_renewed_and_then_saved_ends_as_it_was_saved(
    store: Store, until: float, follow: Callable[[Tx, float], None]
) -> None:
    add(store, trigger(1, next_trigger_at=30.0, **LEASED))
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=40.0, at=40.0)  # until 70
        follow(tx, 40.0)
        saved = trigger(1, next_trigger_at=until, **LEASED)
        tx.save([saved])
    with store.transaction() as tx:
        follow(tx, 44.0)
        assert tx.triggers_of([1]) == {1: saved}
        assert expired(tx, until - 0.1) == []
        assert expired(tx, until) == [1]


def test_a_renewed_lease_that_is_given_back_is_due_when_it_was_saved_to_be(store: Store) -> None:
    add(store, trigger(1, next_trigger_at=30.0, **LEASED))
    waiting = trigger(1, status=Status.ENQUEUED, next_trigger_at=41.0)
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=40.0, at=40.0)
        tx.save([waiting])
        tx.follow_leases(now=100.0, limit=10)
    with store.transaction() as tx:
        assert tx.triggers_of([1]) == {1: waiting}
        assert tx.lanes(["k"]) == [Lane(2, "k", 41.0)]
        assert expired(tx, 1e9) == []
        claimed = replace(waiting, **LEASED | {"next_trigger_at": 60.0})
        tx.save([claimed])
        tx.follow_leases(now=60.0, limit=10)
        assert expired(tx, 60.0) == [1]


def test_a_renewed_lease_whose_task_has_ended_is_no_lease(store: Store) -> None:
    add(store, trigger(1, next_trigger_at=30.0, **LEASED))
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=40.0, at=40.0)
        tx.end([1], Status.SUCCESS, now=41.0)
    with store.transaction() as tx:
        tx.follow_leases(now=100.0, limit=10)
        assert tx.triggers_of([1])[1].next_trigger_at is None
        assert expired(tx, 1e9) == []


@pytest.mark.parametrize("follow", [followed, not_followed])
def test_a_restart_counts_from_the_renewed_end(store: Store, follow: Callable[[Tx, float], None]) -> None:
    held = LEASED | {"claim_timeout": 100.0}
    add(store, trigger(1, next_trigger_at=30.0, **held), trigger(2, next_trigger_at=30.0, was_extended=True, **held))
    with store.transaction() as tx:
        tx.renew([1], Status.PROCESSING, now=40.0, at=40.0)  # until 70
        follow(tx, 40.0)
        tx.restart_leases(now=50.0, shift=20.0)  # the first gets all of its ttl, the other one only moves
        tx.renew([1], Status.PROCESSING, now=60.0, at=60.0)  # brings no end nearer
        follow(tx, 50.0)
    with store.transaction() as tx:
        ends = [row.next_trigger_at for row in tx.triggers_of([1, 2]).values()]
        assert ends == [pytest.approx(150.1), 50.0]
        assert expired(tx, 149.0) == [2]
        assert expired(tx, 151.0) == [2, 1]
        tx.renew([1], Status.PROCESSING, now=200.0, at=200.0)  # until 230
        tx.restart_leases(now=210.0, shift=0.0)
        follow(tx, 210.0)
        assert expired(tx, 309.0) == [2]


def test_a_restart_gives_every_lease_the_longer_of_its_ttls_and_spreads_the_ends(store: Store) -> None:
    rows = [
        trigger(1, owner="w", status=Status.CLAIMED, next_trigger_at=50.0),
        trigger(2, owner="w", status=Status.PROCESSING, next_trigger_at=50.0),
        trigger(3, owner="w", status=Status.PROCESSING, next_trigger_at=5000.0),
        trigger(4, next_trigger_at=50.0),
        trigger(150, owner="w", status=Status.PROCESSING, next_trigger_at=50.0),
    ]
    add(store, *rows)
    with store.transaction() as tx:
        tx.restart_leases(now=100.0, shift=0.0)
        found = {seq: row.next_trigger_at for seq, row in tx.triggers_of([1, 2, 3, 4, 150]).items()}
    assert found == {
        1: pytest.approx(100 + 300 * 1.001),
        2: pytest.approx(100 + 300 * 1.002),
        3: pytest.approx(100 + 300 * 1.003),
        4: 50.0,
        150: pytest.approx(100 + 300 * 1.05),
    }


@pytest.mark.parametrize(
    ("next_trigger_at", "shift", "until"),
    [(50.0, 7.5, 57.5), (150.0, -7.5, 142.5), (50.0, None, 400.3), (5000.0, 7.5, 400.3)],
    ids=["ended", "ends later", "clocks unknown", "damaged"],
)
def test_a_lease_that_a_restart_has_extended_is_extended_again_once_it_was_renewed(
    store: Store, next_trigger_at: float, shift: float | None, until: float
) -> None:
    extended = trigger(1, owner="w", status=Status.PROCESSING, next_trigger_at=next_trigger_at, was_extended=True)
    add(store, extended)
    with store.transaction() as tx:
        tx.restart_leases(now=100.0, shift=shift)
        assert tx.triggers_of([1])[1].next_trigger_at == pytest.approx(until)
        tx.renew([1], Status.PROCESSING, now=200.0, at=200.0)
        tx.restart_leases(now=300.0, shift=shift)
        assert tx.triggers_of([1])[1].next_trigger_at == pytest.approx(600.3)


@pytest.mark.parametrize(("shift", "moved"), [(7.5, 57.5), (-7.5, 42.5), (None, None)])
def test_a_restart_moves_the_ends_of_runs_that_are_ahead(
    store: Store, shift: float | None, moved: float | None
) -> None:
    held = {"status": Status.PROCESSING, "owner": "w", "max_runtime": 60.0, "next_trigger_at": 50.0}
    add(store, trigger(1, run_until=50.0, **held), trigger(2, run_until=0.0, **held), trigger(3, **held), trigger(4))
    with store.transaction() as tx:
        tx.restart_leases(now=100.0, shift=shift)
        rows = tx.triggers_of([1, 2, 3, 4])
    assert [rows[seq].run_until for seq in (1, 2, 3, 4)] == [moved, 0.0, None, None]


@pytest.mark.parametrize("make_store", ["memory", "sqlite"], indirect=True)  # nodes sign in instead
def test_an_anchor_is_kept_with_what_was_written_by_it(store: Store) -> None:
    first, second = Anchor("a", 0.1 + 0.2, 1_700_000_000.3), Anchor("b", 1.0, 2.0)
    with store.transaction() as tx:
        assert tx.anchor() is None
        tx.set_anchor(first)
        tx.set_progress({})
        tx.set_dedupes([Dedupe("k", "key", "t", None)])
    with suppress(ZeroDivisionError), store.transaction() as tx:
        assert tx.anchor() == first
        tx.set_anchor(second)
        tx.set_dedupes([Dedupe("k", "other", "t", None)])
        raise ZeroDivisionError
    with store.transaction() as tx:
        assert tx.anchor() == first


def test_the_latest_progress_is_kept(store: Store) -> None:
    add(store, trigger(1), trigger(2))
    with store.transaction() as tx:
        tx.set_progress({1: Checkpoint(b"1", 1, 0), 2: Checkpoint(b"2", 1, 0)})
        tx.set_progress({1: Checkpoint(b"3", 1, 2, 7.5)})
    with store.view() as view:
        assert view.progress([1, 2, 9]) == {1: Checkpoint(b"3", 1, 2, 7.5), 2: Checkpoint(b"2", 1, 0)}
    with store.transaction() as tx:
        assert tx.progress_marks([1, 2, 9]) == {1: (1, 2), 2: (1, 0)}
        assert tx.contents([1])[1].progress == b"3"
        assert tx.content_size([1]) == len(tx.contents([1])[1].payload) + 1


def test_runs_are_kept_by_fence_and_told_without_their_values(store: Store) -> None:
    add(store, trigger(1), trigger(2))
    with store.transaction() as tx:
        tx.add_runs([run(1, 2), run(1, 1), run(2, 1, result=None, digest=None, worker=None)])
        assert sorted(tx.runs([1]), key=lambda one: one.fence) == [run(1, 1, result=None), run(1, 2, result=None)]
        tx.forget_runs([(1, 2)])
        tx.add_runs([run(1, 2, outcome="success")])
    with store.view() as view:
        both = [run(1, 1), run(1, 2, outcome="success")]
        assert view.last_runs([1], limit=5) == {1: both}
        assert view.last_runs([2, 9, 1], limit=1) == {
            1: both[1:],
            2: [run(2, 1, result=None, digest=None, worker=None)],
        }
        assert view.last_runs([], limit=1) == {}


def test_a_fence_has_one_run(store: Store) -> None:
    add(store, trigger(1))
    with pytest.raises(Exception, match=r"run|UNIQUE"), store.transaction() as tx:
        tx.add_runs([run(1, 1), run(1, 1)])


def test_the_first_of_a_dedupe_key_is_replaced(store: Store) -> None:
    keys = [("k", "ü"), ("k", "2"), ("x", "2"), *((f"{n}", "x") for n in range(1000))]
    with store.transaction() as tx:
        tx.set_dedupes([Dedupe("k", "ü", "a", None), Dedupe("k", "2", "b", 5.0)])
        tx.set_dedupes([Dedupe("k", "2", "c", 9.0)])
    with store.transaction() as tx:
        assert tx.dedupes(keys) == {
            ("k", "ü"): Dedupe("k", "ü", "a", None),
            ("k", "2"): Dedupe("k", "2", "c", 9.0),
        }
        tx.set_dedupes([Dedupe("k", "ü", "d", 7.0)])
    with store.view() as view:
        assert view.dedupes(keys) == {
            ("k", "ü"): Dedupe("k", "ü", "d", 7.0),
            ("k", "2"): Dedupe("k", "2", "c", 9.0),
        }


def test_claims_are_remembered_and_forgotten(store: Store) -> None:
    old, new = ClaimMemory("w", "c1", 1.0, 0.5, [(1, "t"), (2, "u")]), ClaimMemory("w", "c2", 2.0, 0.0, [])
    with store.transaction() as tx:
        tx.remember_claims([old, new])
    with store.transaction() as tx:
        assert tx.claim_memories([("w", "c1"), ("w", "c2"), ("v", "c1")]) == {("w", "c1"): old, ("w", "c2"): new}
        assert tx.forget_claims(before=2.0, limit=5) == 1
        assert tx.claim_memories([("w", "c1"), ("w", "c2")]).keys() == {("w", "c2")}


def test_a_page_goes_by_the_order_in_which_tasks_came(store: Store) -> None:
    add(store, trigger(1), trigger(2, kind="b"), collection="c")
    add(store, trigger(3, owner="w", status=Status.CLAIMED), trigger(4))

    with store.view() as view:

        def seqs(after: int = 0, limit: int = 10, until: int | None = None, **wanted: Any) -> list[int]:
            return [row.seq for row in view.page(Filter(**wanted), after=after, limit=limit, until=until)]

        assert seqs() == [1, 2, 3, 4]
        assert seqs(after=1, limit=2) == [2, 3]
        assert seqs(after=4, limit=2, newest=True) == [3, 2]
        assert seqs(kind="k") == [1, 3, 4]
        assert seqs(collection="c") == [1, 2]
        assert seqs(status=Status.NEW, kind="k") == [1, 4]
        assert seqs(worker="w") == [3]
        assert seqs(collection="c", kind="b", status=Status.NEW) == [2]
        assert seqs(until=2) == [1, 2]
        assert seqs(after=4, until=2, newest=True, kind="k") == [3]
        assert [view.next_seq(after=after, newest=False) for after in (0, 3, 4)] == [1, 4, None]
        assert [view.next_seq(after=after, newest=True) for after in (9, 3, 1)] == [4, 2, None]


def test_counts_and_holders(store: Store) -> None:
    add(store, trigger(1), trigger(2), trigger(3, kind="b", owner="w", status=Status.CLAIMED))
    add(
        store,
        trigger(4, owner="w", status=Status.PROCESSING, heartbeat_timeout=20.0),
        trigger(5, status=Status.DEAD, next_trigger_at=None),
    )
    with store.view() as view:
        assert view.counts() == {"k": {"new": 2, "processing": 1, "dead": 1}, "b": {"claimed": 1}}
        assert view.holders() == {"w": Holding(2, 20.0, frozenset("bk"))}


def test_a_view_sees_what_was_committed(store: Store) -> None:
    add(store, trigger(1))
    with store.view() as view:
        assert view.triggers(["t1"]).keys() == {"t1"}
        assert view.entities([1])[1] == entity(1)


def test_the_latest_moment_is_that_of_the_last_task_or_claim(store: Store) -> None:
    with store.transaction() as tx:
        assert tx.latest_time() == 0.0
        tx.add([entity(1, created_at=10.0), entity(2, created_at=20.0)], [trigger(1), trigger(2)])
        assert tx.latest_time() == 20.0
        tx.remember_claims([ClaimMemory("w", "c", 30.0, 0.5, [(1, "t")])])
        assert tx.latest_time() == 30.0


def test_touching_changes_nothing(store: Store) -> None:
    add(store, trigger(1))
    with store.transaction() as tx:
        tx.probe_write()
    with store.view() as view:
        assert view.triggers(["t1"]) == {"t1": trigger(1)}


# Ended tasks


def add_ended(store: Store, *ends: float, **more: Any) -> None:
    """Tasks 1, 2, …, which ended at these times."""
    fields: dict[str, Any] = {"status": Status.SUCCESS, "next_trigger_at": None}
    add(store, *(trigger(seq, ended_at=at, **fields | more) for seq, at in enumerate(ends, 1)))


def test_ended_tasks_of_some_kinds_or_of_all_others_are_found_the_oldest_first(store: Store) -> None:
    over: dict[str, Any] = {"status": Status.DEAD, "next_trigger_at": None}
    ends = [("a", 5.0), ("b", 3.0), ("a", 3.0), ("c", 9.0), ("b", 4.0)]
    add(store, *(trigger(n, kind=kind, ended_at=at, **over) for n, (kind, at) in enumerate(ends, start=1)))

    def found(*kinds: str, others: bool = False, until: float = 9.0, after: Ending = Ending(0, 0)) -> list[int]:  # noqa: B008
        with store.view() as view:
            return [end.seq for end in view.ended_of(kinds, others=others, until=until, after=after, limit=3)]

    assert (found("a"), found("a", "c"), found()) == ([3, 1], [3, 1, 4], [])
    assert (found("a", others=True), found(others=True)) == ([2, 5, 4], [2, 3, 5])
    assert found("a", "b", until=4.0, after=Ending(3.0, 2)) == [3, 5]
    with store.view() as view:
        further = [view.end_further(until=5.0, after=Ending(3.0, 2), skip=skip) for skip in range(4)]
    assert further == [3.0, 4.0, 5.0, None]


def test_settings_of_kinds_are_found_by_their_change_and_undone_with_their_transaction(store: Store) -> None:
    for number, (kind, settings) in enumerate([("b", b"{}"), ("a", b"1"), ("b", None)]):
        with store.transaction() as tx:
            tx.set_kind(kind, settings, at=float(number), by="ada" if number else None)
    with store.transaction() as tx:
        last = tx.last_kind_change()
    with suppress(ZeroDivisionError), store.transaction() as tx:
        tx.set_kind("c", b"{}", at=1.0, by=None)
        raise ZeroDivisionError
    with store.transaction() as tx:
        assert tx.last_kind_change() == last
    rows = [KindRow("a", b"1", 1.0, "ada", last - 1), KindRow("b", None, 2.0, "ada", last)]
    with store.view() as view:
        assert view.kinds() == rows
        assert view.kinds(after=last - 1) == rows[1:]
        assert view.kinds(after=last) == []


def test_what_code_declared_is_kept_and_noted_again_without_a_change_of_the_kind(store: Store) -> None:
    with store.transaction() as tx:
        tx.set_kind("a", b"{}", at=1.0, by="ada", declaration=KindDeclaration(b"1", "x y", 1.0))
    with store.transaction() as tx:
        last = tx.last_kind_change()
    row = KindRow("a", b"{}", 1.0, "ada", last, b"1", "x y", 1.0)
    for digests, noted in (("y", row), ("x y", row._replace(declared_at=9.0))):
        with store.transaction() as tx:
            tx.note_kind("a", digests, at=9.0)
            assert tx.last_kind_change() == last
        with store.view() as view:
            assert view.kinds() == [noted]
    assert noted.declaration == KindDeclaration(b"1", "x y", 9.0)


def test_drains_are_counted_as_changes_and_undone_with_their_transaction(store: Store) -> None:
    rows = [DrainRow("a", 1.0, None), DrainRow("b", 2.0, "é")]
    with store.transaction() as tx:
        before = tx.last_kind_change()
        tx.set_drain(rows[0]._replace(at=0.5, by="x"))
    for row in reversed(rows):
        with store.transaction() as tx:
            tx.set_drain(row)
    with suppress(ZeroDivisionError), store.transaction() as tx:
        tx.remove_drain("a")
        raise ZeroDivisionError
    with store.view() as view:
        assert view.drains() == rows
    with store.transaction() as tx:
        tx.remove_drain("a")
        tx.remove_drain("unknown")
    with store.transaction() as tx:
        assert tx.drains() == rows[1:]
        assert tx.last_kind_change() > before


def test_gates_are_counted_as_changes_and_undone_with_their_transaction(store: Store) -> None:
    rows = [
        GateRow("collection", "b", "drop", None, None, 1.0, None),
        GateRow("kind", "b", "pause", 5.0, "é", 2.0, "a"),
    ]
    with store.transaction() as tx:
        before = tx.last_kind_change()
    for row in (rows[1]._replace(mode="drop"), *rows):
        with store.transaction() as tx:
            tx.set_gate(row)
    with suppress(ZeroDivisionError), store.transaction() as tx:
        tx.remove_gate("kind", "b")
        raise ZeroDivisionError
    with store.view() as view:
        assert view.gates() == rows
    with store.transaction() as tx:
        tx.remove_gate("collection", "b")
        tx.remove_gate("kind", "unknown")
    with store.transaction() as tx:
        assert tx.gates() == rows[1:]
        assert tx.last_kind_change() > before


def test_parked_tasks_are_found_by_collection_the_longest_due_first(store: Store) -> None:
    parked = [("c", 3.0, 1), ("c", 1.0, 2), ("other", 2.0, 3), ("c", 1.0, 4)]
    with store.transaction() as tx:
        tx.park(parked)
        tx.park([("c", 2.0, 4)])
    with suppress(ZeroDivisionError), store.transaction() as tx:
        tx.unpark([1, 2])
        raise ZeroDivisionError
    with store.view() as view:
        assert view.parked_tasks([1, 4, 5]) == {1: 3.0, 4: 2.0}
    with store.transaction() as tx:
        assert tx.parked("c", limit=2) == [(1.0, 2), (2.0, 4)]
        tx.unpark([2, 5])
        assert tx.parked("c", limit=9) == [(2.0, 4), (3.0, 1)]


def test_ended_tasks_are_found_by_their_end_the_oldest_first(store: Store) -> None:
    add_ended(store, 5.0, 3.0, 3.0, 9.0)
    add(store, trigger(5), trigger(6, status=Status.CLAIMED, owner="w", token="t"))

    with store.view() as view:
        first = view.ended(Filter(), until=5.0, after=Ending(0, 0), limit=2)
        assert first == [(3.0, 2), (3.0, 3)]
        assert view.ended(Filter(), until=5.0, after=first[-1], limit=2) == [(5.0, 1)]
        assert view.ended(Filter(), until=5.0, after=first[0], limit=9) == [(3.0, 3), (5.0, 1)]
        assert view.count_ended(Filter(), until=5.0) == {"k": {"success": 3}}


def test_ended_tasks_are_chosen_by_kind_and_status(store: Store) -> None:
    ended: dict[str, Any] = {"next_trigger_at": None, "ended_at": 1.0}
    one, two = trigger(1, status=Status.DEAD, **ended), trigger(2, status=Status.CANCELLED, **ended)
    add(store, one, two, trigger(3, status=Status.DEAD, kind="other", **ended))

    with store.view() as view:
        for wanted, seq in ((Filter("k", Status.DEAD), 1), (Filter(status=Status.CANCELLED), 2), (Filter("other"), 3)):
            assert [end.seq for end in view.ended(wanted, until=1.0, after=Ending(0, 0), limit=9)] == [seq]
            assert sum(view.count_ended(wanted, until=1.0)[("k", "k", "k", "other")[seq]].values()) == 1


def test_a_removed_task_leaves_nothing(store: Store) -> None:
    add_ended(store, 1.0, 1.0)
    with store.transaction() as tx:
        tx.add_runs([run(1, 1), run(1, 2), run(2, 1)])
        tx.set_progress({1: Checkpoint(b"1", 1, 1), 2: Checkpoint(b"2", 1, 1)})
    with store.transaction() as tx:
        tx.remove([1, 77])
    with store.transaction() as tx:
        assert tx.triggers(["t1", "t2"]).keys() == {"t2"}
        assert tx.triggers_of([1, 2]).keys() == {2}
        assert tx.entities([1, 2]).keys() == {2}
        assert tx.progress([1, 2]).keys() == {2}
        assert {run.seq for run in tx.runs([1, 2])} == {2}
        assert tx.count_ended(Filter(), until=9.0) == tx.counts() == {"k": {"success": 1}}
        assert [row.seq for row in tx.page(Filter(), after=0, limit=9)] == [2]
    add(store, trigger(1))  # its id and its number are free again


def test_a_dedupe_key_goes_with_its_task_and_not_with_an_earlier_one(store: Store) -> None:
    ended: dict[str, Any] = {"status": Status.SUCCESS, "next_trigger_at": None, "ended_at": 1.0}
    for seq, key in ((1, "own"), (2, "taken over"), (3, "taken over")):
        add(store, trigger(seq, **ended), dedupe_key=key)
    keys = [("k", "own"), ("k", "taken over"), ("other", "own")]
    with store.transaction() as tx:
        tx.set_dedupes([Dedupe("k", "own", "t1", None), Dedupe("k", "taken over", "t3", 5.0)])
        tx.set_dedupes([Dedupe("other", "own", "t9", None)])
    with store.transaction() as tx:
        tx.remove([1, 2])
    with store.transaction() as tx:
        assert tx.dedupes(keys).keys() == {("k", "taken over"), ("other", "own")}


def test_a_failed_transaction_removes_nothing(store: Store) -> None:
    add_ended(store, 1.0, 1.0)
    with suppress(ZeroDivisionError), store.transaction() as tx:
        tx.remove([1])
        raise ZeroDivisionError
    with store.view() as view:
        assert [row.seq for row in view.page(Filter(), after=0, limit=9)] == [1, 2]


def test_answers_of_claims_are_dropped_a_few_at_a_time(store: Store) -> None:
    with store.transaction() as tx:
        tx.remember_claims([ClaimMemory("w", f"c{n}", float(n), 0.0, []) for n in range(5)])
    with store.transaction() as tx:
        assert [tx.forget_claims(before=3.0, limit=2) for _ in range(3)] == [2, 1, 0]
        assert tx.claim_memories([("w", f"c{n}") for n in range(5)]).keys() == {("w", "c3"), ("w", "c4")}


def test_a_node_writes_a_minute_once_and_old_minutes_go_a_few_at_a_time(store: Store) -> None:
    rows = [MinuteRow(at, kind, node, b"[]") for at in (1, 2, 3) for kind in ("a", "b") for node in ("n", "m")]
    with store.transaction() as tx:
        tx.add_minutes(rows)
        tx.add_minutes([row for row in rows if (row.at, row.node) == (3, "m")])  # a repeat, after a lost answer
        tx.add_minutes([])
    with store.view() as view:
        assert sorted(view.minutes(since=2)) == sorted(row for row in rows if row.at >= 2)
        assert sorted(view.minutes(since=0, kind="b")) == sorted(row for row in rows if row.kind == "b")
    with store.transaction() as tx:
        tx.forget_minutes(before=3, limit=1)
    with store.view() as view:
        assert {row.at for row in view.minutes(since=0)} == {2, 3}
