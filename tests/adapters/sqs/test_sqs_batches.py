"""What SQS answers to a batch counts for that batch."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leasekit.errors import ProtocolError
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Calls

pytestmark = pytest.mark.anyio


class _Repeating:
    """Calls whose first answer a proxy delivers to all later ones too."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None

    def start(self, operation: str, **params: Any) -> "asyncio.Future[dict[str, Any]]":
        if self.answer is None:
            self.answer = {"Successful": [{"Id": entry["Id"]} for entry in params["Entries"]]}
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(self.answer)
        return answer


async def test_an_answer_that_is_delivered_twice_acknowledges_nothing_else() -> None:
    calls, items = cast("Calls", _Repeating()), [Item("queue", {"ReceiptHandle": "r"})] * 2
    assert await in_batches(calls, "change_message_visibility_batch", items) == [None, None]
    again = await in_batches(calls, "change_message_visibility_batch", items)
    assert [type(error) for error in again] == [ProtocolError] * 2


async def test_a_large_batch_is_sent_in_a_few_calls_at_a_time() -> None:
    """Each call has a thread, whose number is bounded."""
    under_way: list[asyncio.Future[dict[str, Any]]] = []

    def start(operation: str, **params: Any) -> "asyncio.Future[dict[str, Any]]":
        answer = asyncio.get_running_loop().create_future()
        under_way.append(answer)
        assert sum(not call.done() for call in under_way) <= 20
        ids = [{"Id": entry["Id"]} for entry in params["Entries"]]
        asyncio.get_running_loop().call_soon(answer.set_result, {"Successful": ids})
        return answer

    calls = cast("Calls", SimpleNamespace(start=start))
    assert await in_batches(calls, "send_message_batch", [Item("queue", {})] * 1000) == [None] * 1000
    assert len(under_way) == 100
