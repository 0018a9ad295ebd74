"""Messages that are received, as claimed tasks."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from leasekit.errors import BackendError, ProtocolError
from leasekit.task import Task
from leasekit_sqs.address import Address
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Answer, Calls, mappings
from leasekit_sqs.messages import Received, plain_id
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipts
from leasekit_sqs.stash import Stash

__all__ = ["Receiver"]

logger = logging.getLogger("leasekit")

_MOST = 10  # messages of one call
_TURN = 1  # seconds of one look at one of several queues
_ELSEWHERE = 10  # seconds for which a message that is not for us is left to others
_MOST_SAID = 10
_KEEP = 10.0  # seconds for which what came to one claim is kept for another
_CLOSING = 6.0  # seconds: longer than a poll as it is by default


Poll = asyncio.Future[Answer]


class Receiver:
    """The receives of one connection."""

    def __init__(
        self, calls: Calls, queues: Queues, receipts: Receipts, address: Address, clock: Callable[[], float]
    ) -> None:
        self._calls = calls
        self._queues = queues
        self._receipts = receipts
        self._address = address
        self._clock = clock
        self._turns = 0
        self._said: set[str] = set()
        self._stash = Stash(self._unwanted, keep=min(_KEEP, address.ttl / 4), clock=clock)
        self._left: set[Poll] = set()  # under way, and nobody waits for them any more
        self._returning: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def take(self, kinds: Sequence[str], limit: int, wait: float, claim_id: str) -> list[Task]:
        """Up to `limit` tasks of these kinds, as soon as there is one. Raises `BackendError` where nothing came."""
        queues = await self._asked(kinds)
        # How long a message has been ours when its answer comes is not known: as long as the poll, at worst.
        ends_at = self._clock() + min(wait, self._address.wait, max(1, self._address.ttl // 4))
        attempts = (plain_id(f"{claim_id}-{n}") for n in itertools.count())
        tasks: list[Task] = []
        looks: float = 0 if len(queues) > 1 else math.inf  # at each of several before any is waited for
        while True:
            for url, asked in queues:
                until = min(self._clock() + looks, ends_at)
                try:
                    await self._drain(url, asked, tasks, limit, until, attempts)
                except BackendError:
                    if not tasks:
                        raise
                except asyncio.CancelledError:
                    for task in tasks:  # for the next claim, or back
                        self._stash.put(task)
                    raise
                if len(tasks) >= limit:
                    return tasks
            if tasks or self._clock() >= ends_at:
                return tasks
            looks = _TURN if len(queues) > 1 else math.inf

    async def _asked(self, kinds: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        """The queues to look at, each with the kinds that may come from there; the first is another one each time."""
        if not self._address.is_template:
            return [(await self._queues.of(kinds[0]), kinds)]
        queues: list[tuple[str, Sequence[str]]] = [(await self._queues.of(kind), [kind]) for kind in kinds]
        self._turns += 1
        first = self._turns % len(queues)
        return queues[first:] + queues[:first]

    async def _drain(
        self,
        url: str,
        asked: Sequence[str],
        tasks: list[Task],
        limit: int,
        until: float,
        attempts: Iterator[str],
    ) -> None:
        """Add tasks of one queue, in as many calls as it takes, as long as messages come."""
        while True:
            tasks += self._stash.take(asked, limit - len(tasks))
            if len(tasks) >= limit:
                return
            wait = 0 if tasks else max(0, math.ceil(until - self._clock() - 0.001))
            asked_at = self._clock()
            poll = self._poll(url, min(limit - len(tasks), _MOST), wait, next(attempts))
            if not await self._came(poll, asked, partial(self._came_late, url, asked, asked_at)):
                continue
            messages = mappings(poll.result(), "Messages")
            ours, others = self._sorted(messages, url, asked, asked_at)
            tasks += ours
            if not messages:
                tasks += self._stash.take(asked, limit - len(tasks))
                return
            await self._leave(others)

    async def _came(self, poll: Poll, asked: Sequence[str], late: Callable[[Poll], None]) -> bool:
        """Wait for it: True when it is answered, False when another claim has got what this one has asked for.

        A poll that is waited for no more goes on, and `late` hears of its end.
        """
        elsewhere = self._stash.expect(asked)
        try:
            either: list[asyncio.Future[Any]] = [poll, elsewhere]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return True
        except asyncio.CancelledError:
            self._leave_behind(poll, late)  # also where it was answered at this very moment
            raise
        finally:
            elsewhere.cancel()
        self._leave_behind(poll, late)
        return False

    def _leave_behind(self, poll: Poll, late: Callable[[Poll], None]) -> None:
        self._left.add(poll)
        poll.add_done_callback(late)

    def _poll(self, url: str, count: int, wait: int, attempt: str) -> Poll:
        # A FIFO queue gives a receive that is tried again, because its answer was lost, the same messages.
        more = {"ReceiveRequestAttemptId": attempt} if self._address.is_fifo else {}
        return self._calls.start(
            "receive_message",
            is_poll=True,
            missed=partial(self._give_back, url),
            QueueUrl=url,
            MaxNumberOfMessages=count,
            WaitTimeSeconds=wait,
            VisibilityTimeout=self._address.ttl,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["ApproximateReceiveCount", "MessageGroupId"],
            **more,
        )

    def _came_late(self, url: str, asked: Sequence[str], asked_at: float, poll: Poll) -> None:
        self._left.discard(poll)
        if not poll.cancelled() and poll.exception() is None:
            self._later(self._keep(mappings(poll.result(), "Messages"), url, asked, asked_at))

    async def _keep(
        self, messages: Sequence[Mapping[str, Any]], url: str, asked: Sequence[str], asked_at: float
    ) -> None:
        ours, others = self._sorted(messages, url, asked, asked_at)
        for task in ours:
            self._stash.put(task)
        await self._leave(others)

    def _later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def _unwanted(self, task: Task) -> None:
        """Nobody has taken it: others may."""
        receipt = self._receipts.find(task.id, task.token)
        if receipt is not None:
            self._later(self._leave([Item(receipt.url, _hidden(task.token, 0 if self._closing else _ELSEWHERE))]))

    async def _leave(self, items: Sequence[Item]) -> None:
        """A courtesy: where it fails, their time runs out."""
        await in_batches(self._calls, "change_message_visibility_batch", items)

    async def aclose(self) -> None:
        """Give back what is kept here, and what polls still bring: in a few seconds, or when they do."""
        self._closing = True
        if self._left:
            await asyncio.wait(list(self._left), timeout=_CLOSING)
        for poll in list(self._left):
            poll.cancel()
        await asyncio.sleep(0)  # for what the last of them has brought
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=_CLOSING)
        self._stash.empty()
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=_CLOSING)

    def _sorted(
        self, messages: Sequence[Mapping[str, Any]], url: str, asked: Sequence[str], asked_at: float
    ) -> tuple[Sequence[Task], Sequence[Item]]:
        """The tasks among these messages, and what is of a kind that nobody has asked for: that is left to others."""
        tasks: list[Task] = []
        others: list[Item] = []
        for message in messages:
            try:
                received = Received.of(message)
                kind = self._kind(received, asked)
                if kind is None:
                    others.append(Item(url, _hidden(received.handle, _ELSEWHERE)))
                    continue
                task = received.task(kind=kind, ttl=self._address.ttl)
            except ProtocolError as error:
                logger.error("a message of queue %s is left alone: %s", self._address.queue, error)
                continue
            receipt = received.receipt(url)
            receipt.hidden(asked_at, self._address.ttl)
            self._receipts.add(receipt)
            if kind in asked:
                tasks.append(task)
            else:
                self._stash.put(task)
        return tasks, others

    def _kind(self, received: Received, asked: Sequence[str]) -> str | None:
        """Which kind it is of those that were asked for, here or by another claim; None where it is none of them."""
        if self._address.is_template:
            return asked[0]
        kind = received.kind or self._address.kind or (asked[0] if len(asked) == 1 else None)
        if kind is not None and (kind in asked or self._stash.serves(kind)):
            return kind
        if kind is None:
            self._say("names no kind, and several are asked for: say in the URL of which one such are (kind=…)")
        else:
            self._say(f"is of kind {kind!r}, which is not asked for; each time it comes counts as a receive")
        return None

    def _say(self, why: str) -> None:
        if why not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(why)
            logger.warning("a message of queue %s %s", self._address.queue, why)

    def _give_back(self, url: str, answer: Answer) -> None:
        """What came when its claim had been given up. In the receive's thread; a courtesy: else its time runs out."""
        handles = [one.get("ReceiptHandle") for one in mappings(answer, "Messages")]
        entries = [{"Id": str(n), "ReceiptHandle": handle, "VisibilityTimeout": 0} for n, handle in enumerate(handles)]
        if entries:
            try:
                self._calls.now("change_message_visibility_batch", QueueUrl=url, Entries=entries)
            except BackendError as error:
                logger.debug("messages that came for nobody could not be given back: %s", error)


def _hidden(handle: str, seconds: int) -> dict[str, Any]:
    return {"ReceiptHandle": handle, "VisibilityTimeout": seconds}
