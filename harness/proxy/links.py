"""A connection through a proxy, and the faults that hit it."""

import asyncio
import socket
import struct
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

import h11

from harness.proxy.framing import Framing, Piece
from leasekit.testing._notify import Notifier

Way = Literal["requests", "answers"]

_CHUNK = 65536
KEPT = 16384  # bytes of a request that are kept, so that it can be sent again
_RST = struct.pack("ii", 1, 0)  # SO_LINGER: closing drops unsent data and resets the connection


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """A request that arrived, and its answer."""

    method: str  # the HTTP method
    path: str  # the path of the request
    at: float  # when the request arrived, by `time.monotonic()`
    fault: str = ""  # the fault that hit the request, as in `lose_answer` or `answer 503`; empty: none
    status: int | None = None  # the status of the answer, the proxy's or the service's; `None` while there is none
    raw: bytearray = field(default_factory=bytearray, repr=False)  # the first 16 KiB of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The state of the line for all data."""

    latency: float = 0.0
    jitter: float = 0.0
    drip: float | None = None  # seconds between single bytes of answers
    hangs: frozenset[Way] = frozenset()


@dataclass(slots=True, kw_only=True, eq=False)
class Rule:
    """A fault of certain requests: the proxy answers them, or the service's answer is lost or repeated."""

    fault: str
    method: str
    path: str
    left: int | None = 1  # how many more requests it hits; None: all
    chance: float = 1.0
    answer: bytes = b""
    answers: tuple[bytes, ...] = ()  # one of these at random, instead of `answer`
    repeats: int = 0  # copies of the service's answer

    def meets(self, exchange: Exchange) -> bool:
        return self.method in ("*", exchange.method) and self.path in ("*", exchange.path) and self.left != 0


class Conditions:
    """The rules and the line that all connections of one proxy share, and the faults that have fired."""

    def __init__(self) -> None:
        self.random = Random(0)  # noqa: S311 - chance, not secrets
        self.line = Line()
        self.rules: list[Rule] = []
        self.fired: Counter[str] = Counter()
        self.log: deque[Exchange] = deque(maxlen=10_000)
        self.bell = Notifier()

    def fire(self, fault: str) -> None:
        self.fired[fault] += 1
        self.bell.ring()

    def rule_for(self, exchange: Exchange) -> Rule | None:
        """Take the first rule that hits this request, and count it as used once more."""
        for rule in self.rules:
            if rule.meets(exchange) and self.random.random() < rule.chance:
                rule.left = None if rule.left is None else rule.left - 1
                exchange.fault = rule.fault
                return replace(rule, answer=self.random.choice(rule.answers)) if rule.answers else rule
        return None


class Link:
    """A client's connection and its connection to the service."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        service: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        conditions: Conditions,
        *,
        is_http: bool,
    ) -> None:
        self._client, self._to_client = client
        self._service, self._to_service = service
        self._conditions = conditions
        self._is_http = is_http
        self._open: deque[tuple[Exchange, Rule | None]] = deque()  # not yet answered in full
        self.left: int | None = None  # bytes of answers until the link is reset

    async def carry(self) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._requests())
                both.create_task(self._answers())
            self._to_client.close()
            self._to_service.close()
        except* (OSError, h11.RemoteProtocolError):  # one side is gone, or does not speak HTTP
            self.reset()
        except* asyncio.CancelledError:
            self.reset()
            raise

    def reset(self) -> None:
        """Break the connection for both sides (RST), unless it has ended."""
        for writer in (self._to_client, self._to_service):
            with suppress(OSError):  # the socket is closed
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            writer.transport.abort()

    async def _requests(self) -> None:
        framing = Framing(h11.SERVER)
        while data := await self._client.read(_CHUNK):
            for piece in framing.feed(data) if self._is_http else [Piece(data=data)]:
                await self._request(piece)
        await self._gate("requests")
        self._to_service.write_eof()

    async def _request(self, piece: Piece) -> None:
        if piece.start:
            method, target = piece.start
            exchange = Exchange(method=method, path=target.partition("?")[0], at=time.monotonic())
            self._open.append((exchange, self._conditions.rule_for(exchange)))
            self._conditions.log.append(exchange)
        newest, rule = self._open[-1] if self._open else (None, None)
        if newest and len(newest.raw) <= KEPT:
            newest.raw += piece.data
        if rule is None or not rule.answer:
            await self._pass(piece.data, "requests")
        elif piece.ends and newest:
            self._open.pop()
            newest.status = int(rule.answer.split(b" ", 2)[1])
            self._conditions.fire(rule.fault)
            await self._pass(rule.answer, "answers")

    async def _answers(self) -> None:
        framing = Framing(h11.CLIENT)
        whole = bytearray()  # an answer that will be repeated
        while data := await self._service.read(_CHUNK):
            for piece in framing.feed(data) if self._is_http else [Piece(data=data)]:
                exchange, rule = self._open[0] if self._open else (None, None)
                if exchange and piece.start:
                    exchange.status = int(piece.start[1])
                if rule is None:
                    await self._pass(piece.data, "answers")
                elif rule.repeats:
                    whole += piece.data
                    if piece.ends:
                        await self._pass(bytes(whole) * (1 + rule.repeats), "answers")
                        whole.clear()
                        self._conditions.fire(rule.fault)
                elif piece.ends:
                    self._conditions.fire(rule.fault)
                    raise ConnectionResetError(rule.fault)
                if piece.ends and self._open:
                    self._open.popleft()
        await self._gate("answers")
        self._to_client.write_eof()

    async def _gate(self, way: Way) -> None:
        if way in self._conditions.line.hangs:
            self._conditions.fire("hang")
            await self._conditions.bell.until(lambda: way not in self._conditions.line.hangs)

    async def _pass(self, data: bytes, way: Way) -> None:
        await self._gate(way)
        line = self._conditions.line
        if line.latency or line.jitter:
            self._conditions.fire("slow")
            await asyncio.sleep(line.latency + line.jitter * self._conditions.random.random())
        if way == "requests":
            self._to_service.write(data)
            await self._to_service.drain()
        elif self.left is not None and len(data) > self.left:
            self._to_client.write(data[: self.left])
            await self._to_client.drain()
            self._conditions.fire("limit")
            raise ConnectionResetError("limit")
        else:
            self.left = None if self.left is None else self.left - len(data)
            await self._deliver(data)
        self._conditions.bell.ring()

    async def _deliver(self, data: bytes) -> None:
        if self._conditions.line.drip is None:
            self._to_client.write(data)
            await self._to_client.drain()
            return
        self._conditions.fire("drip")
        for at in range(len(data)):
            self._to_client.write(data[at : at + 1])
            await self._to_client.drain()
            # Read the delay for each byte: a line that is mended stops dripping.
            await asyncio.sleep(self._conditions.line.drip or 0)
