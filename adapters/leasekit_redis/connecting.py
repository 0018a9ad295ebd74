"""Clients of redis-py: of one server, of a cluster, and of the primary that Sentinels name."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import hiredis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from leasekit_redis.address import Address
from leasekit_redis.sentinels import Sentinels

_TIMEOUT = 10.0  # seconds for one answer
_CONNECT = 5.0
_SENTINEL = 1.0  # for one answer of a Sentinel


class PubSub(Protocol):
    """The part of redis-py's subscription object that leasekit uses."""

    async def subscribe(self, *channels: str) -> None: ...

    async def get_message(self, *, ignore_subscribe_messages: bool, timeout: float) -> dict[str, Any] | None: ...

    async def ping(self) -> object: ...

    async def aclose(self) -> None: ...


class Client(Protocol):
    async def execute_command(self, *args: object) -> Any: ...

    async def aclose(self) -> None: ...


class Subscriber(Client, Protocol):
    def pubsub(self) -> PubSub: ...


_pack: Callable[[tuple[Any, ...]], bytes] = cast("Any", hiredis).pack_command


class _Direct(Redis):
    """A client that runs scripts on connections that it keeps: the way through the pool costs more than a script.

    As there, a call whose connection breaks is made once more, and then on a connection that was checked.
    """

    def __init__(self, **settings: Any) -> None:
        theirs = cast("Any", super())  # redis-py leaves its types open
        theirs.__init__(**settings)
        self._pool: Any = self.connection_pool
        self._theirs: Any = theirs.execute_command
        self._kept: list[Any] = []  # connections, open and without a call

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if not str(args[0]).startswith("EVAL"):
            return await self._theirs(*args, **options)
        packed: bytes = _pack(args)
        try:
            return await self._ask(packed)
        except exceptions.ConnectionError:
            while self._kept:
                await self._pool.release(self._kept.pop())
            return await self._ask(packed)

    async def _ask(self, packed: bytes) -> Any:
        connection: Any = None
        try:
            async with asyncio.timeout(_TIMEOUT):
                connection = self._kept.pop() if self._kept else await self._pool.get_connection()
                connection.socket_timeout = None  # the one above is enough
                await connection.send_packed_command(packed, check_health=False)
                return await connection.read_response()
        except TimeoutError:
            raise exceptions.TimeoutError(f"no answer within {_TIMEOUT:g} s") from None
        finally:
            if connection is not None and connection.is_connected:
                self._kept.append(connection)
            elif connection is not None:
                connection.socket_timeout = _TIMEOUT
                await self._pool.release(connection)


class OfSentinels:
    """A client of the primary that Sentinels name; each new connection asks them, and `ask_again` and `vouch` do."""

    def __init__(self, address: Address) -> None:
        settings = client_settings(address)
        asking = {
            **settings,
            "username": address.sentinel_username,
            "password": address.sentinel_password,
            "socket_timeout": _SENTINEL,  # each Sentinel is asked in turn, and one of them may hang
            "socket_connect_timeout": _SENTINEL,
            "retry": Retry(NoBackoff(), 0),
        }
        sentinels = Sentinels(address.hosts, sentinel_kwargs=asking)
        self._sentinels = sentinels
        theirs = cast("Any", sentinels)  # redis-py leaves its types open
        self._primary = cast("Subscriber", theirs.master_for(address.primary, _Direct, db=address.db, **settings))
        self.execute_command = self._primary.execute_command
        self.pubsub = self._primary.pubsub
        name = str(address.primary)
        self.ask_again = partial(sentinels.ask_again, name)
        self.vouch = partial(sentinels.vouch, name)

    async def aclose(self) -> None:
        sentinels = cast("list[Client]", self._sentinels.sentinels)
        await asyncio.gather(*(client.aclose() for client in (self._primary, *sentinels)))


async def new_client(address: Address) -> Client:
    if address.is_cluster:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        cluster = RedisCluster(startup_nodes=nodes, **client_settings(address))
        _ask_any_primary(cluster)
        try:
            # Under the lock: several first calls at once would each read the cluster's layout, and close each other's
            # connections.
            await cluster.initialize()
        except BaseException:
            await cluster.aclose()
            raise
        return cast("Client", cluster)
    if address.primary is not None:
        return OfSentinels(address)
    if address.socket is not None:
        return cast("Client", _Direct(unix_socket_path=address.socket, db=address.db, **client_settings(address)))
    ((host, port),) = address.hosts
    return cast("Client", _Direct(host=host, port=port, db=address.db, **client_settings(address)))


def _ask_any_primary(cluster: Any) -> None:
    """Have redis-py ask any primary that answers which commands there are: the one that it chooses may be away.

    It asks that when it opens a session, and would reach no shard before that one is back.
    """
    ask = cluster.commands_parser.initialize

    async def initialize(chosen: Any = None) -> None:
        primaries = cluster.nodes_manager.get_nodes_by_server_type("primary")
        error: exceptions.RedisError | None = None
        for node in [chosen, *(node for node in primaries if node is not chosen)]:
            try:
                await ask(node)
            except (exceptions.ConnectionError, exceptions.TimeoutError) as failed:
                error = error or failed
                continue
            if node is not None:
                cluster.nodes_manager.default_node = node
            return
        assert error is not None  # noqa: S101 - there is always a node to ask
        raise error

    cluster.commands_parser.initialize = initialize


def client_settings(address: Address) -> dict[str, Any]:
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
