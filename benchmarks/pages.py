"""The cost of open pages of the web console: lives of tasks a second, and the server's CPU, beside a server without.

A page behaves as in a browser: it follows a stream, and asks for itself again with each pulse. All pages are read by
this process, whose own work is not counted in the server's CPU, but takes time from one of the cores. The cases take
turns within each round, each with a server of its own.
"""

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from _common import Bench, Caller, Server

_encode, _decode = msgspec.json.encode, msgspec.json.decode
_ROUNDS = 5
_CALLERS = 8
_BATCH = 10  # tasks of a request
_BARE = "no page"
_PAGES = {
    _BARE: None,
    "no page, again": None,
    "the overview": ("/console/", "pulse"),
    "the live page": (None, "events"),
}


def main() -> None:
    bench = Bench("pages")
    pages, batches = (5, 4) if bench.quick else (100, 250)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _PAGES}
    for _ in range(bench.repeat * (1 if bench.quick else _ROUNDS)):
        for name, page in _PAGES.items():
            found[name].append(asyncio.run(_measured(page, pages, batches)))
    for name, values in found.items():
        if bench.wants(name):
            pairs = list(zip(values, found[_BARE], strict=True))
            bench.note(
                name if _PAGES[name] is None else f"{name}, {pages} times",
                lives_per_second=round(statistics.median(rate for rate, _ in values)),
                rate_of_bare=round(statistics.median(rate / bare for (rate, _), (bare, _) in pairs), 3),
                server_cpu_us_per_life=round(statistics.median(cpu for _, cpu in values), 1),
                cpu_of_bare=round(statistics.median(cpu / max(bare, 1.0) for (_, cpu), (_, bare) in pairs), 3),
            )
    bench.close()


async def _measured(page: tuple[str | None, str] | None, pages: int, batches: int) -> tuple[float, float]:
    """Return the lives a second, and the server's CPU in µs a life."""
    with Server.running() as server:
        readers: list[asyncio.Task[None]] = []
        if page is not None:
            readers = [asyncio.create_task(_read(server.url, *page)) for _ in range(pages)]
            await asyncio.sleep(1)
        callers = [await Caller.connected(server.url) for _ in range(_CALLERS)]
        ids = itertools.count()
        loop = asyncio.get_running_loop()
        before, began = server.cpu, loop.time()
        await asyncio.gather(*(_live(caller, batches, ids) for caller in callers))
        lives, passed = _CALLERS * batches * _BATCH, loop.time() - began
        cost = 1e6 * (server.cpu - before) / lives
        for reader in readers:
            assert not reader.done(), "a page has lost its stream"
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for caller in callers:
            caller.close()
    return lives / passed, cost


async def _live(caller: Caller, batches: int, ids: "itertools.count[int]") -> None:
    """Schedule, claim and settle tasks, some at a time."""
    schedule = _encode({"tasks": [{"kind": "k"}] * _BATCH})
    for _ in range(batches):
        claim = {"worker": "w", "kinds": ["k"], "limit": _BATCH, "wait": 5, "claim_id": f"{next(ids)}"}
        await caller.post_all("/v1/tasks", [schedule])
        (answer,) = await caller.post_all("/v1/claims", [_encode(claim)])
        results = [
            {"id": task["id"], "token": task["token"], "outcome": "success"} for task in _decode(answer)["tasks"]
        ]
        await caller.post_all("/v1/results", [_encode({"worker": "w", "results": results})])


async def _read(url: str, page: str | None, stream: str) -> None:
    """Follow a stream of the console, and ask for the page itself with each pulse."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"GET /console/{stream} HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head, head
    again, to_page = await asyncio.open_connection(address.hostname, address.port)
    while chunk := await reader.read(65536):
        if page is not None and b"event: pulse" in chunk:
            to_page.write(f"GET {page} HTTP/1.1\r\nhost: {address.netloc}\r\naccept: text/html\r\n\r\n".encode())
            await _body(again)


async def _body(reader: asyncio.StreamReader) -> None:
    lines: Sequence[bytes] = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    assert lines[0].split()[1] == b"200", lines[0]
    length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
    await reader.readexactly(length)


if __name__ == "__main__":
    main()
