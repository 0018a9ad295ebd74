"""Claims that wait, and the subscription on which they are woken.

A claim that finds nothing leaves its name in Redis, in the same script; whoever makes a task ready takes one name out
and tells its client. What is lost on the way (a client that died, a subscription that broke) is made up for by looking
again now and then.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Generator

from leasekit.errors import BackendError, Unavailable
from leasekit_redis.link import Link, PubSub

__all__ = ["Waiter", "Wakes"]

logger = logging.getLogger("leasekit")

_PATIENCE = 2.0  # seconds that Redis has to confirm a subscription; then a claim goes without
_QUIET = 20.0  # seconds of silence after which Redis is asked whether it is still there
_PAUSE = 0.5  # seconds until a subscription that broke is tried again, about


class Waiter:
    """One claim that waits: of which kinds it was told, by the names of their keys."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._event = asyncio.Event()

    def tell(self, what: str) -> None:
        """Something is ready there; the empty name says: anywhere."""
        self._told.add(what)
        self._event.set()

    async def wait(self, seconds: float) -> set[str]:
        """What it was told since the last time, as soon as it was; nothing after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        told, self._told = self._told, set()
        self._event.clear()
        return told


class Wakes:
    """The claims of one client that wait. `pass_on(what)` is told what came for a claim that waits no more."""

    def __init__(self, link: Link, channel: str, pass_on: Callable[[str], None]) -> None:
        self._link = link
        self._channel = channel
        self._pass_on = pass_on
        self._waiters: dict[str, set[Waiter]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._subscribed = asyncio.Event()

    def name(self, claim_id: str) -> str:
        """Under which a claim is known in Redis."""
        return f"{self._channel}/{claim_id}"

    @contextlib.contextmanager
    def waiting(self, claim_id: str) -> Generator[Waiter]:
        """A waiter, until the block ends."""
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
        """Listen, if nobody does yet; returns once Redis has confirmed it, or without that after a while."""
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._subscribed.wait()

    async def aclose(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.wait([listening])

    async def _listen(self) -> None:
        while True:
            try:
                async with self._link.subscription() as pubsub:
                    await self._hear(pubsub)
            except BackendError as error:
                logger.debug("the subscription to what is ready broke, and is tried again: %s", error)
            finally:
                self._subscribed.clear()
            await asyncio.sleep(_PAUSE * (0.5 + random.random()))  # noqa: S311 - not in step with others

    async def _hear(self, pubsub: PubSub) -> None:
        await pubsub.subscribe(self._channel)
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
            if message["type"] == "subscribe":
                self._subscribed.set()
                self._tell_all()  # what was said while nobody listened is not said again
            elif message["type"] == "message":
                self._tell(message["data"].decode())

    def _tell(self, message: str) -> None:
        claim_id, _, what = message.partition("/")
        waiters = self._waiters.get(claim_id)
        if not waiters:
            self._pass_on(what)
            return
        for waiter in waiters:
            waiter.tell(what)

    def _tell_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.tell("")
