"""Access tokens of several nodes: what one node changes holds at the others within a second."""

import asyncio
import uuid
from collections.abc import AsyncGenerator

import pytest

from leasekit.errors import Unavailable
from leasekit.server import engine, token_book
from leasekit.server.engine import Engine
from leasekit.server.http.routes import _while_valid
from leasekit.server.roles.tokens import Create, Revoke
from leasekit.server.store import TokenRow
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.server.token_book import TokenBook
from leasekit.tokens import digest_of, new_secret
from leasekit.wire import TokenRequest
from tests.postgres_server import PostgresServer
from tests.waiting import until


def order(secret: str) -> Create:
    digest = digest_of(secret).hex()
    return Create(TokenRequest(id=uuid.uuid4().hex, name="t", digest=digest, scopes=["read"], kinds=["*"]))


@pytest.mark.anyio
async def test_the_other_nodes_are_told_of_a_token_that_one_revokes(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_TOKENS", 3600.0)  # no node looks by itself
    monkeypatch.setattr(token_book, "_TRUSTED", 3600.0)
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        while second.tokens.of_digest(digest_of(secret)) is None:  # from now on it listens
            await first._on_new_tokens()
            await asyncio.sleep(0.02)
        await first.operations.change_token(Revoke("t"))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is None)


@pytest.mark.anyio
async def test_it_is_refused_within_a_second_also_if_the_other_node_was_not_told(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._TOKENS * engine._PERIOD < 1
    monkeypatch.setattr(PostgresStore, "announce", lambda *_: None)
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is not None)
        await first.operations.change_token(Revoke("t"))
        await until(lambda: second.tokens.of_digest(digest_of(secret)) is None)


@pytest.mark.anyio
async def test_a_node_that_cannot_read_the_tokens_trusts_none(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as node:
        await node.operations.change_token(order(secret := new_secret()))
        access = node.tokens.of_digest(digest_of(secret))
        assert access is not None
        assert node.tokens.is_valid(access)
        node.tokens.read_at -= 60
        with pytest.raises(Unavailable, match="could not be read"):
            node.tokens.of_digest(digest_of(secret))
        assert not node.tokens.is_valid(access)


@pytest.mark.anyio
async def test_a_stream_of_events_ends_at_a_node_that_cannot_read_the_tokens() -> None:
    now = [0.0]
    book = TokenBook(lambda: now[0], lambda: now[0], is_shared=True)
    secret = new_secret()
    digest = digest_of(secret)
    book.learn([TokenRow("t", "t", digest, None, None, "read", "*", 0.0, "local", None, None, None, None)])
    access = book.of_digest(digest)
    assert access is not None

    async def events() -> AsyncGenerator[bytes]:
        for event in (b"first", b"second"):
            yield event
            now[0] += 60

    assert [event async for event in _while_valid(events(), book, access)] == [b"first"]
