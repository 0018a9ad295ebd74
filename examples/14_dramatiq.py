"""Dramatiq: a message that is delivered twice runs once. One line turns it on.

    pip install dramatiq && python examples/14_dramatiq.py

The broker is Dramatiq's own in memory, so that this runs without one; with Redis or RabbitMQ it is the same.
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
broker.enqueue(message)  # as a broker does that believes its worker to be dead
broker.join("default")
worker.stop()

print(runs)
assert runs == ["order-7"]
