"""Access tokens on each store: when they end, how long they and the log of operators' acts are kept."""

import uuid

import pytest
from msgspec.structs import replace

from leasekit.errors import AccessDenied, Refused
from leasekit.server.access import GUEST, Access, KindPatterns
from leasekit.server.roles import audit
from leasekit.server.roles.audit import Note
from leasekit.server.roles.tokens import Conflict, Create, Revoke, Rotate
from leasekit.server.store import SessionRow
from leasekit.tokens import digest_of, new_secret
from leasekit.wire import RotateRequest, TokenRequest
from tests.server.conftest import Bench

pytestmark = pytest.mark.anyio

DAY = 86400.0


async def made(bench: Bench, name: str) -> str:
    """Make an access token; return its secret."""
    secret = new_secret()
    digest = digest_of(secret).hex()
    order = TokenRequest(id=new_id(name), name=name, digest=digest, scopes=["read"], kinds=["*"])
    await bench.engine.operations.change_token(Create(order))
    return secret


def new_id(name: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_OID, name).hex


async def rotated(bench: Bench, name: str, *, overlap: float) -> str:
    secret = new_secret()
    order = RotateRequest(digest=digest_of(secret).hex(), overlap=overlap)
    await bench.engine.operations.change_token(Rotate(name, order))
    return secret


async def names(bench: Bench) -> list[str]:
    return [info.name for info in await bench.engine.queries.list_tokens()]


async def test_the_secret_before_the_latest_is_taken_until_the_overlap_is_over(bench: Bench) -> None:
    first = await made(bench, "t")
    second = await rotated(bench, "t", overlap=8.0)
    tokens = bench.engine.tokens
    assert [tokens.of_digest(digest_of(secret)) is not None for secret in (first, second)] == [True, True]
    await bench.later(7)
    assert tokens.of_digest(digest_of(first)) is not None
    await bench.later(1)
    assert [tokens.of_digest(digest_of(secret)) is not None for secret in (first, second)] == [False, True]


async def test_a_revoked_token_has_no_secret_any_longer_also_none_from_before(bench: Bench) -> None:
    secrets = [await made(bench, "t"), await rotated(bench, "t", overlap=3600.0)]
    await bench.engine.operations.change_token(Revoke("t"))
    assert [bench.engine.tokens.of_digest(digest_of(secret)) for secret in secrets] == [None, None]
    with pytest.raises(Refused, match="revoked"):
        await bench.engine.operations.change_token(Rotate(new_id("t"), RotateRequest(digest="ab" * 32)))


async def test_a_secret_is_of_one_token_also_if_it_is_that_from_before(bench: Bench) -> None:
    secret = await made(bench, "t")
    await rotated(bench, "t", overlap=60.0)
    order = TokenRequest(id=new_id("o"), name="o", digest=digest_of(secret).hex(), scopes=["operate"], kinds=["*"])
    with pytest.raises(Refused, match="used before"):
        await bench.engine.operations.change_token(Create(order))


async def test_a_repeat_is_answered_to_those_who_may_see_the_token_and_for_the_same_order(bench: Bench) -> None:
    digest = digest_of(new_secret()).hex()
    order = TokenRequest(id=new_id("t"), name="t", digest=digest, scopes=["read"], kinds=["a", "b"])
    change = bench.engine.operations.change_token
    first = await change(Create(order))
    assert await change(Create(order)) == first
    narrow = Access(name="n", scopes=frozenset({"operate", "read"}), kinds=KindPatterns(["a"]), token_id=new_id("n"))
    for again in (
        Create(order, by=narrow),
        Create(replace(order, kinds=["a"])),
        Create(replace(order, scopes=["work"])),
    ):
        with pytest.raises(Conflict, match="id is that of another access token"):
            await change(again)


async def test_who_came_without_a_token_makes_none_once_there_is_one(bench: Bench) -> None:
    await bench.engine.operations.change_token(Create(order_of("first"), by=GUEST))
    for late in (Create(order_of("late"), by=GUEST), Revoke("first", by=GUEST)):
        with pytest.raises(AccessDenied, match="has an access token by now"):
            await bench.engine.operations.change_token(late)


def order_of(name: str) -> TokenRequest:
    digest = digest_of(new_secret()).hex()
    return TokenRequest(id=new_id(name), name=name, digest=digest, scopes=["operate"], kinds=["*"])


async def test_a_late_copy_of_the_rotation_before_brings_no_old_secret_back(bench: Bench) -> None:
    await made(bench, "t")
    first, second = [await rotated(bench, "t", overlap=0.0) for _ in range(2)]
    with pytest.raises(Refused, match="used before"):
        await bench.engine.operations.change_token(Rotate("t", RotateRequest(digest=digest_of(first).hex())))
    tokens = bench.engine.tokens
    assert [tokens.of_digest(digest_of(secret)) is not None for secret in (first, second)] == [False, True]
    (info,) = await bench.engine.queries.list_tokens()
    assert info.former_until is None


async def test_tokens_that_ended_are_kept_for_a_month_and_the_latest_one_for_ever(bench: Bench) -> None:
    for name in ("old", "good", "last"):
        await made(bench, name)
        bench.clock.advance(1)
    for name in ("old", "last"):
        await bench.engine.operations.change_token(Revoke(name))
    await bench.later(29 * DAY)
    await bench.engine.sweeper.sweep()
    assert await names(bench) == ["old", "good", "last"]
    await bench.later(2 * DAY)
    await bench.engine.sweeper.sweep()
    assert await names(bench) == ["good", "last"]
    await bench.engine.operations.change_token(Revoke("good"))
    await bench.later(31 * DAY)
    await bench.engine.sweeper.sweep()
    assert await names(bench) == ["last"]
    await bench.restart()
    assert bench.engine.tokens.has_any, "servers do not become open again"


async def test_the_log_is_kept_for_a_year(bench: Bench) -> None:
    await bench.engine.operations.note(Note("gate.close"))
    await bench.later(audit.KEPT - DAY)
    await bench.engine.operations.note(Note("gate.open"))
    await bench.engine.sweeper.sweep()
    assert [entry.act for entry in (await bench.engine.queries.audit()).entries] == ["gate.open", "gate.close"]
    await bench.later(2 * DAY)
    await bench.engine.sweeper.sweep()
    assert [entry.act for entry in (await bench.engine.queries.audit()).entries] == ["gate.open"]


async def test_a_change_that_fails_is_not_in_the_log(bench: Bench) -> None:
    await made(bench, "t")
    with pytest.raises(Refused):
        await bench.engine.operations.change_token(
            Create(TokenRequest(id=new_id("o"), name="t", digest="ab" * 32, scopes=["read"], kinds=["*"])),
            note=Note("token.create", target="t"),
        )
    assert (await bench.engine.queries.audit()).entries == []


def session(number: int, until: float, *, secret: bytes = bytes(32)) -> SessionRow:
    return SessionRow(number.to_bytes(32), secret, until)


async def known(bench: Bench, numbers: range) -> list[int]:
    """Return the sessions of these numbers that go on."""
    return [number for number in numbers if await bench.engine.queries.session(number.to_bytes(32)) is not None]


async def test_a_session_of_the_console_ends_when_its_time_is_over(bench: Bench) -> None:
    await bench.engine.operations.begin_session(session(1, bench.engine.clock.peek() + 10.0))
    await bench.later(9)
    assert await known(bench, range(3)) == [1]
    await bench.restart()
    assert await known(bench, range(3)) == [1]
    await bench.later(1)
    assert await known(bench, range(3)) == []


async def test_a_session_of_the_console_ends_when_it_is_left(bench: Bench) -> None:
    now = bench.engine.clock.peek()
    for number in range(3):
        await bench.engine.operations.begin_session(session(number, now + 10.0))
    for left in (1, 1, 7):
        await bench.engine.operations.end_session(left.to_bytes(32))
    assert await known(bench, range(8)) == [0, 2]


async def test_a_thousand_sessions_of_the_console_are_kept_and_none_that_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.roles.tokens._SESSIONS", 3)
    now = bench.engine.clock.peek()
    for number in range(5):
        await bench.engine.operations.begin_session(session(number, now + 10.0 + number))
    assert await known(bench, range(5)) == [2, 3, 4]
    await bench.later(13)
    await bench.engine.operations.begin_session(session(5, now + 60.0))
    rows = await bench.engine._readers.read(lambda view: view.sessions())
    assert [int.from_bytes(row.digest) for row in rows] == [4, 5]


async def test_the_sessions_of_one_access_token_end_none_of_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.roles.tokens._SESSIONS", 4)
    monkeypatch.setattr("leasekit.server.roles.tokens._OF_ONE", 2)
    until = bench.engine.clock.peek() + 60.0
    await bench.engine.operations.begin_session(session(0, until, secret=b"other"))
    for number in range(1, 9):
        await bench.engine.operations.begin_session(session(number, until + number))
    assert await known(bench, range(9)) == [0, 7, 8]
