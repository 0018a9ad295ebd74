"""The connection: one script or command in, its answer or a typed error out.

A call whose connection breaks is made once more: it may have been one that Redis had closed long ago, or a node of a
cluster that is no more. Beyond that nothing is tried twice here: the cycle is the retry of a beat, and the client's the
one of everything else. What a cluster says of where a slot has gone is followed.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from leasekit.errors import ProtocolError
from leasekit_redis.address import Address
from leasekit_redis.faults import mapped
from leasekit_redis.scripts import Script

__all__ = ["Link", "PubSub"]

_TIMEOUT = 10.0  # seconds for one answer
_CONNECT = 5.0
_AT_ONCE = 32  # calls, each on a connection of its own


class PubSub(Protocol):
    """What is used of the library's object for subscriptions."""

    async def subscribe(self, *channels: str) -> None: ...

    async def get_message(self, *, ignore_subscribe_messages: bool, timeout: float) -> dict[str, Any] | None: ...

    async def ping(self) -> object: ...

    async def aclose(self) -> None: ...


class _Client(Protocol):
    async def execute_command(self, *args: object) -> Any: ...

    async def aclose(self) -> None: ...


class Link:
    """One Redis, or one cluster; opened by the first call in the loop that makes it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client: _Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def run(self, script: Script, keys: Sequence[bytes], argument: bytes) -> bytes | None:
        """What a script gives for its argument: one round trip, two where Redis does not know it (any more)."""
        with mapped(self.address):
            client = await self._opened()
            return await self._run(client, script, keys, argument)

    async def _run(self, client: _Client, script: Script, keys: Sequence[bytes], argument: bytes) -> bytes | None:
        async with self._room:
            try:
                found = await client.execute_command("EVALSHA", script.sha, len(keys), *keys, argument)
            except exceptions.NoScriptError:
                found = await client.execute_command("EVAL", script.text, len(keys), *keys, argument)
        if found is not None and type(found) is not bytes:
            raise ProtocolError(f"{self.address} answered a script with {type(found).__name__}")
        return found

    async def command(self, *args: object) -> Any:
        """The answer to a plain command."""
        with mapped(self.address):
            client = await self._opened()
            async with self._room:
                return await client.execute_command(*args)

    @asynccontextmanager
    async def subscription(self) -> AsyncGenerator[PubSub]:
        """A subscription, on a connection of its own; in a cluster to any node: each hears of all that is published."""
        with mapped(self.address):
            host, port = await self._any_node()
            client = Redis(host=host, port=port, db=self.address.db, **_settings(self.address))
            try:
                pubsub = cast("PubSub", client.pubsub())  # pyright: ignore[reportUnknownMemberType]
                try:
                    yield pubsub
                finally:
                    await pubsub.aclose()
            finally:
                await client.aclose()

    async def _any_node(self) -> tuple[str, int]:
        if not self.address.is_cluster:
            return self.address.hosts[0]
        cluster = cast("RedisCluster", await self._opened())
        node = cluster.get_random_node()
        return str(node.host), int(node.port)

    async def aclose(self) -> None:
        """Close what is open; a later call opens again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _opened(self) -> _Client:
        # A forked child has another loop: its parent's connections are not its own, and stay untouched.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._client = loop, None
            self._opening, self._room = asyncio.Lock(), asyncio.Semaphore(_AT_ONCE)
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await _client(self.address)
        return self._client


async def _client(address: Address) -> _Client:
    if address.is_cluster:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        cluster = RedisCluster(startup_nodes=nodes, **_settings(address))
        try:
            # Alone: several first calls at once would each look at the cluster, and close one another's connections.
            await cluster.initialize()
        except BaseException:
            await cluster.aclose()
            raise
        return cast("_Client", cluster)
    ((host, port),) = address.hosts
    return cast("_Client", Redis(host=host, port=port, db=address.db, **_settings(address)))


def _settings(address: Address) -> dict[str, Any]:
    return {
        "username": address.username,
        "password": address.password,
        "ssl": address.tls,
        **address.tls_options,
        "socket_timeout": _TIMEOUT,
        "socket_connect_timeout": _CONNECT,
        "retry": Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        "protocol": 2,
    }
