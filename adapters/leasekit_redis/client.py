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
from typing import Any, TypeVar, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from leasekit.backend import cancel_all
from leasekit.errors import ProtocolError, Unavailable
from leasekit_redis.address import Address
from leasekit_redis.connecting import Client, OfSentinels, PubSub, Subscriber, client_settings, new_client
from leasekit_redis.errors import Replaced, is_displaced, mapped
from leasekit_redis.keys import Keys
from leasekit_redis.records import encode
from leasekit_redis.scripts import Script
from leasekit_redis.sentinels import ASK_AGAIN

logger = logging.getLogger("leasekit")

_STUCK = 1.0  # seconds after which a call that is given up is a sign that its server is gone
_AT_ONCE = 32  # calls at the same time, each on a connection of its own
# Of what one script is given: it takes some milliseconds, in which Redis serves no other client.
MOST = 100  # items
LARGE = 1024 * 1024  # bytes, unless one item alone has more
_looked_at: set[str] = set()  # addresses whose durability was looked at: once for each process and its children

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Session:
    """A redis-py client with its connections, as the address was resolved when it was opened."""

    client: Client
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
    async def _run(client: Client, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Any:
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

    async def _call(self, ask: Callable[[Client], Awaitable[Any]]) -> Any:
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

    async def _call_once(self, session: _Session, ask: Callable[[Client], Awaitable[Any]]) -> Any:
        """Make one call of `ask`; give the session up if its server was displaced or stuck. redis-py's errors pass."""
        began_at = time.monotonic()
        try:
            async with self._under_way(session):
                answer = await ask(session.client)
                if isinstance(session.client, OfSentinels):
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
        if isinstance(session.client, OfSentinels) and (session.watching is None or session.watching.done()):
            session.watching = asyncio.create_task(self._watch(session, session.client.ask_again))

    async def _watch(self, session: _Session, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask the Sentinels once a second, while the session is used, whether its server is still the primary."""
        while session.is_used or session.calls or (self._subscriptions and not session.is_left):
            session.is_used = False
            await asyncio.sleep(ASK_AGAIN)
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

    async def _new_client_of_any_node(self) -> "Subscriber":
        if not self.address.is_cluster:
            return cast("Subscriber", await new_client(self.address))
        cluster = cast("RedisCluster", (await self._open_session()).client)
        node = cluster.get_random_node()
        client = Redis(host=str(node.host), port=int(node.port), **client_settings(self.address))
        return cast("Subscriber", client)

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
                self._session = _Session(await new_client(self.address))
            return self._session


async def _warn_if_forgetful(client: Client, address: Address) -> None:
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
