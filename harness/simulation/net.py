"""The network between the server and its clients: it delays, loses, repeats and garbles messages."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from msgspec import structs

from harness.proxy.foreign import FOREIGN
from harness.simulation.cluster import Cluster
from harness.simulation.server import Server
from harness.simulation.world import Process, World
from leasekit._forwarding import ForwardingScheduler
from leasekit.backend import Capabilities
from leasekit.errors import BackendError, ProtocolError, Throttled, Unavailable
from leasekit.server.commit import resolve
from leasekit.task import Claimed, Redriven, Ticket, Verdict
from leasekit.wire import RedriveRequest
from leasekit_http.transport import failure

_LATEST = 900.0  # seconds by which a duplicate may be late
_ABSURD = (None, 0.0, -1.0, 0.5, 5.0, 60.0, 3600.0, 1e9)  # values of `Retry-After`


@dataclass(slots=True, eq=False)
class _Request:
    client: Process
    worker: str
    op: str
    body: Any
    future: "asyncio.Future[Any] | None"  # None: no caller waits for the answer
    handling: "asyncio.Task[None] | None" = None
    server: Server | None = None


class Net:
    """The network; `weather` has its current faults and the process that each of them hits."""

    def __init__(self, world: World, server: Server | Cluster) -> None:
        self.world = world
        self.server = server
        self.weather: dict[int, tuple[str, str]] = {}  # number → fault, target (empty: all)
        # (op, who) → what to call at the next answer; it returns whether the answer is delivered, whatever the weather.
        self.unheard: dict[tuple[str, str], Callable[[], bool]] = {}
        self._beaten: set[str] = set()  # tokens
        self._chance = world.chance("net")

    def _is_hit(self, fault: str, who: str) -> bool:
        return any(name == fault and target in ("", who) for name, target in self.weather.values())

    def _hits(self, fault: str, who: str, odds: float = 1.0) -> bool:
        if not self.weather or not self._is_hit(fault, who) or (odds < 1 and self._chance.random() >= odds):
            return False
        self.world.fired[fault] += 1
        return True

    def _delay(self, who: str) -> float:
        if self.weather:
            if self._hits("crawl", who, 0.5):
                return self._chance.uniform(5, 60)
            if self._hits("slow", who, 0.7):
                return self._chance.uniform(0.5, 9)
            if self._hits("jitter", who):
                return self._chance.uniform(0, 3)
        return self._chance.uniform(0.0002, 0.01)

    def send(self, request: _Request) -> None:
        world, who = self.world, request.client.who
        if self.weather:
            if self._hits("cut", who) or self._hits("drop_request", who, 0.4):
                return
            if self._hits("refuse", who):
                self._tell(request, Unavailable("the connection was refused"), after=0.001)
                return
            if self._hits("throttle", who) or self._hits("throttle_most", who, 0.9):
                wait = self._chance.choice(_ABSURD)
                self._tell(request, Throttled("too much waits", retry_after=wait), after=self._delay(who))
                return
            if self._hits("foreign", who, 0.8):
                self._tell(request, self._foreign(), after=self._delay(who))
                return
            if self._hits("flaky", who, 0.5):
                error = self._chance.choice((Unavailable, ProtocolError, Throttled))
                self._tell(request, error("something is wrong"), after=self._chance.uniform(0, 12))
                if self._chance.random() < 0.5:
                    return
            if self._hits("duplicate", who, 0.5):
                again = _Request(request.client, request.worker, request.op, request.body, None)
                world.after(self._chance.uniform(0, _LATEST) ** self._chance.choice((0.5, 1)), self._arrive, again)
        world.after(self._delay(who), self._arrive, request)

    def _foreign(self) -> BackendError:
        """Make a foreign answer into the error that the real adapter makes of it."""
        answer = self._chance.choice(FOREIGN)
        headers = {"content-type": answer.content_type}
        response = httpx.Response(answer.status, headers=headers, request=httpx.Request("POST", "http://server/v1"))
        return failure(response, answer.body, request=b"{}")

    def abandon(self, request: _Request) -> None:
        """Close the connection of a request whose caller no longer waits."""
        request.future = None
        if request.handling is not None and not self._is_hit("cut", request.client.who):
            self.world.after(0.01, self._disconnect, request)

    def _disconnect(self, request: _Request) -> None:
        process = request.server.process if request.server is not None else None
        if request.handling is not None and process is not None and process.loop is request.handling.get_loop():
            process.call(request.handling.cancel)

    def _arrive(self, request: _Request) -> None:
        request.server = self.server.for_request()
        process = request.server.process
        if process is None or not process.is_alive:
            self._tell(request, Unavailable("the connection was refused"), after=0.001)
            return
        process.call(self._accept, process, request)

    def _accept(self, process: Process, request: _Request) -> None:
        assert request.server is not None
        request.handling = process.loop.create_task(self._handle(request, request.server))

    async def _handle(self, request: _Request, server: Server) -> None:
        try:
            answer: Any = await server.answer(request.op, request.worker, request.body)
        except BackendError as error:
            answer = error
        except asyncio.CancelledError:
            return
        self._reply(request, answer)

    def _reply(self, request: _Request, answer: Any) -> None:
        who = request.client.who
        if request.future is None:
            return
        if (gets_through := self.unheard.get((request.op, who))) is not None and self._matters(request, answer):
            if gets_through():
                self._tell(request, answer, after=self._delay(who))
            return
        if self.weather:
            if self._hits("cut", who) or self._hits("one_way", who) or self._hits("drop_reply", who, 0.4):
                return
            if self._hits("reset", who, 0.5):
                self._tell(request, Unavailable("the connection was reset"), after=0.001)
                return
            if self._hits("garble", who, 0.6):
                answer = ProtocolError("200, and HTML") if self._chance.random() < 0.5 else self._garbled(answer)
            elif self._hits("bad_items", who, 0.6):
                answer = self._with_bad_items(answer)
        self._tell(request, answer, after=self._delay(who))

    def _matters(self, request: _Request, answer: Any) -> bool:
        """Whether the loss of this answer matters: of beats, only that of a lease's first one."""
        match request.op:
            case "beat":
                before = len(self._beaten)
                self._beaten.update(beat.token for beat in request.body)
                return len(self._beaten) > before
            case "claim" | "claim_tickets":
                return isinstance(answer, Claimed) and bool(answer.tasks)
            case _:
                return not isinstance(answer, BackendError)

    def _garbled(self, answer: Any) -> Any:
        if not isinstance(answer, list) or not answer or not isinstance(answer[0], Verdict):
            return ProtocolError("the answer was cut off")
        kind = self._chance.randrange(4)
        if kind == 0:
            return answer[:-1]
        if kind == 1:
            return answer[::-1]
        if kind == 2:
            return [structs.replace(item, ttl=self._chance.choice((-1.0, 0.0, 1.0, float("inf")))) for item in answer]
        return [structs.replace(item, id="another task") for item in answer]

    def _with_bad_items(self, answer: Any) -> Any:
        """Let some items of a batch fail, or be throttled."""
        if not isinstance(answer, list) or not answer or not isinstance(answer[0], Verdict):
            return answer
        odds = self._chance.random()
        bad = (
            Verdict(id="", verdict="failed", reason="something is wrong"),
            Verdict(id="", verdict="throttled", retry_after=self._chance.choice(_ABSURD)),
        )
        return [
            structs.replace(self._chance.choice(bad), id=item.id) if self._chance.random() < odds else item
            for item in answer
        ]

    def _tell(self, request: _Request, answer: Any, *, after: float) -> None:
        if request.future is not None:
            self.world.after(after, request.client.call, resolve, request.future, answer)


class Remote(ForwardingScheduler):
    """The backend of one process, over the simulated network."""

    capabilities = Capabilities()

    def __init__(self, net: Net, client: Process, *, worker: str) -> None:
        self._net = net
        self._client = client
        self._worker = worker

    async def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        future: asyncio.Future[Any] = self._client.loop.create_future()
        request = _Request(self._client, self._worker, name, args[0] if args else options, future)
        self._net.send(request)
        try:
            return await future
        except asyncio.CancelledError:
            if self._client.is_alive:
                self._net.abandon(request)
            raise

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, **more: Any) -> Claimed:
        body = {"kinds": tuple(kinds), "limit": limit, "wait": wait, "claim_id": claim_id, **more}
        claimed: Claimed = await self._call("claim", body)
        return structs.replace(claimed, tasks=[structs.replace(task) for task in claimed.tasks])

    async def claim_tickets(
        self, kinds: Sequence[str], tickets: Sequence[Ticket], *, limit: int, claim_id: str
    ) -> Claimed:
        body = {"kinds": tuple(kinds), "limit": limit, "wait": 0.0, "claim_id": claim_id, "tickets": tuple(tickets)}
        claimed: Claimed = await self._call("claim_tickets", body)
        return structs.replace(claimed, tasks=[structs.replace(task) for task in claimed.tasks])

    async def redrive(self, task_ids: Sequence[str] = (), **options: Any) -> Redriven:
        redriven: Redriven = await self._call("redrive", RedriveRequest(ids=list(task_ids), **options))
        return redriven

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""
