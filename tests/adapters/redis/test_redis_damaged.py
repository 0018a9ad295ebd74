"""A record that is damaged concerns its own task: it is set aside, counted and named, and everything else goes on."""

import contextlib
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec
import pytest

from leasekit.errors import ProtocolError
from leasekit.task import Beat, Exponential, FixedDelays, NewTask, Settlement, Task
from leasekit_redis import RedisBackend
from leasekit_redis.address import parse
from leasekit_redis.keys import Keys
from tests.redis_server import Server
from tests.sampling import in_soak
from tests.waiting import until

pytestmark = pytest.mark.anyio

STAGES = ["waiting", "running", "given back", "ended", "dead", "gated"]
GARBAGE: list[Any] = [None, True, -1.5, 1e300, "x", [], {}, [1], ["x"], {"x": 1}]
RAW = [
    b"",
    b"\xc1",
    b"\x00",
    b"\x01\x02",
    b"\x93\x01",
    b"\xff\xfe",
    b"no JSON",
    b"{}",
    b'{"payload": "\xff"}',
    b"[" * 5000,
]


class Place:
    """One service, with a task that is going to be damaged among others of its kind and of another."""

    def __init__(self, server: Server, prefix: str, stage: str) -> None:
        self._server, self._prefix, self.stage = server, prefix, stage
        self.backend = RedisBackend(replace(parse(server.url), prefix=prefix), worker="w")
        self.kind, self.other = "mine", "other"
        self.held: Task | None = None

    def key(self, name: str) -> str:
        return f"{self._prefix}:{{{self.kind}}}:{name}"

    def ask(self, command: str, name: str, *words: Any) -> Any:
        return self._server.ask(command, self.key(name), *words)

    async def claim(self, *kinds: str, limit: int = 100) -> list[Task]:
        return (await self.backend.claim(kinds, limit=limit, wait=0, claim_id=uuid.uuid4().hex)).tasks

    async def settle(self, task: Task, outcome: Any = "success", **more: Any) -> str:
        (verdict,) = await self.backend.settle([Settlement(id=task.id, token=task.token, outcome=outcome, **more)])
        return verdict.verdict

    async def prepare(self) -> None:
        """The victim, in its stage, with every field that a record can have; the first of its kind."""
        victim = NewTask(
            kind=self.kind, id="victim", payload=[1], collection="c", dedupe_key="k", dedupe_window=60, max_attempts=1,
            max_crashes=3, max_runtime=60, claim_timeout=90, heartbeat_timeout=60, priority=1,
            retry=FixedDelays(waits=[1, 2]) if self.stage == "running" else Exponential(first=3),
            after=["unknown"] if self.stage == "gated" else [],
        )  # fmt: skip
        await self.backend.schedule([victim])
        if self.stage in ("waiting", "gated"):
            return
        (self.held,) = await self.claim(self.kind)
        await self.backend.beat([Beat(id="victim", token=self.held.token, progress={"at": 1})])
        if self.stage == "given back":
            await self.settle(self.held, "release")
        elif self.stage != "running":
            await self.settle(self.held, "success" if self.stage == "ended" else "retry", progress=[2])

    async def everything_else_works(self) -> None:
        """Every call, on the damaged task and on those beside it."""
        backend = self.backend
        await backend.schedule([NewTask(kind=self.kind, id="good"), NewTask(kind=self.other, id="far")])
        await backend.schedule([NewTask(kind=self.kind, id="next", after=["good"])])
        await backend.schedule([NewTask(kind=self.kind, id="more", dedupe_key="k")])
        (again,) = await backend.schedule([NewTask(kind=self.kind, id="victim", payload=[1])])
        assert not again.created
        await backend.schedule([NewTask(kind=self.kind, id="waits", after=["victim"])])
        await backend.list_tasks()
        page = await backend.list_tasks(kind=self.kind)
        assert {"good", "next", "waits"} <= {info.id for info in page.tasks}
        await self.is_told_of_itself()
        claimed: dict[str, Task] = {}
        for _ in range(5):
            claimed |= {task.id: task for task in await self.claim(self.kind, self.other, limit=2)}
        assert {"good", "far"} <= claimed.keys()
        ids = [*claimed, *(["victim"] if self.held else [])]
        tokens = {task.id: task.token for task in [*([self.held] if self.held else []), *claimed.values()]}
        verdicts = await backend.beat([Beat(id=one, token=tokens[one], progress=[1]) for one in ids])
        assert {one.verdict for one in verdicts if one.id in ("good", "far")} == {"renewed"}
        if self.held:
            await self.settle(self.held)
        then = [NewTask(kind=self.kind, id="then")]
        assert await self.settle(claimed["good"], then=then) == "settled"
        assert await self.settle(claimed["far"]) == "settled"
        assert {"then", "next"} <= {task.id for task in await self.claim(self.kind)}
        await backend.maintain()
        await self._maintained()
        await backend.redrive(kind=self.kind)
        await backend.redrive(["victim"])
        await backend.ended_on(self.kind, datetime.now(UTC).date())
        await backend.workers()
        await backend.cancel(["victim", "waits"])
        await self.claim(self.kind, self.other)
        stats = await backend.stats()
        assert set(stats.kinds) == {self.kind, self.other}
        assert stats.damaged.get(self.kind, 0) == self.ask("ZCARD", "damaged")

    async def _maintained(self) -> None:
        for gated in self.ask("ZRANGE", "gated", 0, -1):
            self.ask("ZADD", "gated", 1, gated)
        await self.backend._maintenance.maintain(self.kind)

    async def is_told_of_itself(self) -> None:
        try:
            info = await self.backend.get("victim")
        except ProtocolError as error:
            said = str(error)
        else:
            said = "victim" if info is None else info.id
        assert "victim" in said

    async def is_let_go_of(self, caplog: pytest.LogCaptureFixture, what: str) -> None:
        """Who was set aside was named once, and is no more when somebody says so, or when it was kept long enough."""
        aside = self.ask("ZRANGE", "damaged", 0, -1)
        for one in aside:
            named = [
                record
                for record in caplog.records
                if record.levelno == logging.ERROR and repr(one.decode()) in record.message
            ]
            assert len([record for record in named if "set aside" in record.message]) == 1, what
        if aside:
            assert await self.backend.discard(self.kind, ["good", *(one.decode() for one in aside)]) == len(aside)
            assert not (await self.backend.stats()).damaged
        if b"victim" in aside:
            (again,) = await self.backend.schedule([NewTask(kind=self.kind, id="victim")])
            assert again.created
            assert "victim" in {task.id for task in await self.claim(self.kind)}


def variants(record: str) -> Iterator[tuple[str, Any]]:
    """What may be damaged in a record, as (name, function of a place)."""
    name, field = {
        "state": ("state", "victim"), "lease": ("working", "victim"), "run": ("runs", "victim/1"),
        "claim": ("claims", None), "dedupe": ("dedupe", "k"), "task": ("task", "victim"),
        "progress": ("progress", "victim"),
    }[record]  # fmt: skip

    def where(place: Place) -> Any:
        return field if field is not None else place.ask("HKEYS", name)[0]

    yield "no record", lambda place: place.ask("HDEL", name, where(place))
    for raw in RAW:
        yield repr(raw[:20]), lambda place, raw=raw: place.ask("HSET", name, where(place), raw)
    if record in ("task", "progress"):
        return
    known = {
        "state": [
            "status", "seq", "fence", "attempt", "due", "priority", "failures", "crashes", "max_attempts",
            "max_crashes", "max_runtime", "claim_ttl", "beat_ttl", "worker", "token", "reason", "digest", "dedupe",
            "collection", "after", "retry", "awaited",
        ],
        "lease": ["token", "worker", "ttl", "max_runtime", "longest", "ends", "started", "cancel_requested"],
        "run": ["fence", "attempt", "at", "outcome", "worker", "token", "digest", "result", "error"],
        "claim": ["waited", "grants"],
        "dedupe": ["id", "ends"],
    }[record]  # fmt: skip

    def change(place: Place, one: str, value: Any) -> None:
        fields = msgspec.msgpack.decode(place.ask("HGET", name, where(place)))
        if value is Ellipsis:
            fields.pop(one, None)
        else:
            fields[one] = value
        place.ask("HSET", name, where(place), msgspec.msgpack.encode(fields))

    for one in known:
        for value in (Ellipsis, *GARBAGE):
            yield f"{one} = {value!r}", lambda place, one=one, value=value: change(place, one, value)


RECORDS = {
    "state": STAGES,
    "lease": ["running"],
    "run": ["given back", "ended", "dead"],
    "claim": ["running", "ended"],
    "dedupe": ["waiting", "ended"],
    "task": STAGES,
    "progress": ["running", "given back", "ended"],
}


Prepare = Callable[[str], Awaitable[Place]]


@pytest.fixture
async def places(server: Server, kind: str) -> AsyncIterator[Prepare]:
    made: list[Place] = []

    async def prepared(stage: str) -> Place:
        made.append(Place(server, f"{kind}-{len(made)}", stage))
        await made[-1].prepare()
        return made[-1]

    yield prepared
    for place in made:
        await place.backend.aclose()


# Sample: 2 damages of each record at each stage, the same in each run.
@pytest.mark.soak
@pytest.mark.parametrize(
    ("record", "stage"), [(record, stage) for record, stages in RECORDS.items() for stage in stages]
)
async def test_whatever_is_damaged_all_else_goes_on(
    server: Server, places: Prepare, caplog: pytest.LogCaptureFixture, record: str, stage: str
) -> None:
    every = list(variants(record))
    chosen = random.Random(f"{record} {stage}").sample(every, in_soak(len(every), by_default=2))
    for what, damage in chosen:
        caplog.clear()
        place = await places(stage)
        damage(place)
        try:
            with anyio.fail_after(30):
                await place.everything_else_works()
                await place.is_let_go_of(caplog, what)
        except Exception as error:
            raise AssertionError(f"{record} of a task that is {stage}, with {what}: {error!r}") from error
        await place.backend.aclose()
        server.ask("DEL", *server.ask("KEYS", f"{place._prefix}:*"))


NAMES = [key.decode().rpartition("}:")[2] for key in Keys("p").of_kind("k")]


@pytest.mark.parametrize("name", NAMES)
async def test_a_key_that_is_not_ours_holds_up_its_own_kind_at_most(server: Server, places: Prepare, name: str) -> None:
    """Nothing is half done either: what raises has changed nothing."""
    place = await places("running")
    backend = place.backend
    await backend.schedule([NewTask(kind=place.kind, id="good"), NewTask(kind=place.other, id="far")])
    place.ask("DEL", name)
    place.ask("SET", name, "mine")

    def everything() -> dict[bytes, bytes]:
        return {key: server.ask("DUMP", key) for key in server.ask("KEYS", f"{place._prefix}:*mine}}:*")}

    held = place.held
    assert held is not None
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: backend.schedule([NewTask(kind=place.kind, id="new")]),
        lambda: backend.beat([Beat(id="victim", token=held.token)]),
        lambda: place.settle(held),
        lambda: place.claim(place.kind),
    ]
    for call in calls:
        before = everything()
        try:
            await call()
        except ProtocolError as error:
            said = str(error)
        else:
            continue
        assert ("prefix=" in said, everything()) == (True, before)
    assert "far" in {task.id for task in await place.claim(place.kind, place.other)}
    await backend.list_tasks()
    await backend.list_tasks(kind=place.other)
    await backend.redrive(kind=place.other)
    with contextlib.suppress(ProtocolError):
        await backend.maintain()
    assert place.ask("GET", name) == b"mine"


async def test_successors_that_cannot_be_read_hold_up_no_other(
    places: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    place = await places("running")
    for text in (b"no JSON", b"\xff", b"{}", b"[" * 5000, b'{"kind": "\xff"}', b'{"kind": "other", "id": "far"}'):
        place.ask("RPUSH", "outbox", text)
    await place.backend._maintenance.maintain(place.kind)
    await place.backend._maintenance.maintain(place.kind)
    assert [task.id for task in await place.claim(place.other)] == ["far"]
    assert place.ask("LLEN", "outbox") == 0
    assert (await place.backend.stats()).damaged == {place.kind: 5}
    # Maintenance also goes on by itself, and may have found one of them: its line comes when its call has returned.
    await until(lambda: len([record for record in caplog.records if "successor" in record.message]) == 5)


async def test_each_of_many_that_are_set_aside_at_once_is_named(
    places: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    place = await places("running")
    place.ask("RPUSH", "outbox", *(f"no JSON {number}" for number in range(1500)))
    while place.ask("LLEN", "outbox"):
        await place.backend._maintenance.maintain(place.kind)
    scores = place.ask("ZRANGE", "damaged", 0, -1, "WITHSCORES")[1::2]
    assert len(set(scores)) == 1500
    await until(lambda: len({record.message for record in caplog.records if "successor" in record.message}) == 1500)


async def test_counts_that_are_no_numbers_begin_anew(places: Prepare) -> None:
    place = await places("waiting")
    for name in ("new", "claimed"):
        place.ask("HSET", "counts", name, "many")
    place.ask("HSET", "holders", "w", "many")
    await place.backend.stats()
    await place.backend.workers()
    await place.claim(place.kind)
    await place.backend.schedule([NewTask(kind=place.kind) for _ in range(3)])
    assert (await place.backend.stats()).kinds == {place.kind: {"new": 3}}


async def test_what_was_set_aside_goes_when_it_was_kept_long_enough(places: Prepare) -> None:
    place = await places("waiting")
    place.ask("HSET", "state", "victim", "x")
    await place.claim(place.kind)
    assert place.ask("ZCARD", "damaged") == 1
    place.ask("ZADD", "damaged", 1, "victim")
    await place.backend._maintenance.maintain(place.kind)
    assert await place.backend.get("victim") is None
    assert place.ask("HLEN", "state") == place.ask("HLEN", "task") == 0
