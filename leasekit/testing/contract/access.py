"""Tests of access tokens, and of the log of what operators did."""

import hashlib
import uuid
from datetime import timedelta
from typing import Any, Protocol

import pytest

from leasekit.backend import GateDirectory, TokenDirectory
from leasekit.errors import Refused
from leasekit.testing.contract.base import SchedulerBase, Service
from leasekit.tokens import AuditEntry, TokenInfo


class TokenService(Service, TokenDirectory, Protocol):
    """A connection to a service that also has access tokens."""


class Access(SchedulerBase):
    """The promises of `TokenDirectory`, for a service that is one."""

    @pytest.fixture
    def guarded(self, backend: Any) -> TokenService:
        if not isinstance(backend, TokenDirectory):
            pytest.skip(f"{type(backend).__name__} is no TokenDirectory")
        return backend  # type: ignore[return-value]  # it is a `Service` too

    @pytest.fixture
    def order(self, kind: str) -> dict[str, Any]:
        """Return what is asked for to make an access token."""
        return {
            "token_id": uuid.uuid4().hex,
            "name": f"token of {kind}",
            "digest": new_digest(),
            "scopes": ["submit", "read"],
            "kinds": [kind, "mail.*"],
        }

    async def acts(self, service: TokenService, kind: str) -> list[AuditEntry]:
        """Return the entries about this kind, or its token, the latest first."""
        return [entry for entry in (await service.audit()).entries if kind in (entry.target or "")]

    async def test_a_token_is_there_by_its_id_and_its_name_until_it_is_revoked(
        self, guarded: TokenService, other: Any, order: dict[str, Any]
    ) -> None:
        until = self.now().replace(microsecond=0) + timedelta(days=1)
        made = await guarded.create_token(**order, expires_at=until)
        assert (made.id, made.name, made.expires_at) == (order["token_id"], order["name"], until)
        assert (sorted(made.scopes), made.kinds) == (["read", "submit"], order["kinds"])
        assert (made.revoked_at, made.used_at, made.rotated_at) == (None, None, None)
        assert made == await other.token(made.id) == await other.token(made.name)
        assert made in await other.tokens()
        revoked = await other.revoke_token(made.name)
        assert revoked.revoked_at is not None
        assert await guarded.token(made.id) == revoked == await guarded.revoke_token(made.id)
        assert await guarded.token(made.name) is None

    async def test_no_answer_has_the_digest_of_a_secret(self, guarded: TokenService, order: dict[str, Any]) -> None:
        made = await guarded.create_token(**order)
        assert order["digest"] not in repr([made, await guarded.tokens(), await guarded.audit()])

    async def test_a_repeated_order_makes_one_token(self, guarded: TokenService, order: dict[str, Any]) -> None:
        first = await guarded.create_token(**order)
        assert await guarded.create_token(**order) == first
        assert [token.name for token in await guarded.tokens()].count(order["name"]) == 1

    @pytest.mark.parametrize("same", ["token_id", "name", "digest"])
    async def test_an_id_a_valid_name_and_a_secret_are_those_of_one_token(
        self, guarded: TokenService, order: dict[str, Any], same: str
    ) -> None:
        await guarded.create_token(**order)
        new = {"token_id": uuid.uuid4().hex, "name": f"another {order['name']}", "digest": new_digest()}
        with pytest.raises(Refused):
            await guarded.create_token(**changed(order, **{**new, same: order[same]}))

    @pytest.mark.parametrize("is_revoked", [False, True])
    async def test_no_id_is_the_name_of_another_token_and_no_name_its_id(
        self, guarded: TokenService, order: dict[str, Any], *, is_revoked: bool
    ) -> None:
        first = await guarded.create_token(**changed(order, name=uuid.uuid4().hex))
        if is_revoked:
            await guarded.revoke_token(first.name)
        new = {"token_id": uuid.uuid4().hex, "name": f"another {order['name']}", "digest": new_digest()}
        for decoy in ({"token_id": first.name}, {"name": first.id}):
            with pytest.raises(Refused):
                await guarded.create_token(**changed(order, **{**new, **decoy}))

    async def test_the_name_of_a_token_that_ended_is_free(self, guarded: TokenService, order: dict[str, Any]) -> None:
        first = await guarded.create_token(**order)
        await guarded.revoke_token(first.id)
        second = await guarded.create_token(**changed(order, token_id=uuid.uuid4().hex, digest=new_digest()))
        assert await guarded.token(order["name"]) == second
        assert await guarded.token(first.id) != second

    async def test_a_rotated_token_has_another_secret_and_stays_the_same_otherwise(
        self, guarded: TokenService, order: dict[str, Any]
    ) -> None:
        made = await guarded.create_token(**order)
        digest = new_digest()
        rotated = await guarded.rotate_token(made.name, digest=digest, overlap=60.0)
        assert await guarded.rotate_token(made.name, digest=digest, overlap=60.0) == rotated
        assert rotated.rotated_at is not None
        assert rotated.former_until is not None
        assert 59 < (rotated.former_until - rotated.rotated_at).total_seconds() < 61
        assert what_it_is(rotated) == what_it_is(made)
        with pytest.raises(Refused):
            await guarded.rotate_token(made.name, digest=order["digest"])

    async def test_an_expired_token_is_found_by_its_id_only_and_gets_no_other_secret(
        self, guarded: TokenService, order: dict[str, Any]
    ) -> None:
        made = await guarded.create_token(**order, expires_at=self.now() + timedelta(seconds=1))
        await self.sleep(1.1)
        assert await guarded.token(made.name) is None
        assert await guarded.token(made.id) == made
        with pytest.raises(Refused):
            await guarded.rotate_token(made.id, digest=new_digest())

    async def test_a_token_that_does_not_exist_is_refused(self, guarded: TokenService, kind: str) -> None:
        assert await guarded.token(kind) is None
        with pytest.raises(Refused):
            await guarded.revoke_token(kind)
        with pytest.raises(Refused):
            await guarded.rotate_token(kind, digest=new_digest())

    @pytest.mark.parametrize(
        "wrong",
        [
            {"digest": "short"},
            {"digest": "AB" * 32},
            {"scopes": []},
            {"scopes": ["all"]},
            {"kinds": []},
            {"kinds": ["a*b"]},
            {"kinds": ["**"]},
            {"kinds": ["a/b"]},
            {"name": ""},
            {"name": "local"},
            {"name": "-"},
            {"name": "a/b"},
            {"token_id": ""},
            {"token_id": "workers"},
        ],
    )
    async def test_what_is_no_token_is_refused(
        self, guarded: TokenService, order: dict[str, Any], wrong: dict[str, Any]
    ) -> None:
        with pytest.raises(Refused):
            await guarded.create_token(**changed(order, **wrong))

    async def test_a_token_that_would_have_ended_already_is_refused(
        self, guarded: TokenService, order: dict[str, Any]
    ) -> None:
        with pytest.raises(Refused):
            await guarded.create_token(**order, expires_at=self.now() - timedelta(seconds=1))

    async def test_each_act_is_in_the_log_with_its_number_and_no_value(
        self, guarded: TokenService, kind: str, order: dict[str, Any]
    ) -> None:
        made = await guarded.create_token(**order)
        await self.sleep(0.01)  # acts of one millisecond are in no order
        await guarded.rotate_token(made.name, digest=new_digest())
        await self.sleep(0.01)
        await guarded.revoke_token(made.name)
        with pytest.raises(Refused):
            await guarded.create_token(**changed(order, scopes=["all"]))
        entries = await self.acts(guarded, kind)
        assert [entry.act for entry in entries] == ["token.revoke", "token.rotate", "token.create"]
        assert {entry.target for entry in entries} == {made.name}
        assert [entry.count for entry in entries] == [1, 1, 1]
        assert {"name", "scopes", "kinds"} <= set(entries[-1].fields)
        assert "mail.*" not in repr(entries)

    async def test_the_log_is_read_in_pages_the_latest_first(self, guarded: TokenService, kind: str) -> None:
        assert isinstance(guarded, GateDirectory), "a service with operators has gates"
        for _ in range(5):
            await guarded.set_gate(kind=kind, reason="a secret reason")
        whole = await self.acts(guarded, kind)
        assert [entry.act for entry in whole] == ["kind.pause"] * 5
        assert sorted(whole, key=lambda entry: entry.id, reverse=True) == whole
        found, cursor = list[AuditEntry](), None
        while len(found) < 5:
            page = await guarded.audit(cursor=cursor, limit=2)
            assert len(page.entries) <= 2
            found += [entry for entry in page.entries if entry.target == kind]
            cursor = page.cursor
        assert found == whole
        assert "secret reason" not in repr(found)


def new_digest() -> str:
    return hashlib.sha256(uuid.uuid4().bytes).hexdigest()


def changed(order: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**order, **fields}


def what_it_is(info: TokenInfo) -> tuple[Any, ...]:
    return info.id, info.name, info.scopes, info.kinds, info.created_at, info.created_by, info.expires_at
