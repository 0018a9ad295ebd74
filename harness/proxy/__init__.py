"""A TCP proxy that injects network faults on demand between unchanged clients and services.

    with Proxy("http://127.0.0.1:8077") as proxy:  # in a thread of its own; `async with`: in the loop that runs
        client = leasekit.connect(proxy.url)
        proxy.lose_answer("POST", "/v1/results")   # the next report is applied, its answer lost
        proxy.answer(429, "POST", "/v1/heartbeats", retry_after=3, times=None)  # until `mend`
        proxy.slow(0.2, jitter=0.1)                # also: drip, limit, hang (half-open), cut (refuse), reset
        proxy.mend()                               # end all faults
        assert proxy.fired["lose_answer"] == 1     # the fault did happen

Any thread may add rules, and rules add up. Data on its way when the line hangs arrives when it is mended, as on a
network. `tcp://host:port` is passed on as bytes; rules about requests need `http://`.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Literal, Self
from urllib.parse import urlsplit

from anyio.from_thread import start_blocking_portal

from harness.proxy.foreign import FOREIGN
from harness.proxy.links import KEPT, Conditions, Exchange, Line, Link, Rule

__all__ = ["Exchange", "Proxy"]

_BACKLOG = 128


class Proxy:
    """Listen on a port of its own while the block lasts, and pass connections on to the service at `target`.

    A test that injects a fault should check `fired`.
    """

    def __init__(self, target: str) -> None:
        self._scheme, self._target = _place(target)
        self._conditions = Conditions()
        self.fired = self._conditions.fired  # how often each fault met a connection or request, by its name
        self.log = self._conditions.log  # the last requests, oldest first
        self._links: set[Link] = set()
        self._limit: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: socket.socket | None = None  # bound, not listening: reserves the port while connections are refused
        self._ears: socket.socket | None = None
        self._thread = ExitStack()  # of `with`: the loop in a thread of its own

    @property
    def port(self) -> int:
        assert self._port is not None, "the proxy is only open in its block"  # noqa: S101
        return int(self._port.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def slow(self, latency: float, *, jitter: float = 0.0) -> None:
        """Delay all data by `latency` seconds each way, and up to `jitter` more."""
        self._be(replace(self._conditions.line, latency=latency, jitter=jitter))

    def drip(self, every: float = 0.01) -> None:
        """Deliver answers byte by byte, one every so many seconds."""
        self._be(replace(self._conditions.line, drip=every))

    def hang(self, only: Literal["requests", "answers"] | None = None) -> None:
        """Accept and keep connections, and deliver nothing, one way or both (half-open)."""
        both = frozenset[Literal["requests", "answers"]]({"requests", "answers"})
        self._be(replace(self._conditions.line, hangs=frozenset({only}) if only else both))

    def limit(self, size: int) -> None:
        """Reset every connection, also new ones, once it has carried `size` more bytes of answers."""
        self._do(lambda: self._set_limit(size))

    def reset(self) -> None:
        """Break all connections (RST); new ones are served."""
        self._do(lambda: self._break("reset"))

    def cut(self) -> None:
        """Break all connections, and refuse new ones; refused ones are not counted."""
        self._do(self._cut)

    def move(self, target: str) -> None:
        """Lead new connections to another service; open ones stay where they are, as with DNS."""
        self._target = _place(target)[1]

    def mend(self) -> None:
        """End all faults: drop the rules, accept connections, deliver held data."""
        self._do(self._mend)

    def lose_answer(self, method: str, path: str, *, times: int | None = 1) -> None:
        """Let the next `times` of these requests (`None`: all) be executed, and reset instead of answering."""
        self._rule(Rule(fault="lose_answer", method=method, path=path, left=times))

    def repeat_answer(self, method: str, path: str, *, repeats: int = 1) -> None:
        """Deliver the answer to the next of these requests `repeats` times more, at once.

        The copies are on the client's connection before its next request leaves.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self._rule(Rule(fault="repeat_answer", method=method, path=path, repeats=repeats))

    def answer(
        self,
        status: int,
        method: str,
        path: str,
        *,
        retry_after: float | str | None = None,
        body: bytes = b"",
        times: int | None = 1,
        chance: float = 1.0,
    ) -> None:
        """Answer the next `times` of these requests (`None`: all), which do not reach the service."""
        head = [f"HTTP/1.1 {status} Scripted", f"content-length: {len(body)}"]
        if retry_after is not None:
            head.append(f"retry-after: {retry_after}")
        answer = "\r\n".join([*head, "", ""]).encode("latin-1") + body
        self._rule(Rule(fault=f"answer {status}", method=method, path=path, left=times, chance=chance, answer=answer))

    def foreign(self, method: str = "*", path: str = "*", *, times: int | None = 1) -> None:
        """Answer the next `times` of these requests (`None`: all) like an ingress, a firewall or a captive portal.

        Each answer has another status and body, and the requests go no further. "*" is any method, any path.
        """
        answers = tuple(answer.raw for answer in FOREIGN)
        self._rule(Rule(fault="foreign", method=method, path=path, left=times, answers=answers))

    async def again(self, exchange: Exchange) -> bytes:
        """Send an earlier request to the service again, as a network that delivers twice does; return the raw answer.

        Raises ValueError for requests above 16 KiB, which are not kept.
        """
        if len(exchange.raw) > KEPT:
            raise ValueError(f"{exchange.method} {exchange.path} is not kept: it had more than {KEPT} bytes")
        head, _, body = bytes(exchange.raw).partition(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection(*self._target)
        try:
            writer.write(head + b"\r\nconnection: close\r\n\r\n" + body)
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()

    async def until(self, fact: Callable[[], bool]) -> None:
        """Return once `fact()` is true, which is checked whenever data has passed or a fault has fired."""
        await self._conditions.bell.until(fact)

    def wait(self, fact: Callable[[], bool], *, within: float = 30.0) -> None:
        """`until`, for code that is not async. Raises TimeoutError."""

        async def look() -> None:
            async with asyncio.timeout(within):
                await self.until(fact)

        asyncio.run(look())

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._port = _bound(("127.0.0.1", 0))
        self._listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._deafen()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._port is not None  # noqa: S101 - `__aenter__` has made it
        self._port.close()
        self._loop = self._port = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self))
            self._thread = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.close()

    def _do(self, act: Callable[[], None]) -> None:
        """Call `act` in the proxy's loop, and wait until it has returned."""
        assert self._loop is not None, "the proxy is only open in its block"  # noqa: S101
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                act()
                return

        async def call() -> None:
            act()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _be(self, line: Line) -> None:
        self._conditions.line = line
        self._conditions.bell.ring()

    def _rule(self, rule: Rule) -> None:
        if self._scheme != "http":
            raise ValueError(f"{rule.fault!r} is about requests: give the target as http://host:port")
        self._conditions.rules.append(rule)

    def _set_limit(self, size: int | None) -> None:
        self._limit = size
        for link in self._links:
            link.left = size

    def _break(self, fault: str) -> None:
        for link in self._links:
            self._conditions.fire(fault)
            link.reset()

    def _cut(self) -> None:
        self._deafen()
        self._break("cut")

    def _mend(self) -> None:
        self._conditions.rules.clear()
        self._set_limit(None)
        self._be(Line())
        if self._ears is None:
            self._listen()

    def _listen(self) -> None:
        assert self._loop is not None  # noqa: S101 - `__aenter__` has set it
        self._ears = _bound(("127.0.0.1", self.port))
        self._ears.listen(_BACKLOG)
        self._loop.add_reader(self._ears, self._accept)

    def _deafen(self) -> None:
        assert self._loop is not None  # noqa: S101
        if self._ears is not None:
            self._loop.remove_reader(self._ears)
            self._ears.close()
            self._ears = None

    def _accept(self) -> None:
        assert self._loop is not None  # noqa: S101
        with suppress(OSError):  # the client closed before it was accepted
            assert self._ears is not None  # noqa: S101
            connection, _ = self._ears.accept()
            task = self._loop.create_task(self._carry(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        client = await asyncio.open_connection(sock=connection)
        try:
            service = await asyncio.open_connection(*self._target)
        except OSError:
            self._conditions.fire("unreachable")
            client[1].transport.abort()
            return
        link = Link(client, service, self._conditions, is_http=self._scheme == "http")
        link.left = self._limit
        self._links.add(link)
        try:
            await link.carry()
        finally:
            self._links.discard(link)


def _place(target: str) -> tuple[str, tuple[str, int]]:
    parts = urlsplit(target)
    if parts.scheme not in ("http", "tcp") or not parts.hostname or not parts.port:
        raise ValueError(f"{target!r} is no address of a service: write http://host:port or tcp://host:port")
    return parts.scheme, (parts.hostname, parts.port)


def _bound(address: tuple[str, int]) -> socket.socket:
    """Bind a socket; a second one of this process may share the port, and no other process gets it."""
    # With the protocol named, asyncio sets TCP_NODELAY on accepted sockets: no answer waits 40 ms for a delayed ACK.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.settimeout(0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(address)
    return bound
