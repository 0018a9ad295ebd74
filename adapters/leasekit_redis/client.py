"""The connection to Redis: run one script or command, return its answer or raise a typed error.

A call whose connection breaks is made once more, because Redis may have closed the connection long ago, or the node may
have left the cluster. A call that a demoted primary refused is made once more too: the address may lead to another
server by now, but open connections do not follow it, so all of them are given up. The same goes for a call to a primary
that Sentinels have replaced: it may not know yet, and its answers are worth nothing, so each answer counts only if the
Sentinels have named its server lately. Nothing else is tried twice here: heartbeats are repeated by the cycle, other
calls by the client. A cluster's redirections to moved slots are followed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import hiredis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff

from leasekit.backend import cancel_all
from leasekit.errors import ProtocolError, Unavailable
from leasekit_redis.address import Address
from leasekit_redis.errors import Replaced, is_displaced, mapped
from leasekit_redis.keys import Keys
from leasekit_redis.records import encode
from leasekit_redis.scripts import Script

logger = logging.getLogger("leasekit")

_TIMEOUT = 10.0  # seconds for one answer
_CONNECT = 5.0
_SENTINEL = 1.0  # for one answer of a Sentinel
_ASK_AGAIN = 1.0  # seconds from one question to the Sentinels to the next while calls are made
_NAMED_LATELY = 2 * _ASK_AGAIN  # seconds after a question for which its answer vouches for a primary
_STUCK = 1.0  # seconds after which a call that is given up is a sign that its server is gone
_AT_ONCE = 32  # calls at the same time, each on a connection of its own
# Of what one script is given: it takes some milliseconds, in which Redis serves no other client.
MOST = 100  # items
LARGE = 1024 * 1024  # bytes, unless one item alone has more
_looked_at: set[str] = set()  # addresses whose durability was looked at: once for each process and its children

T = TypeVar("T")


class PubSub(Protocol):
    """The part of redis-py's subscription object that leasekit uses."""

    async def subscribe(self, *channels: str) -> None: ...

    async def get_message(self, *, ignore_subscribe_messages: bool, timeout: float) -> dict[str, Any] | None: ...

    async def ping(self) -> object: ...

    async def aclose(self) -> None: ...


class _Client(Protocol):
    async def execute_command(self, *args: object) -> Any: ...

    async def aclose(self) -> None: ...


class _Subscriber(_Client, Protocol):
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


class _Sentinels(Sentinel):
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
            if time.monotonic() < self._asked_at + _ASK_AGAIN / 2:
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


class _OfSentinels:
    """A client of the primary that Sentinels name; each new connection asks them, and `ask_again` and `vouch` do."""

    def __init__(self, address: Address) -> None:
        settings = _client_settings(address)
        asking = {
            **settings,
            "username": address.sentinel_username,
            "password": address.sentinel_password,
            "socket_timeout": _SENTINEL,  # each Sentinel is asked in turn, and one of them may hang
            "socket_connect_timeout": _SENTINEL,
            "retry": Retry(NoBackoff(), 0),
        }
        sentinels = _Sentinels(address.hosts, sentinel_kwargs=asking)
        self._sentinels = sentinels
        theirs = cast("Any", sentinels)  # redis-py leaves its types open
        self._primary = cast("_Subscriber", theirs.master_for(address.primary, _Direct, db=address.db, **settings))
        self.execute_command = self._primary.execute_command
        self.pubsub = self._primary.pubsub
        name = str(address.primary)
        self.ask_again = partial(sentinels.ask_again, name)
        self.vouch = partial(sentinels.vouch, name)

    async def aclose(self) -> None:
        sentinels = cast("list[_Client]", self._sentinels.sentinels)
        await asyncio.gather(*(client.aclose() for client in (self._primary, *sentinels)))


@dataclass(slots=True, eq=False)
class _Session:
    """A redis-py client with its connections, as the address was resolved when it was opened."""

    client: _Client
    calls: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])  # calls under way
    watching: asyncio.Task[None] | None = None  # whether the Sentinels still name its primary
    is_used: bool = False  # since the Sentinels were asked last
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)  # set once it is left and no call is under way
    has_served: bool = False
    is_left: bool = False  # no further call uses it

    def leave(self) -> asyncio.Task[None]:
        """Let no further call use the session; return the task that closes it when the calls under way have ended."""
        self.is_left = True
        self.note_end()
        return asyncio.create_task(self._close())

    def note_end(self) -> None:
        if self.is_left and not self.calls:
            self.is_idle.set()

    async def _close(self) -> None:
        # A connection that is closed under a call is opened again by redis-py, and then nobody closes it.
        await self.is_idle.wait()
        if self.watching is not None:
            await cancel_all([self.watching])
        await self.client.aclose()


def in_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a batch into parts, one for each script."""
    return (items[first : first + MOST] for first in range(0, len(items), MOST))


def by_kind(kinds: Sequence[str | None]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the positions of each kind, in parts, one for each script; positions without a kind are left out."""
    groups: dict[str, list[int]] = {}
    for at, kind in enumerate(kinds):
        if kind is not None:
            groups.setdefault(kind, []).append(at)
    return ((kind, part) for kind, positions in groups.items() for part in in_parts(positions))


class Link:
    """The connection to one Redis, one cluster, or a primary of Sentinels; the first call in an event loop opens it."""

    def __init__(self, address: Address, *, keeps_tasks: bool = True) -> None:
        self.address = address
        self._warns = keeps_tasks  # of settings with which tasks may be lost
        self.keys = Keys(address.prefix)
        self.is_one_server = not address.is_cluster
        """Whether one server has all keys; behind a proxy it may turn out that several have them."""
        self._session: _Session | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._opening = asyncio.Lock()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._subscriptions: set[asyncio.Timeout] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def run_for(self, kind: str, script: Script, argument: object) -> bytes | None:
        return await self.run(script, self.keys.of_kind(kind), encode(argument))

    async def run_for_name(self, name: str, script: Script, shared: Sequence[bytes], argument: bytes) -> bytes | None:
        """Run a script of a name that also has keys which all kinds share. Raises `ProtocolError` if it cannot."""
        try:
            return await self.run(script, (*self.keys.of_kind(name), *shared), argument)
        except ProtocolError:
            self.is_one_server = False
            raise

    async def run(self, script: Script, keys: Sequence[bytes], *arguments: bytes) -> bytes | None:
        """Run a script and return its answer: one round trip, two if Redis does not know the script (any longer)."""
        answer = await self._call(lambda client: self._run(client, script, keys, arguments))
        if answer is not None and type(answer) is not bytes:
            raise ProtocolError(f"{self.address} answered a script with {type(answer).__name__}, not bytes")
        return answer

    @staticmethod
    async def _run(client: _Client, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Any:
        try:
            return await client.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:
            return await client.execute_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def command(self, *args: object) -> Any:
        return await self._call(lambda client: client.execute_command(*args))

    async def shards(self, keys: Sequence[bytes]) -> list[str]:
        """Return the name of the server that holds each key, as far as known: keys of one server fail together."""
        if not self.address.is_cluster or len(keys) < 2:
            return [str(self.address)] * len(keys)
        with mapped(self.address):
            cluster = cast("RedisCluster", (await self._open_session()).client)
            return [_shard_name(cluster, key) for key in keys]

    async def _call(self, ask: Callable[[_Client], Awaitable[Any]]) -> Any:
        """Make a call; once more, in a new session, if the server of a session that has served is displaced."""
        self._begin_anew_in_new_loop()
        with mapped(self.address):
            async with self._room:
                session = await self._open_session()
                is_fresh = not session.has_served
                try:
                    return await self._call_once(session, ask)
                except exceptions.RedisError as error:
                    if is_fresh or not is_displaced(error):
                        raise
                return await self._call_once(await self._open_session(), ask)

    async def _call_once(self, session: _Session, ask: Callable[[_Client], Awaitable[Any]]) -> Any:
        """Make one call of `ask`; give the session up if its server was displaced or stuck. redis-py's errors pass."""
        began_at = time.monotonic()
        try:
            async with self._under_way(session):
                answer = await ask(session.client)
                if isinstance(session.client, _OfSentinels):
                    await session.client.vouch()
                if self._warns and not session.has_served and str(self.address) not in _looked_at:
                    _looked_at.add(str(self.address))
                    await _warn_if_forgetful(session.client, self.address)
        except (exceptions.RedisError, asyncio.CancelledError) as error:
            if is_displaced(error) or time.monotonic() > began_at + _STUCK:
                self._leave(session)
            raise
        session.has_served = True
        return answer

    @asynccontextmanager
    async def _under_way(self, session: _Session) -> AsyncGenerator[None]:
        """Count a call; it ends with `Replaced` when the Sentinels name another primary than the one that it asks."""
        self._ensure_watch(session)
        call = asyncio.timeout(None)
        try:
            async with call:
                session.calls.add(call)
                try:
                    yield
                finally:
                    session.calls.discard(call)
                    session.note_end()
        except TimeoutError:
            if call.expired():
                raise Replaced from None
            raise

    def _ensure_watch(self, session: _Session) -> None:
        session.is_used = True
        if isinstance(session.client, _OfSentinels) and (session.watching is None or session.watching.done()):
            session.watching = asyncio.create_task(self._watch(session, session.client.ask_again))

    async def _watch(self, session: _Session, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask the Sentinels once a second, while the session is used, whether its server is still the primary."""
        while session.is_used or session.calls or (self._subscriptions and not session.is_left):
            session.is_used = False
            await asyncio.sleep(_ASK_AGAIN)
            try:
                await ask()
            except Replaced:
                for call in session.calls:
                    call.reschedule(0)
                self._leave(session)
                return

    def _leave(self, session: _Session) -> None:
        """Give up a session: the next call and subscriptions resolve the address again; calls under way may end."""
        if self._session is session:
            self._session = None
            closing = session.leave()
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            for subscription in self._subscriptions:
                subscription.reschedule(0)

    @asynccontextmanager
    async def subscription(self) -> AsyncGenerator[PubSub]:
        """Open a subscription on its own connection; in a cluster to any node, because each receives all messages.

        The subscription breaks when another connection was found to lead to the wrong server.
        """
        self._begin_anew_in_new_loop()
        with mapped(self.address):
            client = await self._new_client_of_any_node()
            try:
                pubsub = client.pubsub()
                try:
                    async with asyncio.timeout(None) as leaving:
                        self._subscriptions.add(leaving)
                        try:
                            yield pubsub
                        finally:
                            self._subscriptions.discard(leaving)
                finally:
                    await pubsub.aclose()
            finally:
                await client.aclose()

    async def _new_client_of_any_node(self) -> "_Subscriber":
        if not self.address.is_cluster:
            return cast("_Subscriber", await _new_client(self.address))
        cluster = cast("RedisCluster", (await self._open_session()).client)
        node = cluster.get_random_node()
        client = Redis(host=str(node.host), port=int(node.port), **_client_settings(self.address))
        return cast("_Subscriber", client)

    async def aclose(self) -> None:
        self._begin_anew_in_new_loop()
        async with self._opening:
            self._is_closed = True
            if self._session is not None:
                self._leave(self._session)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _begin_anew_in_new_loop(self) -> None:
        # A forked child has another loop. The connections belong to its parent, so the child leaves them untouched.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._session = loop, None
            self._opening, self._room = asyncio.Lock(), asyncio.Semaphore(_AT_ONCE)
            self._subscriptions, self._closing = set(), set()

    async def _open_session(self) -> _Session:
        self._begin_anew_in_new_loop()
        if self._session is not None and not self._is_closed:
            return self._session
        async with self._opening:
            if self._is_closed:
                raise Unavailable(f"the connection to {self.address} was closed")
            if self._session is None:
                self._session = _Session(await _new_client(self.address))
            return self._session


async def _new_client(address: Address) -> _Client:
    if address.is_cluster:
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        cluster = RedisCluster(startup_nodes=nodes, **_client_settings(address))
        _ask_any_primary(cluster)
        try:
            # Under the lock: several first calls at once would each read the cluster's layout, and close each other's
            # connections.
            await cluster.initialize()
        except BaseException:
            await cluster.aclose()
            raise
        return cast("_Client", cluster)
    if address.primary is not None:
        return _OfSentinels(address)
    if address.socket is not None:
        return cast("_Client", _Direct(unix_socket_path=address.socket, db=address.db, **_client_settings(address)))
    ((host, port),) = address.hosts
    return cast("_Client", _Direct(host=host, port=port, db=address.db, **_client_settings(address)))


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


async def _warn_if_forgetful(client: _Client, address: Address) -> None:
    """Log what a crash of this Redis, or full memory, would lose; nothing if this user may not read its settings."""
    try:
        told = cast("dict[str, Any]", await client.execute_command("INFO"))
    except (exceptions.RedisError, OSError):
        return
    if told.get("aof_enabled") == 0:
        logger.warning(
            "%s: appendonly is off: after a crash of this Redis all tasks and leases since its last snapshot are "
            "forgotten: set appendonly yes",
            address,
        )
    policy = told.get("maxmemory_policy", "")
    if told.get("maxmemory") and policy.startswith("allkeys"):
        logger.warning("%s: maxmemory-policy is %s: full memory deletes tasks: set noeviction", address, policy)


def _shard_name(cluster: RedisCluster, key: bytes) -> str:
    try:
        node = cluster.get_node_from_key(key.decode())
    except exceptions.RedisClusterException:
        node = None
    return "an unknown server" if node is None else str(node.name)


def _client_settings(address: Address) -> dict[str, Any]:
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
