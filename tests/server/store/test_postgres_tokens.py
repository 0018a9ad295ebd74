"""Access tokens of several nodes: what one node changes holds at the others within a second."""

import time
import uuid

import pytest

from leasekit.errors import Unavailable
from leasekit.server.engine import Engine
from leasekit.server.roles.tokens import Create, Revoke
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.tokens import digest_of, new_secret
from leasekit.wire import TokenRequest
from tests.postgres_server import PostgresServer
from tests.waiting import until


def order(secret: str) -> Create:
    digest = digest_of(secret).hex()
    return Create(TokenRequest(id=uuid.uuid4().hex, name="t", digest=digest, scopes=["read"], kinds=["*"]))


@pytest.mark.anyio
async def test_a_token_that_one_node_revokes_is_refused_by_the_others_within_a_second(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        await until(lambda: second.tokens.of_secret(secret) is not None)
        await first.operations.change_token(Revoke("t"))
        began = time.monotonic()
        await until(lambda: second.tokens.of_secret(secret) is None)
        assert time.monotonic() - began < 1


@pytest.mark.anyio
async def test_it_is_refused_also_if_the_other_node_was_not_told(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresStore, "announce", lambda *_: None)
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as first, Engine(PostgresStore(url)) as second:
        await first.operations.change_token(order(secret := new_secret()))
        await until(lambda: second.tokens.of_secret(secret) is not None)
        await first.operations.change_token(Revoke("t"))
        await until(lambda: second.tokens.of_secret(secret) is None)


@pytest.mark.anyio
async def test_a_node_that_cannot_read_the_tokens_trusts_none(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    async with Engine(PostgresStore(url)) as node:
        await node.operations.change_token(order(secret := new_secret()))
        assert node.tokens.of_secret(secret) is not None
        node.tokens.read_at -= 60
        with pytest.raises(Unavailable, match="could not be read"):
            node.tokens.of_secret(secret)
