"""The cost of access tokens for a server: CPU time of a schedule, a claim and a heartbeat, beside a server without.

The cases take turns within each round, so that changes of the machine's load hit all of them: a server without tokens,
twice; one that is asked with a token for all kinds; and one with a token for some kinds, which looks up the kind of
each task that a request names, and of each lease at its first heartbeat.
"""

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

import leasekit
from _common import Bench, Caller, Server, stored_in
from leasekit.tokens import Scope

_encode, _decode = msgspec.json.encode, msgspec.json.decode
_ROUNDS = 6  # of each case, in a run
_BARE = "no token"
_TOKENS: dict[str, list[str] | None] = {
    _BARE: None,
    "no token, again": None,
    "a token for all kinds": ["*"],
    "a token for ten kinds": ["k", *(f"other{number}.*" for number in range(9))],
}
_SCOPES: Sequence[Scope] = ("submit", "work")
_Costs = dict[tuple[str, str], list[float]]


class Case(NamedTuple):
    """A server, and the token with which it is asked."""

    server: Server
    token: str | None
    claim_ids: Iterator[int]


def main() -> None:
    bench = Bench("access")
    count = 100 if bench.quick else 500
    costs: _Costs = {}
    with ExitStack() as stack:
        cases = {name: _begun(stack, kinds) for name, kinds in _TOKENS.items()}
        for _ in range(bench.repeat * (1 if bench.quick else _ROUNDS)):
            for name, case in cases.items():
                for call, cpu in asyncio.run(_measured(case, count)).items():
                    costs.setdefault((call, name), []).append(cpu)
    for (call, name), values in costs.items():
        if bench.wants(f"{call}, {name}"):
            # Each round is compared with its neighbour in time.
            of_bare = statistics.median(
                value / max(bare, 1.0) for value, bare in zip(values, costs[call, _BARE], strict=True)
            )
            bench.note(
                f"{call}, {name}",
                server_cpu_us_per_request=round(statistics.median(values), 1),
                of_bare=round(of_bare, 3),
            )
    bench.close()


def _begun(stack: ExitStack, kinds: list[str] | None) -> Case:
    store, token = stack.enter_context(stored_in()), None
    if kinds is not None:
        with leasekit.connect(store) as client:
            token = client.create_token("bench", scopes=_SCOPES, kinds=kinds).secret
    return Case(stack.enter_context(Server.running(store)), token, itertools.count())


def _cpu_of(server: Server) -> float:
    """Return the µs of CPU that a server's threads have used: finer than the ticks of `Server.cpu`."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e3


async def _measured(case: Case, count: int) -> dict[str, float]:
    """Return for each call the server's CPU in µs a request."""
    costs: dict[str, float] = {}
    caller = await Caller.connected(case.server.url, token=case.token)

    async def timed(call: str, path: str, bodies: Sequence[bytes]) -> list[bytes]:
        before = _cpu_of(case.server)
        answers = await caller.post_all(path, bodies)
        costs[call] = (_cpu_of(case.server) - before) / len(bodies)
        return answers

    await timed("a schedule of one", "/v1/tasks", [_encode({"tasks": [{"kind": "k"}]})] * count)
    claims = [{"worker": "w", "kinds": ["k"], "limit": 1, "claim_id": f"{next(case.claim_ids)}"} for _ in range(count)]
    answers = await timed("a claim of one", "/v1/claims", [_encode(claim) for claim in claims])
    tasks = [task for answer in answers for task in _decode(answer)["tasks"]]
    beats = [{"id": task["id"], "token": task["token"]} for task in tasks]
    one = [_encode({"worker": "w", "beats": [beat]}) for beat in beats]
    await timed("a first heartbeat of one", "/v1/heartbeats", one)
    await timed("a heartbeat of one", "/v1/heartbeats", one)
    hundreds = [_encode({"worker": "w", "beats": beats[at : at + 100]}) for at in range(0, len(beats), 100)]
    await timed("a heartbeat of a hundred", "/v1/heartbeats", hundreds * 20)
    results = [{"worker": "w", "results": [{**beat, "outcome": "success"}]} for beat in beats]
    await caller.post_all("/v1/results", [_encode(result) for result in results])
    caller.close()
    return costs


if __name__ == "__main__":
    main()
