"""Receive messages as claimed tasks.

Rule 1: a message is given back only while no other receiver can have it when the call arrives (`endings`, Rule 1), also
        if the answer that brought it was late.
Rule 2: a receipt handle counts once: an answer that a proxy delivers twice would otherwise bring a message as if it had
        been received just now, though another receiver may have it.
Rule 3: a FIFO queue is asked for one message at a time; until that ends, it hides the rest of the message's group. A
        call for more may bring several messages of a group: the second would not wait for the end of the first.
Rule 4: a queue whose messages name no kind, where several kinds are asked for, is not read any further: each receive
        would bring them nearer to the dead-letter queue. Single messages without a kind, among others that name one,
        are left to the dead-letter queue.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from leasekit.errors import BackendError, ProtocolError, Refused, Unavailable
from leasekit.task import Exponential, FixedDelays, RetryPolicy, Task
from leasekit_aws.errors import Forbidden
from leasekit_sqs.address import Address
from leasekit_sqs.batches import Item, in_batches
from leasekit_sqs.calls import Answer, Calls, mappings
from leasekit_sqs.messages import Received, plain_id
from leasekit_sqs.queues import Queues
from leasekit_sqs.receipts import Receipt, Receipts, give_back_until
from leasekit_sqs.unclaimed import Unclaimed

logger = logging.getLogger("leasekit")

_MOST = 10  # messages of one call
_TURN = 1  # seconds of one poll of one of several queues …
_SLOW = 3.0  # … and for its answer: then the next queue is read
_ELSEWHERE = 10  # seconds until a message of a kind that is not claimed here is visible to other workers
_MOST_SAID = 10
_STRAYS = 10  # messages without a kind that may follow many with one
_KEEP = 10.0  # seconds for which a message that came to one claim is kept for another
_CLOSING = 6.0  # seconds: longer than a poll of the default length


Poll = asyncio.Future[Answer]


class Receiver:
    """Receive the messages of one connection."""

    def __init__(
        self, calls: Calls, queues: Queues, receipts: Receipts, address: Address, clock: Callable[[], float]
    ) -> None:
        self._calls = calls
        self._queues = queues
        self._receipts = receipts
        self._address = address
        self._clock = clock
        self._turns = 0
        self._kinds: set[str] = set()  # of the workers here
        self._said: set[str] = set()
        self._with_kind = 0  # messages that named a kind, less those that named none; at most `_STRAYS`
        self._refusal: str | None = None  # why this queue is not read any further
        self._unclaimed = Unclaimed(self._release, keep=min(_KEEP, address.ttl / 4), clock=clock)
        self._left: set[Poll] = set()  # polls under way whose claims have ended
        self._returning: set[asyncio.Task[Any]] = set()
        self._closing = False

    def hear_of(self, kinds: Collection[str]) -> None:
        """Note that these kinds are run here, though a kind without a free slot may not be claimed for long."""
        self._kinds.update(kinds)

    async def take(self, kinds: Sequence[str], limit: int, wait: float, claim_id: str) -> list[Task]:
        """Wait up to `wait` seconds for a task of these kinds; return at most `limit`. Raise if a call to SQS fails."""
        self._unclaimed.ask(kinds)
        queues = self._queues_in_turn(kinds)
        # When a poll is answered, its messages may have been leased for as long as the poll took.
        ends_at = self._clock() + min(wait, self._address.longest_poll)
        attempts = (plain_id(f"{claim_id}-{n}") for n in itertools.count())
        tasks: list[Task] = []
        looks: float = 0 if len(queues) > 1 else math.inf  # of several, each is read before any is waited for
        while True:
            refusal: BackendError | None = None
            for kind, asked in queues:
                until = min(self._clock() + looks, ends_at)
                patience = max(0.0, until - self._clock()) + _SLOW if len(queues) > 1 else None
                draining = self._drain_in_time(kind, asked, tasks, limit, until, attempts, patience)
                refusal = await draining or refusal
                if len(tasks) >= limit:
                    return tasks
            if refusal is not None and not tasks:
                raise refusal
            if tasks or self._clock() >= ends_at:
                return tasks
            looks = _TURN if len(queues) > 1 else math.inf

    def _queues_in_turn(self, kinds: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        """Return a kind of each queue to read and the kinds that it may contain; another queue is first each time."""
        if not self._address.is_template:
            return [(kinds[0], kinds)]
        queues: list[tuple[str, Sequence[str]]] = [(kind, [kind]) for kind in kinds]
        self._turns += 1
        first = self._turns % len(queues)
        return queues[first:] + queues[:first]

    async def _drain_in_time(
        self,
        kind: str,
        asked: Sequence[str],
        tasks: list[Task],
        limit: int,
        until: float,
        attempts: Iterator[str],
        patience: float | None,
    ) -> BackendError | None:
        """Do what `_drain` does with the queue of a kind; return why it cannot be read, if that concerns it alone."""
        try:
            async with asyncio.timeout(patience):
                await self._drain(await self._queues.of(kind), asked, tasks, limit, until, attempts)
        except (Refused, Forbidden) as error:
            return error
        except TimeoutError:  # what the poll still brings is kept for the next claim
            return Unavailable(f"queue {self._address.queue_of(kind)!r} does not answer in time")
        except BackendError:
            if not tasks:
                raise
        except asyncio.CancelledError:
            for task in tasks:  # kept for the next claim, or released
                self._unclaimed.put(task)
            raise
        return None

    async def _drain(
        self, url: str, asked: Sequence[str], tasks: list[Task], limit: int, until: float, attempts: Iterator[str]
    ) -> None:
        """Add tasks of one queue to `tasks`, in as many calls as it takes, as long as messages come."""
        while True:
            tasks += self._unclaimed.take(asked, limit - len(tasks))
            if len(tasks) >= limit:
                return
            if self._refusal is not None:
                raise Refused(self._refusal)
            wait = 0 if tasks else max(0, math.ceil(until - self._clock() - 0.001))
            asked_at = self._clock()
            most = 1 if self._address.is_fifo else _MOST
            poll = self._poll(url, min(limit - len(tasks), most), wait, next(attempts), asked_at)
            if not await self._came(poll, asked, partial(self._came_late, url, asked, asked_at)):
                continue
            messages = mappings(poll.result(), "Messages")
            ours, others = self._take_in(messages, url, asked, asked_at)
            tasks += ours
            if not messages:
                tasks += self._unclaimed.take(asked, limit - len(tasks))
                return
            await self._change_visibility(others)

    async def _came(self, poll: Poll, asked: Sequence[str], late: Callable[[Poll], None]) -> bool:
        """Wait for a poll: True when it is answered, False when a task of these kinds came to another claim instead.

        A poll that is no longer waited for goes on, and `late` is called at its end.
        """
        elsewhere = self._unclaimed.expect(asked)
        try:
            either: list[asyncio.Future[Any]] = [poll, elsewhere]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return True
        except asyncio.CancelledError:
            self._leave_behind(poll, late)  # also if the answer came at the same moment
            raise
        finally:
            elsewhere.cancel()
        self._leave_behind(poll, late)
        return False

    def _leave_behind(self, poll: Poll, late: Callable[[Poll], None]) -> None:
        self._left.add(poll)
        poll.add_done_callback(late)

    def _poll(self, url: str, count: int, wait: int, attempt: str, asked_at: float) -> Poll:
        # With the same attempt id, a FIFO queue gives the same messages again to a receive whose answer was lost.
        more: dict[str, Any] = {"ReceiveRequestAttemptId": attempt} if self._address.is_fifo else {}
        return self._calls.start(
            "receive_message",
            is_poll=True,
            missed=partial(self._give_back, url, asked_at),
            QueueUrl=url,
            MaxNumberOfMessages=count,
            WaitTimeSeconds=wait,
            VisibilityTimeout=self._address.ttl,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
            **more,
        )

    def _came_late(self, url: str, asked: Sequence[str], asked_at: float, poll: Poll) -> None:
        self._left.discard(poll)
        if not poll.cancelled() and poll.exception() is None:
            self._in_background(self._keep(mappings(poll.result(), "Messages"), url, asked, asked_at))

    async def _keep(
        self, messages: Sequence[Mapping[str, Any]], url: str, asked: Sequence[str], asked_at: float
    ) -> None:
        ours, others = self._take_in(messages, url, asked, asked_at)
        for task in ours:
            self._unclaimed.put(task)
        await self._change_visibility(others)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    def _release(self, task: Task) -> None:
        """Make an unclaimed message visible again, and warn if it came to a claim for other kinds, as it will again."""
        if not self._closing and len(self._unclaimed.known) > 1:
            self._warn(
                f"is of kind {task.kind!r}, for which no slot was free in time; each time it comes counts as a "
                "receive: give kinds that have slots of their own a queue each"
            )
        receipt = self._receipts.find(task.id, task.token)
        if receipt is not None and self._clock() < receipt.returns_until:
            entry = _visibility(task.token, 0 if self._closing else _ELSEWHERE)
            self._in_background(self._change_visibility([Item(receipt.url, entry, leaves_by=receipt.returns_until)]))

    async def _change_visibility(self, items: Sequence[Item]) -> None:
        """Change when messages are visible again; a failure does no harm, because their leases expire by themselves."""
        await in_batches(self._calls, "change_message_visibility_batch", items)

    async def aclose(self) -> None:
        """Release the messages that are kept here and that polls still bring, within seconds or when they arrive."""
        self._closing = True
        if self._left:
            await asyncio.wait(list(self._left), timeout=_CLOSING)
        for poll in list(self._left):
            poll.cancel()
        await asyncio.sleep(0)  # let the callbacks of the last polls run
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=_CLOSING)
        self._unclaimed.empty()
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=_CLOSING)

    def _take_in(
        self, messages: Sequence[Mapping[str, Any]], url: str, asked: Sequence[str], asked_at: float
    ) -> tuple[Sequence[Task], Sequence[Item]]:
        """Add receipts; keep other claims' tasks; return the `asked` tasks, and calls that leave others' messages."""
        tasks: list[Task] = []
        others: list[Item] = []
        repeated = 0
        for message in messages:
            try:
                received = Received.of(message, self._address.kind_attribute)
                if received.handle in self._receipts:
                    repeated += 1
                    continue
                kind = self._kind(received, asked)
                task = received.task(kind=kind, ttl=self._address.ttl) if kind is not None else None
            except ProtocolError as error:
                logger.error("a message of queue %s cannot be read and is ignored: %s", self._address.queue, error)
                continue
            receipt = received.receipt(url, self._policy(received))
            receipt.hidden(asked_at, self._address.ttl)
            self._receipts.add(receipt)
            if task is None:
                others += self._leave(receipt)
            elif kind in asked:
                tasks.append(task)
            else:
                self._unclaimed.put(task)
        if repeated:
            self._distrust_connection(repeated)
        return tasks, others

    def _distrust_connection(self, repeated: int) -> None:
        """Close the connection on which messages came again: later answers on it may belong to earlier requests."""
        self._calls.close()
        why = "their receipt handles came before: is a proxy in between?"
        logger.warning("messages of queue %s are ignored (%d): %s", self._address.queue, repeated, why)

    def _leave(self, receipt: Receipt) -> list[Item]:
        """Leave a message of a kind that is not this client's to other receivers; return the calls that do so."""
        self._receipts.settled(receipt, "release")
        if self._clock() >= receipt.returns_until:
            return []
        return [Item(receipt.url, _visibility(receipt.handle, _ELSEWHERE), leaves_by=receipt.returns_until)]

    def _kind(self, received: Received, asked: Sequence[str]) -> str | None:
        """Return the kind of a message if this claim or another one has asked for that kind, else None."""
        if self._address.is_template:
            return asked[0]
        several = len(self._all_kinds(asked)) > 1
        kind = received.kind or self._address.kind or (None if several else asked[0])
        self._with_kind = min(_STRAYS, self._with_kind + (1 if received.kind is not None else -1))
        if kind is not None and (kind in asked or self._unclaimed.serves(kind)):
            return kind
        if kind is None and self._with_kind < 0:
            self._stop(asked)
        elif kind is None:
            self._warn("names no kind, and several are asked for: set kind=… or kind_attribute=… in the URL")
        else:
            self._warn(f"is of kind {kind!r}, which is not asked for; each time it comes counts as a receive")
        return None

    def _all_kinds(self, asked: Sequence[str]) -> set[str]:
        return {*asked, *self._kinds, *self._unclaimed.served()}

    def _policy(self, received: Received) -> RetryPolicy:
        """Return how long a message waits after a failure: as after the death of its worker if nothing else is said."""
        delay = self._address.ttl if self._address.retry is None else self._address.retry
        usual = Exponential() if received.is_scheduled else FixedDelays(waits=[delay])
        return received.retry or usual

    def _stop(self, asked: Sequence[str]) -> None:
        if self._refusal is None:
            kinds = ", ".join(sorted(self._all_kinds(asked))[:_MOST_SAID])
            self._refusal = (
                f"messages of queue {self._address.queue} name no kind, and several are asked for ({kinds}): no more "
                "are received, because each receive brings them nearer to the dead-letter queue. Set kind=… or "
                "kind_attribute=… in the URL, or have their sender set the attribute leasekit.kind; then start again"
            )
            logger.error("%s", self._refusal)

    def _warn(self, why: str) -> None:
        if why not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(why)
            logger.warning("a message of queue %s %s", self._address.queue, why)

    def _give_back(self, url: str, asked_at: float, answer: Answer) -> None:
        """Release messages that came after their claim had ended, in the receive's thread. A failure does no harm."""
        handles = [str(message.get("ReceiptHandle")) for message in mappings(answer, "Messages")]
        entries = [
            {"Id": str(n), "ReceiptHandle": handle, "VisibilityTimeout": 0}
            for n, handle in enumerate(handles)
            if handle not in self._receipts
        ]
        if entries:
            leaves_by = give_back_until(asked_at, self._address.ttl)
            try:
                self._calls.now("change_message_visibility_batch", leaves_by=leaves_by, QueueUrl=url, Entries=entries)
            except BackendError as error:
                logger.debug("messages that no claim has taken could not be released: %s", error)


def _visibility(handle: str, seconds: int) -> dict[str, Any]:
    return {"ReceiptHandle": handle, "VisibilityTimeout": seconds}
