"""The cost of open pages of the web console: the server's CPU at a steady load, beside a server without pages.

A page behaves as in a browser: it follows a stream, and asks for itself again with each pulse. All pages are read by
this process, on one of the same cores. So the server gets the same tasks a second in all cases, fewer than it could
take: at full speed the readers' own work would slow the callers down, and smaller batches cost more CPU a life. The
cases take turns within each round, each with a server of its own.
"""

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from _common import Bench, Caller, Server

_encode, _decode = msgspec.json.encode, msgspec.json.decode
_CALLERS = 8
_BATCH = 10  # tasks of a request
_RATE = 2000  # lives a second, of all callers
_BARE = "no page"
_PAGES = {
    _BARE: None,
    "no page, again": None,
    "the overview": ("/console/", "pulse"),
    "the live page": (None, "events"),
}


def main() -> None:
    bench = Bench("pages")
    pages, batches = (5, 4) if bench.quick else (100, 200)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _PAGES}
    for _ in range(bench.repeat):
        for name, page in _PAGES.items():
            found[name].append(asyncio.run(_measured(page, pages, batches)))
    for name, values in found.items():
        if bench.wants(name):
            pairs = list(zip(values, found[_BARE], strict=True))
            bench.note(
                name if _PAGES[name] is None else f"{name}, {pages} times",
                lives_per_second=round(statistics.median(rate for rate, _ in values)),
                server_cpu=round(statistics.median(cpu for _, cpu in values), 3),
                more_cpu=round(statistics.median(cpu - bare for (_, cpu), (_, bare) in pairs), 3),
            )
    bench.close()


async def _measured(page: tuple[str | None, str] | None, pages: int, batches: int) -> tuple[float, float]:
    """Return the lives a second, and the part of a core that the server has used."""
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
        used = (server.cpu - before) / passed
        for reader in readers:
            assert not reader.done(), "a page has lost its stream"
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for caller in callers:
            caller.close()
    return lives / passed, used


async def _live(caller: Caller, batches: int, ids: "itertools.count[int]") -> None:
    """Schedule, claim and settle tasks, some at a time, at a steady pace."""
    schedule = _encode({"tasks": [{"kind": "k"}] * _BATCH})
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(batches):
        await asyncio.sleep(began + number * _CALLERS * _BATCH / _RATE - loop.time())
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
