"""Celery: a message that is delivered twice runs once. Two lines turn this on: the import, and `install`.

    pip install celery && python examples/13_celery.py

The broker is Celery's own in memory, so that the example needs no other; with Redis the code is the same.
"""

import threading

from celery import Celery
from celery.contrib.testing.worker import start_worker

import leasekit_celery

app = Celery("shop", broker="memory://", backend="cache+memory://")
leasekit_celery.install(app, "memory://shop")  # redis:// or http:// for several processes

runs: list[str] = []
over = threading.Event()


@app.task(acks_late=True)
def charge(order: str) -> None:
    runs.append(order)


@app.task(acks_late=True)
def last() -> None:
    over.set()


with start_worker(app, perform_ping_check=False, pool="solo"):
    charge.apply_async(["order-7"], task_id="charge-7").get(timeout=30)
    charge.apply_async(["order-7"], task_id="charge-7")  # like a broker that missed an acknowledgement
    last.delay()
    assert over.wait(30)

print(runs)
assert runs == ["order-7"]
