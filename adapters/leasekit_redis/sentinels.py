"""Sentinels: ask them for the primary, once a second while calls are made, and find out when it was replaced."""

import asyncio
import logging
import time
from typing import Any, cast

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel

from leasekit_redis.errors import Replaced

logger = logging.getLogger("leasekit")

ASK_AGAIN = 1.0
"""Seconds from one question to the Sentinels to the next while calls are made."""
_NAMED_LATELY = 2 * ASK_AGAIN  # seconds after a question for which its answer vouches for a primary


class Sentinels(Sentinel):
    """Sentinels: one after another is asked for the primary, until one answers. What was named first must stay."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        cast("Any", super()).__init__(*args, **settings)  # redis-py leaves its types open
        self._named: tuple[str, int] | None = None
        self._is_replaced = False
        self._asked_at = 0.0  # when the last question left; or, without an answer, was given up
        self._is_answered = False
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the primary. Raises `Replaced` once another one was named."""
        asked_at = time.monotonic()
        named = await self._first_answer(service_name)
        self._asked_at, self._is_answered = asked_at, True
        self._named = self._named or named
        self._is_replaced |= named != self._named
        self._check()
        return named

    async def _first_answer(self, service_name: str) -> tuple[str, int]:
        # SENTINEL MASTERS, which redis-py asks for, names the old primary until all replicas follow the new one.
        sentinels = cast("list[Any]", self.sentinels)  # redis-py leaves its types open
        for sentinel in list(sentinels):
            try:
                answer = await sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name)
            except (exceptions.ConnectionError, exceptions.TimeoutError):
                continue
            if answer is not None:
                sentinels.remove(sentinel)
                sentinels.insert(0, sentinel)
                host, port = answer
                return host.decode(), int(port)
        raise MasterNotFoundError(service_name)

    async def ask_again(self, service_name: str) -> None:
        """Ask for the primary, unless a call has just asked. Raises `Replaced`; if no Sentinel answers, all stays."""
        async with self._asking:
            if time.monotonic() < self._asked_at + ASK_AGAIN / 2:
                self._check()
                return
            try:
                await self.discover_master(service_name)
            except Replaced:
                raise
            except (exceptions.RedisError, OSError) as error:
                self._asked_at, self._is_answered = time.monotonic(), False
                logger.debug("the Sentinels do not say which primary there is: %r", error)

    async def vouch(self, service_name: str) -> None:
        """Return once the primary was named lately. Raises `Replaced`; while no Sentinel answers, nothing is asked."""
        self._check()
        if self._is_answered and time.monotonic() > self._asked_at + _NAMED_LATELY:
            await self.ask_again(service_name)

    def _check(self) -> None:
        if self._is_replaced:
            raise Replaced
