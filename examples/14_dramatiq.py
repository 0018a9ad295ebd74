"""Dramatiq: a message that is delivered twice runs once. One line turns this on.

    pip install dramatiq && python examples/14_dramatiq.py

The broker is Dramatiq's own in memory, so that the example needs no other; with Redis or RabbitMQ the code is the same.
"""

import dramatiq
from dramatiq.brokers.stub import StubBroker

import leasekit_dramatiq

broker = StubBroker()
broker.add_middleware(leasekit_dramatiq.Leases("memory://shop"))  # the line; redis:// or http:// for several processes

runs: list[str] = []


@dramatiq.actor(broker=broker)
def charge(order: str) -> None:
    runs.append(order)


worker = dramatiq.Worker(broker, worker_timeout=100)
worker.start()
message = charge.send("order-7")
broker.join("default")
broker.enqueue(message)  # like a broker that takes its worker for dead
broker.join("default")
worker.stop()

print(runs)
assert runs == ["order-7"]
