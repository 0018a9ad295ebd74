"""A Celery task that leaves its place to a canvas whose last task is the same: that one runs, and its result counts."""

import random
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from celery.contrib.testing.worker import start_worker

import leasekit_celery
from tests.sampling import in_soak

_PATIENCE = 60.0  # seconds; never waited out where things work


class Shop:
    """An app whose task leaves its place to a random canvas that ends with this task."""

    def __init__(self) -> None:
        self.app = celery.Celery("canvas", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(task_default_queue="canvas", broker_transport_options={"polling_interval": 0.01})
        leasekit_celery.install(self.app, "memory://")

        @self.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
        def part() -> int:
            return 1

        @self.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
        def place(task: Any, before: str, seed: int) -> str:
            if before == "end":
                return f"the end of {seed}"
            if before == "retry" and not task.request.retries:
                task.retry(countdown=0)
            if before == "replace":
                task.replace(place.si("nothing", seed))
            task.replace(self.draw(random.Random(seed), place.si("end", seed)))
            raise AssertionError

        self.part, self.place = part, place

    def draw(self, rng: random.Random, last: Any) -> Any:
        """Draw a canvas that ends with this task."""
        canvas = last
        for _ in range(rng.randint(1, 3)):
            parts = [self.part.si() for _ in range(rng.randint(1, 3))]
            heads = [parts[0], celery.group(parts), celery.chord(parts, self.part.si())]
            canvas = celery.chain(rng.choice(heads), canvas)
        return canvas


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    with start_worker(shop.app, pool="solo", perform_ping_check=False, shutdown_timeout=_PATIENCE):
        yield shop
    shop.app.Task.leases.close()


@pytest.mark.soak  # sample: each tenth
def test_a_task_may_leave_its_place_to_any_canvas_that_ends_with_it(shop: Shop) -> None:
    for before in ["nothing", "retry", "replace"] * in_soak(100, by_default=10):
        seed = random.randrange(1 << 32)
        print(before, seed)
        assert shop.place.delay(before, seed).get(timeout=_PATIENCE, interval=0.01) == f"the end of {seed}"
