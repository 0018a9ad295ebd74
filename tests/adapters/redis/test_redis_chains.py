"""Chains in Redis: no accepted task is missed, whoever dies or cancels in between, and nothing is left behind."""

import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from leasekit.errors import Unavailable
from leasekit.task import NewTask, Settlement, Status, Task
from leasekit_redis import RedisBackend, backend, reading
from leasekit_redis.address import parse
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server

pytestmark = pytest.mark.anyio

Open = Callable[[str], RedisBackend]


@pytest.fixture(params=["server", "cluster"])
def where(request: pytest.FixtureRequest) -> Server | Cluster:
    where: Server | Cluster = request.getfixturevalue(request.param)
    return where


@pytest.fixture
async def opened(where: Server | Cluster) -> AsyncIterator[Open]:
    """`opened(worker)`: a connection that is closed in the end, to a service of this test's own."""
    prefix, backends = f"p-{uuid.uuid4().hex[:8]}", list[RedisBackend]()

    def open_(worker: str) -> RedisBackend:
        backends.append(RedisBackend(replace(parse(where.url), prefix=prefix), worker=worker))
        return backends[-1]

    yield open_
    for one in backends:
        await one.aclose()


@pytest.fixture
def redis(opened: Open) -> RedisBackend:
    return opened("w")


async def put(redis: RedisBackend, *names: str, **options: Any) -> list[Status]:
    answers = await redis.schedule([NewTask(kind=f"kind-{name}", id=name, **options) for name in names])
    return [answer.status for answer in answers]


async def claim(redis: RedisBackend, name: str) -> Task | None:
    claimed = await redis.claim([f"kind-{name}"], limit=1, wait=0, claim_id=uuid.uuid4().hex)
    return next(iter(claimed.tasks), None)


async def end(redis: RedisBackend, name: str, *then: str, **options: Any) -> None:
    task = await claim(redis, name)
    assert task is not None
    successors = [NewTask(kind=f"kind-{name}", id=name, **options) for name in then]
    (verdict,) = await redis.settle([Settlement(id=name, token=task.token, outcome="success", then=successors)])
    assert verdict.verdict == "settled"


async def listed(redis: RedisBackend, root: str, **options: Any) -> list[str]:
    return [task.id for task in (await redis.list_tasks(root=root, **options)).tasks]


async def status(redis: RedisBackend, name: str) -> Status:
    info = await redis.get(name)
    assert info is not None
    return info.status


async def a_chain(redis: RedisBackend) -> None:
    """The task `a`; `b`, after it; `c`, which `a` has scheduled; `d`, which follows `c`; and `x`, which is alone."""
    await put(redis, "a", "x")
    await put(redis, "b", after=["a"])
    await put(redis, "c", parent="a")
    await end(redis, "c", "d", parent="x")


async def test_each_task_has_its_parent_and_its_root(redis: RedisBackend, opened: Open) -> None:
    await a_chain(redis)
    other = opened("other")  # which remembers nothing
    await put(other, "e", parent="d")
    infos = {name: await other.get(name) for name in "abcdex"}
    assert {name: info and (info.parent, info.root) for name, info in infos.items()} == {
        "a": (None, "a"), "b": ("a", "a"), "c": ("a", "a"), "d": ("c", "a"), "e": ("d", "a"), "x": (None, "x"),
    }  # fmt: skip


async def test_tasks_that_come_together_have_the_root_of_the_first(redis: RedisBackend) -> None:
    names = [f"t{n}" for n in range(5)]
    pairs = [NewTask(kind="k", id=one, parent=other) for other, one in itertools.pairwise(names)]
    await redis.schedule([*reversed(pairs), NewTask(kind="k", id="t0")])
    assert {task.root for task in (await redis.list_tasks(root="t0")).tasks} == {"t0"}
    assert sorted(await listed(redis, "t0")) == names
    await redis.schedule([NewTask(kind="k", id=one, parent=two) for one, two in ("uv", "vu")])
    assert (info := await redis.get("u")) is not None
    assert info.parent == "v"


async def test_a_chain_is_listed_with_other_filters_and_in_pages(redis: RedisBackend) -> None:
    await a_chain(redis)
    assert await listed(redis, "a") == ["a", "b", "c", "d"]
    assert await listed(redis, "a", newest=True) == ["d", "c", "b", "a"]
    assert await listed(redis, "a", kind="kind-d") == ["d"]
    assert await listed(redis, "a", status=Status.SUCCESS) == ["c"]
    assert await listed(redis, "c") == ["c"]
    assert await listed(redis, "unknown") == []
    for newest in (False, True):
        cursor, found = None, list[str]()
        for _ in range(4):
            page = await redis.list_tasks(root="a", limit=1, cursor=cursor, newest=newest)
            found += [task.id for task in page.tasks]
            cursor = page.cursor
        assert (found, cursor) == (sorted("abcd", reverse=newest), None)


@pytest.mark.parametrize("name", ["a", "d"])
async def test_a_chain_is_cancelled_from_any_of_its_tasks_in_steps(
    redis: RedisBackend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(backend, "MOST", 3)
    await a_chain(redis)
    assert await claim(redis, "d") is not None
    verdicts: dict[str, str] = {}
    cursor = None
    for _ in range(4):
        answer = await redis.cancel_chain(name, cursor=cursor)
        assert answer.root == "a"
        verdicts |= {verdict.id: verdict.verdict for verdict in answer.tasks}
        if (cursor := answer.cursor) is None:
            break
    assert verdicts == {"a": "cancelled", "b": "cancelled", "d": "cancel_requested"}
    assert await status(redis, "x") is Status.NEW


async def test_what_comes_to_a_cancelled_chain_is_cancelled_and_so_is_what_waits_for_it(redis: RedisBackend) -> None:
    await put(redis, "a")
    task = await claim(redis, "a")
    assert task is not None
    await redis.cancel_chain("a")
    await put(redis, "waits", after=["b"])
    then = [NewTask(kind="kind-b", id="b")]
    await redis.settle([Settlement(id="a", token=task.token, outcome="success", then=then)])
    assert (info := await redis.get("b")) is not None
    assert (info.status, info.reason) == (Status.CANCELLED, 'the chain of "a" was cancelled')
    await redis.maintain()
    assert await status(redis, "waits") is Status.DROPPED


async def test_a_cancel_between_the_note_of_a_task_and_its_making_is_not_missed(
    redis: RedisBackend, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(redis, "a")
    other, make = opened("other"), redis._intake._answer

    async def cancelled_before(*args: Any, **options: Any) -> None:
        await other.cancel_chain("a")
        await make(*args, **options)

    monkeypatch.setattr(redis._intake, "_answer", cancelled_before)
    await put(redis, "b", parent="a")
    assert await status(redis, "b") is Status.CANCELLED


async def test_a_task_whose_client_died_between_note_and_making_is_made_by_the_repeat_and_listed(
    redis: RedisBackend, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(redis, "a")
    dying = opened("dying")

    async def die(*_args: Any, **_options: Any) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(dying._intake, "_answer", die)
    with pytest.raises(Unavailable):
        await put(dying, "b", parent="a")
    assert await listed(redis, "a") == ["a"]
    await put(redis, "b", parent="a")
    assert await listed(redis, "a") == ["a", "b"]


async def test_what_was_noted_long_ago_and_never_made_is_forgotten(
    redis: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(redis, "a")
    await put(redis, "b", parent="x", dedupe_key="key")
    (answer,) = await redis.schedule([NewTask(kind="kind-b", id="c", parent="a", dedupe_key="key")])
    assert answer.id == "b"  # so `c` was noted, and not made
    assert await redis._link.command("ZCARD", redis._link.keys.chain("a")) == 1
    monkeypatch.setattr(reading, "_BEING_MADE", -60.0)
    assert await listed(redis, "a") == ["a"]
    assert await redis._link.command("EXISTS", redis._link.keys.chain("a")) == 0


async def test_the_successors_of_a_dead_client_stay_in_the_chain(
    redis: RedisBackend, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(redis, "a")
    await put(redis, "b", parent="a")
    dying = opened("dying")

    async def die(*_args: Any) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(dying._renewing, "_deliver", die)
    await end(dying, "b", "c")
    assert await listed(redis, "a") == ["a", "b"]
    await redis.maintain()
    assert await listed(redis, "a") == ["a", "b", "c"]


async def test_a_purged_chain_leaves_nothing_behind(redis: RedisBackend) -> None:
    await a_chain(redis)
    task = await claim(redis, "a")
    assert task is not None
    await redis.cancel_chain("a")
    await redis.settle([Settlement(id="a", token=task.token, outcome="cancelled")])
    assert await listed(redis, "a") == ["a", "b", "c", "d"]
    await redis.purge(["b", "c"])
    assert await listed(redis, "a") == ["a", "d"]
    assert await put(redis, "late", parent="a") == [Status.CANCELLED]
    await redis.purge(["a", "d", "late"])
    assert await listed(redis, "a") == []
    assert await redis._link.command("EXISTS", redis._link.keys.chain("a")) == 0


async def test_a_cancelled_task_that_led_no_chain_leaves_nothing_behind(redis: RedisBackend) -> None:
    await put(redis, "a")
    await redis.cancel_chain("a")
    assert await redis._link.command("EXISTS", redis._link.keys.chain("a")) == 1
    await redis.purge(["a"])
    assert await redis._link.command("EXISTS", redis._link.keys.chain("a")) == 0


async def test_a_chain_of_an_unknown_task_is_empty_and_leaves_nothing_behind(redis: RedisBackend) -> None:
    answer = await redis.cancel_chain("a")
    assert (answer.root, answer.tasks, answer.cursor) == ("a", [], None)
    assert await redis._link.command("EXISTS", redis._link.keys.chain("a")) == 0
