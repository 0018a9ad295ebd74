"""Schedule tasks in batches, repeat each batch until it is acknowledged, and end.

python -m harness.chaos.submit URL PREFIX KIND COUNT SECONDS TTL BATCH

Claims and beats of a task grant TTL or twice that, at random.
"""

import random
import sys
import time

import leasekit
from leasekit import BackendError, NewTask
from leasekit.task import FixedDelays


def main() -> None:
    url, prefix, kind, count, seconds, ttl, batch = sys.argv[1:]
    chance = random.Random(prefix)
    ttls = (float(ttl), 2 * float(ttl))
    tasks = [
        NewTask(
            id=f"{prefix}-{number}",
            kind=kind,
            payload={"seconds": float(seconds)},
            claim_timeout=chance.choice(ttls),
            heartbeat_timeout=chance.choice(ttls),
            retry=FixedDelays(waits=[0.1]),
        )
        for number in range(int(count))
    ]
    with leasekit.connect(url) as client:
        for at in range(0, len(tasks), int(batch)):
            while True:
                try:
                    client.schedule_all(tasks[at : at + int(batch)])
                    break
                except BackendError:
                    time.sleep(0.1)


if __name__ == "__main__":
    main()
