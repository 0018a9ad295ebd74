"""A tenant that floods the service: other tenants wait hardly longer, and what the flood leaves behind is bounded.

Waits are counted in claims, not in seconds, so that they are the same on every machine.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from leasekit.server.roles.retention import CLAIM_MEMORY
from leasekit.server.store import RETENTION
from leasekit.task import KindSettings, NewTask
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

ROUNDS = 12
CLAIMS = 6  # in a round, of one task each: all that the workers can do


async def longest_wait(bench: Bench, *, loud: int, of_loud: Mapping[str, Any], of_quiet: Mapping[str, Any]) -> int:
    """Return the most claims that a task of the quiet tenant waited for, while the loud one submits `loud` a round."""
    waits: dict[str, int] = {}
    longest = 0
    for n in range(ROUNDS):
        await bench.engine.schedule([NewTask(id=f"loud{n}-{at}-{loud}", **of_loud) for at in range(loud)])
        await bench.engine.schedule([NewTask(id=f"quiet{n}-{loud}", **of_quiet)])
        waits[f"quiet{n}-{loud}"] = 0
        for _ in range(CLAIMS):
            granted = set(await bench.ids(kinds=("loud", "quiet"), limit=1))
            waits = {task_id: count + 1 for task_id, count in waits.items()}
            longest = max([longest, *(waits.pop(task_id) for task_id in granted & waits.keys())])
        bench.clock.advance(1)
    return max([longest, *waits.values()])


async def test_a_kind_that_gets_ten_times_what_can_be_done_delays_another_kind_no_longer(bench: Bench) -> None:
    of_loud, of_quiet = {"kind": "loud"}, {"kind": "quiet"}
    busy = await longest_wait(bench, loud=CLAIMS, of_loud=of_loud, of_quiet=of_quiet)
    flooded = await longest_wait(bench, loud=10 * CLAIMS, of_loud=of_loud, of_quiet=of_quiet)
    assert flooded <= 2 * busy <= CLAIMS


async def test_a_key_that_gets_ten_times_what_can_be_done_delays_another_key_no_longer(bench: Bench) -> None:
    of_loud, of_quiet = {"kind": "loud", "key": "loud"}, {"kind": "loud", "key": "quiet"}
    busy = await longest_wait(bench, loud=CLAIMS, of_loud=of_loud, of_quiet=of_quiet)
    flooded = await longest_wait(bench, loud=10 * CLAIMS, of_loud=of_loud, of_quiet=of_quiet)
    assert flooded <= 2 * busy <= CLAIMS


async def test_a_flood_of_urgent_tasks_does_not_starve_a_kind_that_ages(bench: Bench) -> None:
    await bench.engine.operations.set_kind("quiet", KindSettings(aging=5), by=None)
    await bench.put("waits", kind="quiet", priority=4)
    for n in range(6):
        await bench.put(*(f"loud{n}-{at}" for at in range(10)), kind="loud", priority=0)
        bench.clock.advance(1)
    assert "waits" in await bench.ids(kinds=("loud", "quiet"), limit=2)


async def test_a_quota_of_a_key_holds_however_much_it_submits(bench: Bench) -> None:
    await bench.engine.operations.set_kind("k", KindSettings(key_concurrency=2), by=None)
    await bench.put(*(f"loud{n}" for n in range(50)), key="loud")
    await bench.put("quiet", key="quiet")
    granted = await bench.ids(limit=50)
    assert len(granted) == 3
    assert "quiet" in granted


async def test_dead_tasks_and_memories_of_requests_go_with_time(bench: Bench) -> None:
    await bench.put(*(f"dead{n}" for n in range(20)), max_attempts=1, dedupe_key=None)
    await bench.put("first", dedupe_key="order-7", max_attempts=1)
    for task in (await bench.claim(claim_id="claim")).tasks:
        await bench.settle(task, "retry")
    assert (await bench.engine.queries.stats()).kinds == {"k": {"dead": 21}}
    bench.clock.advance(RETENTION + CLAIM_MEMORY)
    await bench.engine.sweeper.sweep()
    assert (await bench.engine.queries.stats()).kinds == {}
    (again,) = await bench.put("second", dedupe_key="order-7")
    assert again.created
    (task,) = (await bench.claim(claim_id="claim")).tasks  # the answer of the claim before is forgotten
    assert task.id == "second"
