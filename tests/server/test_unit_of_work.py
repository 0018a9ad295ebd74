"""What becomes ready by one transaction."""

from random import Random

from leasekit.server.store.memory import MemoryStore
from leasekit.server.unit_of_work import NewlyDue, UnitOfWork


def readied(*told: tuple[float, int]) -> NewlyDue:
    with MemoryStore().transaction() as tx:
        turn = UnitOfWork(tx, now=100.0, instant=0.0, random=Random(1))
        for due_at, count in told:
            turn.ready("k", due_at, count=count)
        return turn.readied()["k"]


def test_what_is_due_is_counted_and_what_will_be_has_a_time() -> None:
    assert readied((100.0, 1), (99.0, 2)) == NewlyDue(3, None)
    assert readied((102.0, 1), (101.0, 1), (103.0, 1)) == NewlyDue(0, 101.0)
    assert readied((101.0, 1), (100.0, 1), (102.0, 1)) == NewlyDue(1, 101.0)


def test_two_transactions_add_up() -> None:
    assert NewlyDue(1, None) + NewlyDue(2, 5.0) == NewlyDue(3, 5.0)
    assert NewlyDue(0, 7.0) + NewlyDue(0, 5.0) == NewlyDue(0, 5.0)
