"""The marks of searches: read by the servers of one store, and by nobody else."""

import re
import secrets
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasekit.server.engine import Engine
from leasekit.server.marks import Marks
from leasekit.server.store.sqlite.store import SqliteStore
from leasekit.wire import CancelMatchingRequest, NewTaskItem, PurgeRequest, RedriveRequest

KEY = secrets.token_hex(32)
MARKS = Marks(lambda: KEY)
NUMBERS = st.integers(0, 10**18 - 1).map(str)


@given(NUMBERS)
def test_a_mark_is_read_under_its_own_key_only(number: str) -> None:
    mark = MARKS.seal(number)
    assert MARKS.open(mark) == number
    assert Marks(lambda: "0" * 32).open(mark) == ""


@given(NUMBERS, NUMBERS)
def test_marks_of_two_numbers_differ_but_for_their_length(one: str, other: str) -> None:
    assert len(MARKS.seal(one)) == len(MARKS.seal(other))
    assert (MARKS.seal(one) == MARKS.seal(other)) == (one == other)


@given(NUMBERS, st.integers(0, 63), st.sampled_from("AZaz09-_"))
def test_a_changed_mark_is_none(number: str, at: int, letter: str) -> None:
    mark = MARKS.seal(number)
    changed = mark[:at] + letter + mark[at + 1 :]
    assert MARKS.open(changed) == (number if changed == mark else "")


@given(st.text())
def test_a_made_up_mark_is_none(text: str) -> None:
    assert MARKS.open(text) == ""


def test_marks_of_neighbours_have_nothing_in_common() -> None:
    marks = [MARKS.seal(str(number)) for number in range(1000)]
    starts = {mark[:8] for mark in marks}
    ends = {mark[-8:] for mark in marks}
    assert (len(starts), len(ends)) == (1000, 1000)


@pytest.mark.anyio
async def test_after_a_restart_a_list_and_a_bulk_act_go_on_where_they_were(tmp_path: Path) -> None:
    async with Engine(SqliteStore(tmp_path / "store.db")) as first:
        await first.schedule([NewTaskItem(kind="own", id=f"t-{n}") for n in range(5)])
        page = await first.queries.list_tasks(limit=2)
        counted = await first.operations.cancel_matching(CancelMatchingRequest(kind="own", dry_run=True))
    assert page.cursor is not None

    async with Engine(SqliteStore(tmp_path / "store.db")) as second:
        rest = await second.queries.list_tasks(cursor=page.cursor, limit=5)
        done = await second.operations.cancel_matching(CancelMatchingRequest(kind="own", token=counted.token))
    assert [task.id for task in rest.tasks] == ["t-2", "t-3", "t-4"]
    assert done.kinds == counted.kinds == {"own": {"new": 5}}


@pytest.mark.anyio
async def test_the_numbers_of_the_store_are_in_no_answer(tmp_path: Path) -> None:
    """Each answer that has a place in the store, as it is for a store of few tasks and for one of many."""
    answers: list[list[str | None]] = []
    for count in (3, 2000):
        async with Engine(SqliteStore(tmp_path / f"{count}.db")) as engine:
            for first in range(0, count, 1000):
                await engine.schedule([NewTaskItem(kind="other") for _ in range(first, min(count, first + 1000))])
            await engine.schedule([NewTaskItem(kind="own", id=f"t-{n}") for n in range(300)])
            page = await engine.queries.list_tasks(kind="own", limit=2)
            counted = await engine.operations.cancel_matching(CancelMatchingRequest(kind="own", dry_run=True))
            step = await engine.operations.cancel_matching(CancelMatchingRequest(kind="own", token=counted.token))
            purged = await engine.operations.purge(PurgeRequest(kind="own", older_than=0.0))
            dead = await engine.operations.redrive(RedriveRequest(kind="own", dry_run=True, limit=1))
            answers.append([page.cursor, counted.token, step.cursor, purged.cursor, dead.cursor])
    few, many = answers
    assert [len(text or "") for text in few] == [len(text or "") for text in many]
    assert not any(text and re.search(rf"(?<!\d){place}(?!\d)", text) for text in many for place in range(2000, 2301))
