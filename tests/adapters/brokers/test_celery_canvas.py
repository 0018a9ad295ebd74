"""A Celery task that leaves its place to a canvas whose last task is the same: that one runs, and its result counts."""

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import celery
import pytest
from celery._state import get_current_app
from celery.app.trace import trace_task_ret

import leasekit_celery
from tests.sampling import in_soak


class Shop:
    """An app whose task leaves its place to a random canvas that ends with this task."""

    def __init__(self) -> None:
        self.app = celery.Celery("canvas", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.task_default_queue = "canvas"
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

    def work(self) -> None:
        """Run all messages, as a worker does: its start would change the logging of all tests."""
        with (
            self.app.connection_for_read() as connection,
            connection.SimpleQueue("canvas") as queue,
            suppress(queue.Empty),
        ):
            while message := queue.get(block=False):
                request = {**message.headers, "delivery_info": {}}
                coded = message.body, message.content_type, message.content_encoding
                trace_task_ret(request["task"], request["id"], request, *coded, app=self.app)
                message.ack()


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop, current = Shop(), get_current_app()
    shop.app.set_current()
    yield shop
    current.set_current()
    shop.app.Task.leases.close()


@pytest.mark.soak  # sample: each tenth
def test_a_task_may_leave_its_place_to_any_canvas_that_ends_with_it(shop: Shop) -> None:
    for before in ["nothing", "retry", "replace"] * in_soak(100, by_default=10):
        seed = random.randrange(1 << 32)
        print(before, seed)
        sent = shop.place.delay(before, seed)
        shop.work()
        assert (sent.state, sent.result) == ("SUCCESS", f"the end of {seed}")
