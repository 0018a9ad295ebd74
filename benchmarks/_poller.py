"""A consumer of `polling.py`, as a process: `_poller.py URL NAME WINDOW SLOTS COST INTERVAL CALLS`.

A whole task makes all its calls under one lease. In steps, each of three is a task of its own: the first and the last
cost nothing, the middle one makes the calls; what follows a step goes back to the service, for any consumer.

A line on stdout for each task: its payload, when and where it ran, and when it ended.
"""

import json
import os
import sys
import time
from typing import Any

import leasekit

__all__: list[str] = []


def main() -> None:
    url, name, window, slots, cost, interval, calls = sys.argv[1:]
    client = leasekit.connect(url, worker=name)
    worker = leasekit.Worker(client, concurrency=int(slots), window="auto" if window == "auto" else int(window))

    def poll(payload: dict[str, Any], held: leasekit.Lease) -> dict[str, Any]:
        began_at = payload.get("began_at") or held.checkpoint or time.time()
        if held.executions == 1:
            held.progress(began_at)
        time.sleep(float(cost))
        if held.executions < int(calls):
            raise leasekit.NotYet(after=float(interval))
        return {**payload, "began_at": began_at, "consumer": name}

    def end(payload: dict[str, Any]) -> None:
        line = json.dumps({**payload, "ended_at": time.time()}) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # in one piece: other threads write too

    @worker.handler("whole")
    def whole(payload: dict[str, Any], held: leasekit.Lease) -> None:
        end(poll(payload, held))

    @worker.handler("create")
    def create(payload: dict[str, Any], held: leasekit.Lease) -> None:
        held.then("verify", {**payload, "began_at": time.time()})

    @worker.handler("verify")
    def verify(payload: dict[str, Any], held: leasekit.Lease) -> None:
        held.then("record", poll(payload, held))

    @worker.handler("record")
    def record(payload: dict[str, Any]) -> None:
        end(payload)

    with client:
        worker.run()


if __name__ == "__main__":
    main()
