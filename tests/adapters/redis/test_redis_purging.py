"""Purges of a Redis: their scripts are short, and what happens beside them is not lost."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import msgpack

from leasekit.errors import Unavailable
from leasekit.task import NewTask, Status
from leasekit_redis import RedisBackend, purging
from leasekit_redis.id_index import Owner
from leasekit_redis.scripts import DROP, PURGE, Script
from tests.adapters.redis.test_redis_tasks import Open, claim, held, opened, settle

__all__ = ["opened"]

pytestmark = pytest.mark.anyio


async def ended(backend: RedisBackend, kind: str, count: int) -> list[str]:
    ids = [f"{kind}-{n}" for n in range(count)]
    await backend.schedule([NewTask(kind=kind, id=task_id) for task_id in ids])
    await backend.cancel(ids)
    return ids


async def test_no_script_of_a_purge_looks_at_more_than_a_hundred_tasks(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis serves no heartbeat while a script runs."""
    backend = opened(prefix=f"p-{kind}")
    await ended(backend, kind, 350)
    sizes: list[int] = []
    run_for = backend._link.run_for

    async def noted(kind: str, script: Script, argument: Any) -> Any:
        raw = await run_for(kind, script, argument)
        if script is PURGE:
            sizes.append(len(msgpack.decode(raw or b"")["ids"]))
        elif script is DROP:
            sizes.append(len(argument["ids"]))
        return raw

    monkeypatch.setattr(backend._link, "run_for", noted)
    assert (await backend.purge()).kinds == {kind: {"cancelled": 350}}
    assert sizes == [100, 50, 50, 100, 50, 50, 100, 50, 50, 50, 50]


async def test_a_purge_that_takes_long_goes_on_in_the_next_call(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "_CALL", 0.0)  # one page for each call
    backend = opened(prefix=f"p-{kind}")
    for name in (f"{kind}-a", f"{kind}-b"):
        await ended(backend, name, 150)
    for dry_run in (True, False):
        steps = [await backend.purge(dry_run=dry_run)]
        while steps[-1].cursor is not None:
            steps.append(await backend.purge(dry_run=dry_run, cursor=steps[-1].cursor))
        assert [step.kinds for step in steps] == [
            {f"{kind}-a": {"cancelled": 100}}, {f"{kind}-a": {"cancelled": 50}},
            {f"{kind}-b": {"cancelled": 100}}, {f"{kind}-b": {"cancelled": 50}},
        ]  # fmt: skip
    assert (await backend.purge()).kinds == {}


async def test_a_purge_goes_on_behind_the_last_task_even_if_that_was_removed(opened: Open, kind: str) -> None:
    backend = opened(prefix=f"p-{kind}")
    ids = await ended(backend, kind, 3)
    at = await backend._link.command("ZSCORE", backend._link.keys.one(kind, "ended"), ids[1])  # of all three
    cursor = f"{kind}/{at:.0f}/{ids[1]}"
    assert (await backend.purge(cursor=cursor, dry_run=True)).kinds == {kind: {"cancelled": 1}}
    await backend._maintenance.drop(kind, [ids[1]], 0)
    assert (await backend.purge(cursor=cursor, dry_run=True)).kinds == {kind: {"cancelled": 2}}


async def test_a_task_that_a_purge_has_chosen_is_not_redriven(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id may be free already. A purge that stops there is completed by the next one."""
    backend = opened(prefix=f"p-{kind}", retention=100 * 365 * 86400)
    await settle(backend, await held(backend, kind, id="a", max_attempts=1), "retry")
    forget = backend._register.forget

    async def stops(kind: str, ids: Sequence[str]) -> None:
        await forget(kind, ids)
        raise Unavailable("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(backend._register, "forget", stops)
        with pytest.raises(Unavailable):
            await backend.purge()
    assert [task.verdict for task in (await backend.redrive(kind=kind)).tasks] == ["gone"]
    assert await claim(backend, kind) == []
    assert (await backend.purge()).kinds == {kind: {"dead": 1}}


async def test_maintenance_completes_a_purge_whose_client_has_died(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(prefix=f"p-{kind}")
    await ended(backend, kind, 2)
    await backend.maintain()  # from here on, the kind is due when the retention of its tasks is over

    async def dies(kind: str, ids: Sequence[str]) -> None:
        raise Unavailable("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(backend._register, "forget", dies)
        with pytest.raises(Unavailable):
            await backend.purge()
    await backend.maintain()
    assert (await backend.list_tasks(kind=kind)).tasks == []


async def test_a_task_that_was_scheduled_anew_during_a_purge_is_kept_and_found_by_its_id(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has purged the earlier task of that id."""
    backend = opened(prefix=f"p-{kind}")
    for task_id in ("a", "b"):
        await settle(backend, await held(backend, kind, id=task_id, max_attempts=1), "retry")
    forget = backend._register.forget

    async def anew(kind: str, ids: Sequence[str]) -> None:
        monkeypatch.undo()
        await backend._maintenance.drop(kind, ["a"], 0)
        await backend.schedule([NewTask(kind=kind, id="a")])
        await forget(kind, ids)

    monkeypatch.setattr(backend._register, "forget", anew)
    assert (await backend.purge()).kinds == {kind: {"dead": 1}}
    assert [task.id for task in await claim(backend, kind)] == ["a"]
    found = await backend.get("a")
    assert found is not None
    assert found.status is Status.CLAIMED
    assert await backend.get("b") is None


async def test_an_id_that_another_kind_has_got_during_a_purge_stays_with_that_kind(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has purged the earlier task of that id."""
    backend = opened(prefix=f"p-{kind}")
    (task_id,) = await ended(backend, kind, 1)
    forget = backend._register.forget

    async def late(kind: str, ids: Sequence[str]) -> None:
        monkeypatch.undo()
        await backend.purge()
        await backend.schedule([NewTask(kind=f"{kind}-2", id=task_id)])
        await forget(kind, ids)

    monkeypatch.setattr(backend._register, "forget", late)
    assert (await backend.purge()).kinds == {}
    assert (await backend.get(task_id)).kind == f"{kind}-2"  # type: ignore[union-attr]


async def test_a_task_that_is_scheduled_while_a_purge_removes_the_earlier_one_is_found_by_its_id(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(prefix=f"p-{kind}")
    (task_id,) = await ended(backend, kind, 1)
    reserve = backend._register.reserve

    async def reserved_before(wanted: Sequence[tuple[str, str]]) -> list[Owner]:
        monkeypatch.undo()
        owners = await reserve(wanted)
        assert (await backend.purge()).kinds == {kind: {"cancelled": 1}}
        return owners

    monkeypatch.setattr(backend._register, "reserve", reserved_before)
    (scheduled,) = await backend.schedule([NewTask(kind=kind, id=task_id)])
    assert scheduled.created
    assert [verdict.verdict for verdict in await backend.cancel([task_id])] == ["cancelled"]


async def test_a_purge_leaves_a_task_that_it_has_not_chosen_under_an_id_that_it_has(
    opened: Open, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has purged the chosen task; the next one of that id is dead, and may be redriven."""
    backend = opened(prefix=f"p-{kind}")
    await settle(backend, await held(backend, kind, id="a"))
    forget = backend._register.forget

    async def late(kind: str, ids: Sequence[str]) -> None:
        monkeypatch.undo()
        await backend.purge()
        await settle(backend, await held(backend, kind, id="a"), "fatal")
        await forget(kind, ids)

    monkeypatch.setattr(backend._register, "forget", late)
    assert (await backend.purge(status=Status.SUCCESS)).kinds == {}
    assert [task.verdict for task in (await backend.redrive(["a"])).tasks] == ["redriven"]
