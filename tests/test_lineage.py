"""The task in whose run code is: that of the innermost block that is not over."""

from contextvars import copy_context
from unittest.mock import Mock

import leasekit
from leasekit import Client, _lineage


def test_code_is_in_the_run_of_the_innermost_block(client: Client) -> None:
    first, second = (next(client.tasks("k")) for _ in (client.schedule("k"), client.schedule("k")))
    with leasekit.lease(first):
        assert _lineage.current() == first.id
        with leasekit.lease(second):
            assert _lineage.current() == second.id
        assert _lineage.current() == first.id
    assert _lineage.current() is None


def test_code_that_outlives_a_block_is_in_its_run_no_longer(client: Client) -> None:
    client.schedule("k")
    task = next(client.tasks("k"))
    with leasekit.lease(task):
        left = copy_context()  # as each task of asyncio, and each job of `asyncio.to_thread`, has one
        assert left.run(_lineage.current) == task.id
    assert left.run(_lineage.current) is None
    late = client.get(left.run(client.schedule, "k").id)
    assert late is not None
    assert late.parent is None


def test_within_a_run_that_is_over_code_is_in_the_one_around_it(client: Client) -> None:
    first, second = (next(client.tasks("k")) for _ in (client.schedule("k"), client.schedule("k")))
    with leasekit.lease(first):
        inner = Mock(is_over=False)
        _lineage.enter(second, inner)  # and never left, as after an interrupt
        assert _lineage.current() == second.id
        inner.is_over = True
        assert _lineage.current() == first.id
        del inner
        assert _lineage.current() == first.id
    assert _lineage.current() is None
