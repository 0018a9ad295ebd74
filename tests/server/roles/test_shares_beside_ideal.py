"""Fair shares beside ideal ones: at each moment, how many tasks of a key were started here, and there."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from harness.fair_queueing import FairQueueing
from leasekit.server.store import Store
from leasekit.server.store.memory import MemoryStore
from leasekit.server.store.sqlite.store import SqliteStore
from tests.sampling import in_soak, slow_after
from tests.server.roles.test_shares import Desk


class Beside:
    """A store and the ideal, with the same tasks; `worst` is by how many starts of one key they differed at most."""

    def __init__(self, store: Store) -> None:
        store.open()
        self.desk = Desk(store)
        self.ideal = FairQueueing()
        self.started = Counter[str]()
        self.worst = 0

    def put(self, counts: dict[str, int]) -> None:
        self.desk.put(counts)
        for key in (key for key, count in counts.items() for _ in range(count)):
            self.ideal.put(key)

    def take(self, limit: int) -> list[str]:
        """Claim tasks here and there; return the keys of those that were started here."""
        taken = self.desk.take(limit)
        theirs = [key for _ in taken if (key := self.ideal.take()) is not None]
        self.started.update(taken)
        self.compare({*taken, *theirs})
        return taken

    def compare(self, keys: Iterable[str]) -> None:
        self.worst = max([self.worst, *(abs(self.started[key] - self.ideal.started[key]) for key in keys)])

    def close(self) -> None:
        self.desk.store.close()


def make_store(make: Callable[..., Store], folder: Path) -> Store:
    return make(folder / "tasks.db") if make is SqliteStore else make()


@pytest.mark.soak  # by default with a backlog of 3,000 tasks
@pytest.mark.parametrize("keys", slow_after(2, [3, 100, 10_000]))
@pytest.mark.parametrize("make", [MemoryStore, SqliteStore])
def test_single_tasks_behind_a_million_are_started_as_the_ideal_starts_them(
    keys: int, make: Callable[..., Store], tmp_path: Path
) -> None:
    beside = Beside(make_store(make, tmp_path))
    beside.put({"giant": in_soak(1_000_000, by_default=3_000)})
    beside.take(100)
    beside.put({f"{number:05}": 1 for number in range(1, keys)})
    taken = [key for _ in range(keys // 50 + 1) for key in beside.take(50)]
    assert {key for key in taken if key != "giant"} == {f"{number:05}" for number in range(1, keys)}
    assert beside.worst <= 1
    beside.close()


@pytest.mark.parametrize("seed", slow_after(4, range(20)))
@pytest.mark.parametrize("make", [MemoryStore, SqliteStore])
def test_keys_that_come_and_go_are_never_three_tasks_from_the_ideal(
    seed: int, make: Callable[..., Store], tmp_path: Path
) -> None:
    chance = random.Random(seed)
    beside = Beside(make_store(make, tmp_path))
    names = [f"key-{number}" for number in range(chance.choice((3, 10, 30)))]
    for _ in range(200):
        if chance.random() < 0.4:
            beside.put({key: chance.choice((1, 1, 2, 20)) for key in chance.sample(names, chance.choice((1, 2, 3)))})
        beside.take(chance.choice((1, 1, 4)))
    assert beside.worst <= 2
    beside.close()
