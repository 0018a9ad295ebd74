"""A server that answers whatever a test wants, on a plain socket."""

import asyncio
import contextlib
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest

from leasekit_http import HttpBackend

pytest.register_assert_rewrite("leasekit.testing.contract")

_ENDS = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)  # of a connection
Behaviour = Callable[["Stranger"], Awaitable[None]]


class Stranger:
    """One connection, seen from the server that misbehaves; what came before is in `request`."""

    def __init__(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, body: bytes, *, status: str = "200 OK", headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode() + body)

    def reset(self) -> None:
        """Break off with a RST instead of a FIN."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _one_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return head + await reader.readexactly(int(length[1]) if length else 0)


@asynccontextmanager
async def serving(behave: Behaviour, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port at which a server does `behave` with each connection."""

    connections: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(*_ENDS):
            await behave(Stranger(await _one_request(reader), writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in filter(None, connections):  # since Python 3.12 the server waits for them
            connection.cancel()
        await server.wait_closed()


@asynccontextmanager
async def _meet(behave: Behaviour, *, timeout: float = 30.0) -> AsyncIterator[HttpBackend]:
    async with serving(behave) as port:
        backend = HttpBackend(f"http://127.0.0.1:{port}", worker="w", timeout=timeout)
        try:
            yield backend
        finally:
            await backend.aclose()


class Meet(Protocol):
    def __call__(self, behave: Behaviour, *, timeout: float = 30.0) -> AbstractAsyncContextManager[HttpBackend]: ...


@pytest.fixture
def meet() -> Meet:
    """`async with meet(behave) as backend`: a backend whose server does `behave` with each connection."""
    return _meet


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {}


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port on which nobody listens: bound, so that nobody else takes it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
