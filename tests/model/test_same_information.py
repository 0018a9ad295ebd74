"""The same random history on Redis and in memory leaves the same information on each task, as clients read it."""

import uuid
from random import Random
from typing import Any

import msgspec
import pytest

from leasekit.task import Beat, FixedDelays, NewTask, Settlement
from tests.model.rigs import MemoryRig, RedisRig, Rig
from tests.model.test_model import WAITING
from tests.redis_server import Server

pytestmark = pytest.mark.anyio

STEPS = 40
RETRY = FixedDelays(waits=[0])
CALLS = [
    "put", "put", "put_after", "claim", "claim", "beat", "settle", "settle", "settle", "cancel", "redrive", "chain",
]  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class History:
    """A history that a seed determines, and what its calls were answered."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.service: Any = rig.service
        self.random = Random(seed)
        self.tokens: dict[str, str] = {}  # of the last claim of each task
        self.count = 0
        self.answers: list[Any] = []

    async def run(self) -> None:
        for step in range(STEPS):
            self.answers.append(await getattr(self, self.random.choice(CALLS))(f"c{step}"))
            await self.rig.tell_ends()
            await self.rig.advance(0.5)

    def some_id(self) -> str:
        return f"t{self.random.randint(1, self.count + 1)}"

    async def schedule(self, **options: Any) -> Any:
        self.count += 1
        await self.service.schedule([NewTask(kind="k", id=f"t{self.count}", retry=RETRY, **options)])

    async def put(self, call: str) -> Any:
        options: dict[str, list[Any]] = {
            "collection": [None, "c"], "priority": [1, 2], "max_attempts": [1, 2], "max_crashes": [0, 1],
        }  # fmt: skip
        await self.schedule(payload=call, **{name: self.random.choice(of) for name, of in options.items()})

    async def put_after(self, call: str) -> Any:
        known = [f"t{number}" for number in range(1, self.count + 1)]
        await self.schedule(payload=call, after=self.random.sample(known, k=min(1, len(known))))

    async def claim(self, call: str) -> Any:
        claimed = await self.service.claim(["k"], limit=1, wait=0, claim_id=call)
        self.tokens |= {task.id: task.token for task in claimed.tasks}
        return [(task.id, task.attempt, task.fence) for task in claimed.tasks]

    async def beat(self, call: str) -> Any:
        if not self.tokens:
            return None
        task_id, started = self.random.choice(sorted(self.tokens)), self.random.choice([True, False])
        (verdict,) = await self.service.beat(
            [Beat(id=task_id, token=self.tokens[task_id], started=started, progress=[call])]
        )
        return verdict

    async def settle(self, call: str) -> Any:
        if not self.tokens:
            return None
        task_id = self.random.choice(sorted(self.tokens))
        outcome: Any = self.random.choice(["success", "retry", "fatal", "crash", "release", "cancelled"])
        error = self.random.choice([None, {"type": "E", "message": "m"}])
        then = [NewTask(kind="k", id=f"s{call}", retry=RETRY)] * (
            outcome in ("success", "fatal") and self.random.random() < 0.4
        )
        (verdict,) = await self.service.settle(
            [Settlement(id=task_id, token=self.tokens[task_id], outcome=outcome, result=call, error=error, then=then)]
        )
        return msgspec.structs.replace(verdict, reason=None if verdict.reason == "dead" else verdict.reason)

    async def cancel(self, call: str) -> Any:
        return await self.service.cancel([self.some_id()])

    async def redrive(self, call: str) -> Any:
        return await self.service.redrive([self.some_id()], redrive_id=call)

    async def chain(self, call: str) -> Any:
        if self.random.random() < 0.7:
            return None
        cancelled = await self.service.cancel_chain(self.some_id())
        return cancelled.root, sorted((verdict.id, verdict.verdict) for verdict in cancelled.tasks)

    async def information(self) -> dict[str, Any]:
        ids = [task.id for task in (await self.service.list_tasks(limit=1000)).tasks]
        infos = {task_id: msgspec.to_builtins(await self.service.get(task_id)) for task_id in ids}
        for info in infos.values():
            if info["status"] not in WAITING:
                del info["at"]  # one says when the task was due first, the other when it was due last
        return infos


async def lived(rig: Rig, seed: int) -> tuple[list[Any], dict[str, Any]]:
    await rig.open()
    history = History(rig, seed)
    await history.run()
    information = await history.information()
    await rig.close()
    return history.answers, information


@pytest.mark.usefixtures("settable_scripts")
@pytest.mark.parametrize("seed", range(20))
async def test_redis_tells_what_memory_tells(seed: int, redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, information = await lived(MemoryRig(), seed)
    rig = RedisRig(redis_server, f"p{uuid.uuid4().hex}", monkeypatch)
    told, known = await lived(rig, seed)
    assert told == answers
    for task_id in information.keys() | known.keys():
        assert known.get(task_id) == information.get(task_id)
