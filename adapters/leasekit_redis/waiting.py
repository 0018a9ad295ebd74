"""Waiting claims, and the subscription that wakes them.

A claim that finds no task leaves its name in Redis, in the same script; the script that makes a task ready takes a name
out and publishes a message to its client. Messages can be lost (a client died, a subscription broke), so waiting claims
also look again at intervals.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Generator

from leasekit.backend import cancel_all
from leasekit.errors import BackendError, Unavailable
from leasekit_redis.client import Link
from leasekit_redis.connecting import PubSub

logger = logging.getLogger("leasekit")

_PATIENCE = 2.0  # seconds that Redis has to confirm a subscription; then a claim goes on without it
_MOST = 1000  # names that a waiter keeps
_QUIET = 20.0  # seconds of silence after which Redis is asked whether it is still there
_PAUSE = 0.5  # seconds, roughly, until a broken subscription is tried again


class Waiter:
    """A waiting claim, and the keys of the kinds for which it was woken."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._event = asyncio.Event()

    def wake(self, key: str) -> None:
        """Wake the claim because a task may be ready at the kind of this key; an empty one stands for any kind."""
        if len(self._told) < _MOST:
            self._told.add(key)
        self._event.set()

    async def wait(self, seconds: float) -> set[str]:
        """Wait until the claim is woken, or `seconds` are over; return the keys for which it was woken since."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        told, self._told = self._told, set()
        self._event.clear()
        return told


class Wakes:
    """The waiting claims of one client. `pass_on(key)` is called when a message came for a claim that has ended."""

    def __init__(self, link: Link, channel: str, cancels: str, pass_on: Callable[[str], None]) -> None:
        self._link = link
        self._channel = channel
        self._cancels = cancels  # the channel on which this worker hears of requested cancels …
        self._cancelled = Waiter()  # … and what waits for their ids
        self._pass_on = pass_on
        self._waiters: dict[str, set[Waiter]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

    def name(self, claim_id: str) -> str:
        return f"{self._channel}/{claim_id}"

    @contextlib.contextmanager
    def waiting(self, claim_id: str) -> Generator[Waiter]:
        waiter = Waiter()
        self._waiters.setdefault(claim_id, set()).add(waiter)
        try:
            yield waiter
        finally:
            waiters = self._waiters[claim_id]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[claim_id]

    async def subscribe(self) -> None:
        """Start the subscription if it does not run; return once Redis has confirmed it, or after a bounded wait."""
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._subscribed.wait()

    async def cancels(self, wait: float) -> list[str]:
        """Return the tasks whose cancel was requested since the last call; wait up to `wait` seconds for the first."""
        await self.subscribe()
        return list(await self._cancelled.wait(wait))

    async def aclose(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            await cancel_all([listening])

    async def _listen(self) -> None:
        while True:
            try:
                async with self._link.subscription() as pubsub:
                    await self._hear(pubsub)
            except BackendError as error:
                logger.debug("the subscription for waiting claims broke and is tried again: %s", error)
            finally:
                self._subscribed.clear()
            await asyncio.sleep(_PAUSE * (0.5 + random.random()))  # noqa: S311 - not in step with others

    async def _hear(self, pubsub: PubSub) -> None:
        await pubsub.subscribe(self._cancels, self._channel)  # confirmed in this order
        is_asked = False
        while True:
            patience = _PATIENCE if is_asked else _QUIET
            message = await pubsub.get_message(ignore_subscribe_messages=False, timeout=patience)
            if message is None:
                if is_asked:
                    raise Unavailable("the subscription does not answer")
                await pubsub.ping()
                is_asked = True
                continue
            is_asked = False
            if message["type"] == "subscribe" and message["channel"].decode() == self._channel:
                self._subscribed.set()
                self._wake_all()  # messages that were published before the subscription are lost
            elif message["type"] == "message":
                is_cancel = message["channel"].decode() == self._cancels
                (self._cancelled.wake if is_cancel else self._wake)(message["data"].decode())

    def _wake(self, message: str) -> None:
        claim_id, _, key = message.partition("/")
        waiters = self._waiters.get(claim_id)
        if not waiters:
            self._pass_on(key)
            return
        for waiter in waiters:
            waiter.wake(key)

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake("")
