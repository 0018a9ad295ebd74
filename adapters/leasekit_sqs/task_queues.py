"""Queues in SQS: messages by which a server tells workers of due tasks. The URL is as `queue_names` says.

Rule 1: a queue is created with its first message. One that does not exist has no messages, and is looked for again.
Rule 2: a look reads the queues one priority after the other. Only if all are empty, each gets a long poll.
Rule 3: a poll cannot be stopped. It serves whichever receive waits for its queue when it ends, and what it brings
        when none does is made visible again.

Standard queues repeat and reorder messages, and so does an answer that is lost. That costs a claim, and nothing else.
"""

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from leasekit.errors import BackendError, Refused
from leasekit.queues import PRIORITIES, Message, QueueName
from leasekit.registry import needs_extra
from leasekit.task import Ticket

with needs_extra("sqs"):
    from leasekit_aws.boto_clients import BotoClients
    from leasekit_sqs.address import Address
    from leasekit_sqs.backend import boot_time
    from leasekit_sqs.batches import Item, in_batches
    from leasekit_sqs.calls import Answer, Calls, Gone, is_no_queue, mappings, refusing
    from leasekit_sqs.queue_names import QueuesAddress, address
    from leasekit_sqs.queues import Queues, url_in

__all__ = ["SqsQueues", "connect"]

logger = logging.getLogger("leasekit")

_HIDDEN = 30  # seconds for which a received message is invisible
_MOST = 10  # messages of one call
_AT_ONCE = 20  # calls under way at once, and polls
_SHORT_POLL = 1  # seconds of a poll if there are more queues than polls
_ABSENT = 5.0  # seconds after which a queue that does not exist is looked for again
_CLOSING = 6.0  # seconds: longer than a poll of the default length

_decode = msgspec.json.Decoder(Ticket).decode

Poll = asyncio.Future[Answer]


def connect(url: str) -> "SqsQueues":
    """Return the queues at this URL. Nothing is opened yet. Raises `ConfigError` if the URL is wrong."""
    return SqsQueues(address(url))


@dataclass(slots=True, eq=False)
class _Waiter:
    """A receive that waits for polls."""

    names: frozenset[QueueName]
    limit: int
    failures: dict[QueueName, BackendError]
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    messages: list[Message] = field(default_factory=list[Message])


class SqsQueues:
    """The queues of one template in SQS: a `TaskQueues`."""

    def __init__(
        self,
        address: QueuesAddress,
        *,
        clients: BotoClients | None = None,
        clock: Callable[[], float] = boot_time,
        rng: random.Random | None = None,
    ) -> None:
        self._address = address
        self._calls = Calls(clients or BotoClients("sqs", region=address.region, endpoint=address.endpoint), clock)
        self._counts = Queues(self._calls, Address(queue=address.template)).counts
        self._rng = rng or random.SystemRandom()
        self._urls: dict[QueueName, str] = {}
        self._absent_until: dict[QueueName, float] = {}  # by the event loop's time
        self._polls: dict[QueueName, Poll] = {}
        self._turns = itertools.count()
        self._polled: dict[QueueName, int] = {}  # the turn of each queue's latest poll
        self._waiters: list[_Waiter] = []
        self._returning: set[asyncio.Task[None]] = set()
        self._has_said = False

    async def send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[Ticket]:
        errors = await self._send(queue, tickets)
        if any(error is not None and is_no_queue(error) for error in errors):  # deleted since it was looked up
            del self._urls[queue]
            errors = await self._send(queue, tickets)
        unsent = [ticket for ticket, error in zip(tickets, errors, strict=True) if error is not None]
        if unsent and len(unsent) == len(tickets):
            raise next(error for error in errors if error is not None)
        return unsent

    async def depth(self, queue: QueueName) -> int:
        url = await self._url(queue)
        return 0 if url is None else sum((await self._counts(url)).values())

    async def receive(self, kinds: Sequence[str], *, limit: int, wait: float) -> list[Message]:
        taking_turns = self._rng.sample(list(kinds), len(kinds))
        names = [QueueName(kind, priority) for priority in PRIORITIES for kind in taking_turns]
        messages: list[Message] = []
        try:
            async with refusing():
                await self._receive(names, limit, wait, messages)
        except asyncio.CancelledError:
            self._give_back(messages)
            raise
        return messages

    async def delete(self, messages: Sequence[Message]) -> None:
        await self._change("delete_message_batch", messages)

    async def show(self, messages: Sequence[Message]) -> None:
        await self._change("change_message_visibility_batch", messages, VisibilityTimeout=0)

    async def aclose(self) -> None:
        """Show what open polls still bring, within seconds, and close the connections."""
        if self._polls:
            await asyncio.wait(list(self._polls.values()), timeout=_CLOSING)
        for poll in list(self._polls.values()):
            poll.cancel()
        await asyncio.sleep(0)  # let the callbacks of the last polls run
        if self._returning:
            await asyncio.wait(list(self._returning), timeout=_CLOSING)
        self._calls.close()

    # Sending -------------------------------------------------------------------------------------------------------

    async def _send(self, queue: QueueName, tickets: Sequence[Ticket]) -> list[BackendError | None]:
        url = await self._url(queue) or await self._create(queue)
        items = [Item(url, {"MessageBody": msgspec.json.encode(ticket).decode()}) for ticket in tickets]
        return await in_batches(self._calls, "send_message_batch", items)

    async def _create(self, queue: QueueName) -> str:
        name = self._address.name_of(queue)
        if self._address.account is not None:
            raise Refused(f"queue {name!r} does not exist: create it, as it is to be in another account")
        try:
            answer = await self._calls("create_queue", QueueName=name)
        except BackendError as error:
            error.args = (f"queue {name!r} does not exist, and cannot be created: {error}",)
            raise
        return self._remember(queue, answer)

    async def _change(self, operation: str, messages: Sequence[Message], **fields: Any) -> None:
        handles = [message.receipt for message in messages]
        items = [Item(url, {"ReceiptHandle": handle, **fields}) for url, handle in handles]
        for error in await in_batches(self._calls, operation, items):
            if error is not None and not isinstance(error, Gone) and not is_no_queue(error):
                raise error

    # The queues that exist -----------------------------------------------------------------------------------------

    async def _url(self, queue: QueueName) -> str | None:
        """Return the URL of a queue; None: it does not exist."""
        if queue not in self._urls:
            owner = {"QueueOwnerAWSAccountId": self._address.account} if self._address.account else {}
            try:
                answer = await self._calls("get_queue_url", QueueName=self._address.name_of(queue), **owner)
            except BackendError as error:
                if is_no_queue(error):
                    return None
                raise
            self._remember(queue, answer)
        return self._urls[queue]

    def _remember(self, queue: QueueName, answer: Answer) -> str:
        url = self._urls[queue] = url_in(answer, self._address.name_of(queue))
        return url

    async def _existing(self, names: Sequence[QueueName], failures: dict[QueueName, BackendError]) -> list[QueueName]:
        """Return the queues that exist, in this order. A queue that does not is looked for once in some seconds."""
        now, at_once = asyncio.get_running_loop().time(), asyncio.Semaphore(_AT_ONCE)

        async def look_up(name: QueueName) -> None:
            try:
                async with at_once:
                    if await self._url(name) is None:
                        self._absent_until[name] = now + _ABSENT * (0.5 + self._rng.random() / 2)
            except BackendError as error:
                failures[name] = error

        unknown = [name for name in names if name not in self._urls and name not in failures]
        await asyncio.gather(*(look_up(name) for name in unknown if self._absent_until.get(name, now) <= now))
        return [name for name in names if name in self._urls and name not in failures]

    # Receiving -----------------------------------------------------------------------------------------------------

    async def _receive(self, names: Sequence[QueueName], limit: int, wait: float, messages: list[Message]) -> None:
        """Add what comes to `messages`. Raise the error of a queue if no other has brought any in time."""
        loop = asyncio.get_running_loop()
        until, failures = loop.time() + wait, dict[QueueName, BackendError]()
        there = await self._existing(names, failures)
        await self._look([name for name in there if name not in self._polls], limit, failures, messages)
        while not messages and (left := until - loop.time()) > 0:
            there = await self._existing(names, failures)
            if not there and failures:
                break
            await self._wait_for(there, limit, left, failures, messages)
        if failures and not messages:
            raise next(iter(failures.values()))

    async def _look(
        self,
        names: Sequence[QueueName],
        limit: int,
        failures: dict[QueueName, BackendError],
        messages: list[Message],
    ) -> None:
        for _, group in itertools.groupby(names, key=lambda name: name.priority):
            lanes = list(group)
            while lanes and (left := limit - len(messages)) > 0:
                part, lanes = lanes[: min(left, _AT_ONCE)], lanes[min(left, _AT_ONCE) :]
                most = min(_MOST, left // len(part))
                glances = [self._glance(name, most, failures, messages) for name in part]
                full = [count == most for count in await asyncio.gather(*glances)]
                lanes += itertools.compress(part, full)  # and may have more

    async def _glance(
        self,
        name: QueueName,
        most: int,
        failures: dict[QueueName, BackendError],
        messages: list[Message],
    ) -> int:
        """Receive what a queue has now; return the number of messages."""
        try:
            found = self._read(name, self._urls[name], await self._start(name, most, 0))
        except BackendError as error:
            self._note(name, error, failures)
            return 0
        messages += found
        return len(found)

    async def _wait_for(
        self,
        names: Sequence[QueueName],
        limit: int,
        left: float,
        failures: dict[QueueName, BackendError],
        messages: list[Message],
    ) -> None:
        """Have each queue polled, and wait until a poll ends, or until absent queues are to be looked for again."""
        waiter = _Waiter(frozenset(names), limit, failures, messages=messages)
        self._waiters.append(waiter)
        try:
            self._open_polls(names, limit, left)
            async with asyncio.timeout(min(left, _ABSENT)):
                await waiter.woken.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters.remove(waiter)

    def _open_polls(self, names: Sequence[QueueName], limit: int, left: float) -> None:
        seconds = min(self._address.wait, max(1, math.ceil(left))) if len(names) <= _AT_ONCE else _SHORT_POLL
        unpolled = [name for name in names if name not in self._polls]
        longest_ago = sorted(unpolled, key=lambda name: self._polled.get(name, -1))
        for name in longest_ago[: max(0, _AT_ONCE - len(self._polls))]:
            self._polled[name] = next(self._turns)
            poll = self._polls[name] = self._start(name, min(_MOST, limit), seconds)
            poll.add_done_callback(partial(self._end_poll, name, self._urls[name]))

    def _start(self, name: QueueName, most: int, seconds: int) -> Poll:
        url = self._urls[name]
        return self._calls.start(
            "receive_message",
            is_poll=seconds > 0,
            missed=partial(self._show_from_thread, url),
            QueueUrl=url,
            MaxNumberOfMessages=most,
            WaitTimeSeconds=seconds,
            VisibilityTimeout=_HIDDEN,
        )

    def _end_poll(self, name: QueueName, url: str, poll: Poll) -> None:
        """Hand what a poll has brought to the receives that wait for it, and wake them; show the rest again."""
        del self._polls[name]
        if poll.cancelled():
            return
        error = poll.exception()
        messages = [] if error is not None else self._read(name, url, poll.result())
        for waiter in [waiter for waiter in self._waiters if name in waiter.names]:
            if isinstance(error, BackendError):
                self._note(name, error, waiter.failures)
            room = waiter.limit - len(waiter.messages)
            waiter.messages += messages[:room]
            messages = messages[room:]
            waiter.woken.set()
        self._give_back(messages)

    def _note(self, name: QueueName, error: BackendError, failures: dict[QueueName, BackendError]) -> None:
        if is_no_queue(error):
            self._urls.pop(name, None)
        else:
            failures[name] = error

    def _read(self, name: QueueName, url: str, answer: Answer) -> list[Message]:
        read: list[Message] = []
        for message in mappings(answer, "Messages"):
            try:
                read.append(Message(name, _decode(message["Body"]), (url, str(message["ReceiptHandle"]))))
            except (msgspec.MsgspecError, KeyError, TypeError, UnicodeError) as error:
                self._say_once(name, error)
        return read

    def _say_once(self, name: QueueName, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            queue = self._address.name_of(name)
            logger.error("a message of queue %s is not of leasekit, and left in the queue: %s", queue, error)

    # Giving back ---------------------------------------------------------------------------------------------------

    def _give_back(self, messages: Sequence[Message]) -> None:
        async def show() -> None:
            try:
                await self.show(messages)
            except BackendError as error:  # visible again in a while, all the same
                logger.debug("messages of queues could not be shown: %s", error)

        if messages:
            task = asyncio.create_task(show())
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    def _show_from_thread(self, url: str, answer: Answer) -> None:
        """Show messages that came after their receive was cancelled, in the thread of the poll."""
        entries: list[Mapping[str, Any]] = [
            {"Id": str(number), "ReceiptHandle": str(message.get("ReceiptHandle")), "VisibilityTimeout": 0}
            for number, message in enumerate(mappings(answer, "Messages"))
        ]
        if entries:
            try:
                self._calls.now("change_message_visibility_batch", leaves_by=math.inf, QueueUrl=url, Entries=entries)
            except BackendError as error:
                logger.debug("messages of queues could not be shown: %s", error)
