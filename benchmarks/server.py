"""The server alone: schedules, claims, beats and results a second, in requests of 1, 10, 100 and 500 items.

The client does as little as possible (prepared bodies over 16 plain connections), so the time is the server's:
HTTP, validation, rules, store, and commits with FULL sync.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from _common import Bench, Caller, Server

CONNECTIONS = 16
_encode = msgspec.json.encode
_decode = msgspec.json.decode


def main() -> None:
    bench = Bench("server")
    for size, count in {10: 200}.items() if bench.quick else {1: 1_500, 10: 10_000, 100: 20_000, 500: 20_000}.items():
        if bench.wants(str(size)):
            runs = [asyncio.run(_measured(size, count)) for _ in range(bench.repeat)]
            for call in runs[0]:
                rates = [run[call][0] for run in runs]
                bench.note(
                    f"{call} by {size}",
                    items_per_second=round(statistics.median(rates)),
                    server_cpu_us_per_item=round(statistics.median(run[call][1] for run in runs), 1),
                    all=[round(rate) for rate in rates],
                )
    bench.close()


async def _measured(size: int, count: int) -> dict[str, tuple[float, float]]:
    """Return for each call the items a second, and the server's CPU in µs an item."""
    rates: dict[str, tuple[float, float]] = {}
    with Server.running() as server:
        pool = [await Caller.connected(server.url) for _ in range(CONNECTIONS)]

        async def timed(call: str, path: str, bodies: Sequence[bytes]) -> list[Any]:
            waiting = iter(bodies)
            cpu, began = server.cpu, time.monotonic()
            answers = await asyncio.gather(*(caller.post_all(path, waiting) for caller in pool))
            passed, cpu = time.monotonic() - began, server.cpu - cpu
            rates[call] = (count / passed, 1e6 * cpu / count)
            return [_decode(answer) for of_caller in answers for answer in of_caller]

        await timed("schedules", "/v1/tasks", [_encode({"tasks": [{"kind": "nothing"}] * size})] * (count // size))
        claims = [
            {"worker": "worker", "kinds": ["nothing"], "limit": size, "wait": 5, "claim_id": str(number)}
            for number in range(count // size)
        ]
        claimed = await timed("claims", "/v1/claims", [_encode(claim) for claim in claims])
        batches = [answer["tasks"] for answer in claimed]
        assert sum(map(len, batches)) == count, f"{count} tasks were scheduled, not as many claimed"
        for call, path, name, items in (
            ("beats", "/v1/heartbeats", "beats", _each(batches, lambda task: {})),
            ("results", "/v1/results", "results", _each(batches, lambda task: {"outcome": "success"})),
        ):
            answers = await timed(call, path, [_encode({"worker": "worker", name: batch}) for batch in items])
            verdicts = {verdict["verdict"] for answer in answers for verdict in answer["verdicts"]}
            assert verdicts == {"renewed" if name == "beats" else "settled"}, verdicts
        for caller in pool:
            caller.close()
    return rates


def _each(batches: Sequence[Sequence[Any]], more: Callable[[Any], dict[str, str]]) -> list[list[dict[str, str]]]:
    return [[{"id": task["id"], "token": task["token"], **more(task)} for task in batch] for batch in batches]


if __name__ == "__main__":
    main()
