"""Access tokens of several nodes: what one node changes holds at the others within a second."""

import asyncio
import uuid
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import Request

from leasekit.errors import Unavailable
from leasekit.server import engine, token_watch
from leasekit.server.access import GUEST
from leasekit.server.engine import Engine
from leasekit.server.http.auth import Authenticator
from leasekit.server.http.problems import Unauthenticated
from leasekit.server.http.routes import _while_valid
from leasekit.server.roles.tokens import Create, Revoke
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.tokens import digest_of, new_secret
from leasekit.wire import TokenRequest
from tests.postgres_server import PostgresServer
from tests.waiting import until


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    return url


def order(secret: str) -> Create:
    digest = digest_of(secret).hex()
    return Create(TokenRequest(id=uuid.uuid4().hex, name="t", digest=digest, scopes=["read"], kinds=["*"]))


@pytest.mark.anyio
async def test_the_other_nodes_are_told_of_a_token_that_one_revokes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_TOKENS", 3600.0)  # no node looks by itself
    monkeypatch.setattr(token_watch, "_TRUSTED", 3600.0)
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        while second.tokens.of_digest(digest_of(secret)) is None:  # from now on it listens
            await first._on_new_tokens()
            await asyncio.sleep(0.02)
        await first.operations.change_token(Revoke("t"))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is None)


@pytest.mark.anyio
async def test_it_is_refused_within_a_second_also_if_the_other_node_was_not_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._TOKENS * engine._PERIOD < 1
    monkeypatch.setattr(PostgresStore, "announce", lambda *_: None)
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is not None)
        await first.operations.change_token(Revoke("t"))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is None)


@pytest.mark.anyio
async def test_a_node_that_has_stood_still_reads_the_tokens_before_it_trusts_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await second.token_watch.stop()
        await first.operations.change_token(order(secret := new_secret()))
        await second.token_watch.read()
        auth = Authenticator(second)
        access = await auth.access_of_secret(secret)
        assert access is not None
        await first.operations.change_token(Revoke("t"))
        second.tokens.read_at -= 1.5
        reads = counted(second, monkeypatch)
        answers = await asyncio.gather(*(auth.access_of_secret(secret) for _ in range(50)))
        assert not any(answers)
        assert len(reads) <= 2, "those who wait together share a read"
        assert not await second.token_watch.is_valid(access)


@pytest.mark.anyio
async def test_a_node_that_has_stood_still_looks_for_a_token_before_it_serves_who_has_none(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await second.token_watch.stop()
        request, auth = Request({"type": "http", "headers": [], "client": None}), Authenticator(second)
        assert await auth.access_of(request) == GUEST
        await first.operations.change_token(order(new_secret()))
        second.tokens.read_at -= 1.5
        assert not await second.token_watch.is_valid(GUEST)
        second.tokens.learn([], read_at=second.tokens.read_at - 1.5)
        with pytest.raises(Unauthenticated):
            await auth.access_of(request)
        unreadable(second, monkeypatch)
        with pytest.raises(Unavailable):
            await auth.access_of(request)


def counted(node: Engine, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an item for each read of tokens."""
    reads, read = list[None](), node.token_watch.read

    async def reading() -> None:
        reads.append(None)
        await read()

    monkeypatch.setattr(node.token_watch, "read", reading)
    return reads


@pytest.mark.anyio
async def test_a_node_that_cannot_read_the_tokens_trusts_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(PostgresStore(url)) as node:
        await node.operations.change_token(order(secret := new_secret()))
        access = await Authenticator(node).access_of_secret(secret)
        assert access is not None
        assert await node.token_watch.is_valid(access)
        unreadable(node, monkeypatch)
        for ask in (Authenticator(node).access_of_secret(secret), node.token_watch.is_valid(access)):
            with pytest.raises(Unavailable, match=r"could not be read .last 60 s ago"):
                await ask


def unreadable(node: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tokens be a minute old, and no longer readable."""

    async def read() -> None:
        raise Unavailable("the database is away")

    monkeypatch.setattr(node.token_watch, "read", read)
    node.tokens.read_at -= 60


@pytest.mark.anyio
async def test_a_stream_of_events_ends_at_a_node_that_cannot_read_the_tokens(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine(PostgresStore(url)) as node:
        await node.operations.change_token(order(secret := new_secret()))
        access = await Authenticator(node).access_of_secret(secret)
        assert access is not None

        async def events() -> AsyncGenerator[bytes]:
            for event in (b"first", b"second"):
                yield event
                unreadable(node, monkeypatch)

        assert [event async for event in _while_valid(events(), node, access)] == [b"first"]
