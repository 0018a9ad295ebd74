"""The roles of a server: how they are given, and that only the consumer does the consumer's work."""

import pytest

from leasekit.errors import ConfigError
from leasekit.server.engine import Engine
from leasekit.server.node_roles import Role, listed, parsed_roles
from leasekit.server.store.memory import MemoryStore
from leasekit.task import NewTask
from leasekit.testing.clock import FakeClock

pytestmark = pytest.mark.anyio


def test_roles_are_given_as_names_with_commas() -> None:
    assert parsed_roles("hsc, frontend") == {Role.HSC, Role.FRONTEND}
    assert listed({Role.CONSUMER, Role.FRONTEND}) == "frontend,consumer"


@pytest.mark.parametrize("text", ["", "hsc,", "reaper"])
def test_a_role_that_does_not_exist_is_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError, match="name one or more of frontend,hsc,consumer"):
        parsed_roles(text)


@pytest.mark.parametrize(("role", "status"), [(Role.HSC, "claimed"), (Role.CONSUMER, "enqueued")])
async def test_leases_are_expired_by_the_consumer_alone(role: Role, status: str) -> None:
    clock = FakeClock(1_000_000.0)
    async with Engine(MemoryStore(), clock=clock, roles=frozenset({role})) as engine:
        await engine.schedule([NewTask(kind="k", id="a", claim_timeout=10)])
        await engine.claim(worker="w", kinds=["k"], limit=1, wait=0, claim_id="c")
        clock.advance(11)
        await engine.tick()
        info = await engine.queries.get("a")
        assert info is not None
        assert info.status == status
