"""Names in Redis: one holder at a time, one run to the end, without a server of leasekit's."""

import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

import leasekit
from leasekit import AlreadyDone, Cancelled, Client, NotGranted
from leasekit.task import Beat, NewTask, Outcome, Settlement
from leasekit_redis import RedisBackend, connect
from tests.adapters.redis.conftest import Cluster
from tests.redis_server import Server, until


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    where: Server | Cluster = request.getfixturevalue(request.param)
    return where.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with leasekit.connect(url) as client:
        yield client


def test_a_name_has_one_holder_at_a_time(client: Client, url: str) -> None:
    with leasekit.connect(url) as other, leasekit.lease(client.named("reports/nightly")) as held:
        with pytest.raises(NotGranted), leasekit.lease(other.named("reports/nightly", wait=0)):
            pytest.fail("two held it")
        fence = held.fence
    with leasekit.connect(url) as other, leasekit.lease(other.named("reports/nightly", wait=10)) as held:
        assert held.fence > fence


def test_whoever_waits_is_granted_it_when_it_is_given_back(client: Client, url: str) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        with leasekit.connect(url) as other:
            waits.set()
            with leasekit.lease(other.named("waited for", wait=60)):
                order.append("second")

    thread = threading.Thread(target=second)
    with leasekit.lease(client.named("waited for")):
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_what_ended_well_is_not_run_again(client: Client, url: str) -> None:
    with leasekit.lease(client.once(f"message of {url}")):
        pass
    with (
        leasekit.connect(url) as other,
        pytest.raises(AlreadyDone),
        leasekit.lease(other.once(f"message of {url}")),
    ):
        pytest.fail("it ran twice")


def test_a_name_that_is_revoked_is_given_back_and_granted_again(client: Client, url: str) -> None:
    name = f"revoked of {url} {uuid.uuid4().hex}"
    with suppress(Cancelled), client.named(name) as held:
        assert client.revoke(name).verdict == "cancel_requested"
        held.progress(1)  # soon in a heartbeat, whose answer asks for the name
        while True:
            held.check()
            time.sleep(0.01)
    assert client.revoke(name).verdict == "cancelled"
    with client.named(name, wait=0) as again:
        assert again.fence == held.fence + 1


# What a name costs ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_run_of_a_name_takes_two_scripts(own_server: Server) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        await once(backend, "warm")
        before = scripts_run(own_server)
        for number in range(20):
            await once(backend, f"{number}")
        assert scripts_run(own_server) - before <= 2 * 20 + 3  # some of them may be maintenance


@pytest.mark.anyio
@pytest.mark.parametrize("outcome", ["success", "release"])
async def test_a_name_that_has_ended_needs_no_maintenance_until_it_is_forgotten(
    own_server: Server, outcome: Outcome
) -> None:
    async with aclosing(connect(f"{own_server.url}?retention=1h", worker="w")) as backend:
        kind = await once(backend, "a", outcome)
        hours = (float(own_server.ask("ZSCORE", "leasekit:kinds", kind)) / 1000 - time.time()) / 3600
        assert round(hours, 1) == (1 if outcome == "success" else 0)


@pytest.mark.anyio
@pytest.mark.parametrize("left", ["a successor", "a wait for it", "a damaged task"])
async def test_a_name_that_has_left_something_to_do_is_maintained_soon(own_server: Server, left: str) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        kind = "once:a"
        if left == "a wait for it":
            await backend.schedule([NewTask(kind="b", id="b", after=[kind])])
        elif left == "a damaged task":
            own_server.ask("ZADD", f"leasekit:{{{kind}}}:damaged", 1, "c")
        elif left == "a successor":
            own_server.ask("RPUSH", f"leasekit:{{{kind}}}:outbox", '{"kind":"c","id":"c"}')
        await once(backend, "a")
        due_at = float(own_server.ask("ZSCORE", "leasekit:kinds", kind)) / 1000
        assert due_at < time.time() + 60
        if left == "a wait for it":
            assert len((await backend.claim(["b"], limit=1, wait=0, claim_id=uuid.uuid4().hex)).tasks) == 1


@pytest.mark.anyio
async def test_one_script_forgets_many_names(own_server: Server) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        backend._maintenance._retention = backend._renewing._retention = 0
        kinds = [await once(backend, f"{number}") for number in range(120)]
        for kind in kinds:
            own_server.ask("DEL", f"leasekit:{{{kind}}}:claimed")  # as if the answers were forgotten
        before = scripts_run(own_server)
        await backend.maintain()
        assert scripts_run(own_server) - before <= 6  # who maintains, what is due, both twice; and two for the names
        assert own_server.ask("KEYS", "*") == [b"leasekit:clients"]


@pytest.mark.anyio
async def test_a_name_is_not_forgotten_while_a_claim_of_it_may_be_repeated(own_server: Server) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        backend._maintenance._retention = backend._renewing._retention = 0
        kind, ended = "once:a", uuid.uuid4().hex
        await backend.claim([kind], limit=0, wait=0, claim_id=ended)
        await once(backend, "a")
        await backend.maintain()
        assert (await backend.claim_name(NewTask(kind=kind, id=kind), claim_id=ended)).tasks == []


@pytest.mark.anyio
async def test_names_are_claimed_where_no_script_may_have_keys_of_several(one_node: Server) -> None:
    async with aclosing(connect(one_node.url, worker="w")) as backend:  # as behind a proxy: the client knows one server
        for number in range(3):
            kind = await once(backend, f"{number}")
            info = await backend.get(kind)
            assert info is not None
            assert info.status == "success"
        assert not backend._link.is_one_server


async def once(backend: RedisBackend, name: str, outcome: Outcome = "success") -> str:
    kind = f"once:{name}"
    (task,) = (await backend.claim_name(NewTask(kind=kind, id=kind), claim_id=uuid.uuid4().hex)).tasks
    (verdict,) = await backend.settle([Settlement(id=kind, token=task.token, outcome=outcome)])
    assert verdict.verdict == "settled"
    return kind


# Many names of one process -------------------------------------------------------------------------------------


def scripts_run(server: Server) -> int:
    found = re.search(r"cmdstat_evalsha:calls=(\d+)", str(server.ask("INFO", "commandstats")))
    return int(found[1]) if found else 0


async def held_names(backend: RedisBackend, names: Sequence[str]) -> list[Beat]:
    kinds = [f"named:{name}" for name in names]
    for kind in kinds:
        await backend.schedule([NewTask(kind=kind, id=kind)])
    claims = [await backend.claim([kind], limit=1, wait=0, claim_id=uuid.uuid4().hex) for kind in kinds]
    return [Beat(id=claimed.tasks[0].id, token=claimed.tasks[0].token) for claimed in claims]


@pytest.mark.anyio
async def test_few_scripts_renew_many_names(own_server: Server) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        beats = await held_names(backend, [f"{uuid.uuid4()}" for _ in range(120)])
        await backend.beat(beats)
        before = scripts_run(own_server)
        assert [verdict.verdict for verdict in await backend.beat(beats)] == ["renewed"] * 120
        assert scripts_run(own_server) - before <= 4  # one of them may be maintenance


@pytest.mark.anyio
async def test_a_name_whose_keys_are_damaged_does_not_harm_the_others(own_server: Server) -> None:
    async with aclosing(connect(own_server.url, worker="w")) as backend:
        beats = await held_names(backend, "abcdefghijkl")
        own_server.ask("DEL", "leasekit:{named:b}:working")
        own_server.ask("SET", "leasekit:{named:b}:working", "a text")
        for _ in range(2):
            before = scripts_run(own_server)
            verdicts = await backend.beat(beats)
            assert [verdict.verdict for verdict in verdicts] == ["renewed", "failed", *["renewed"] * 10]
            assert "another program uses a key" in str(verdicts[1].reason)
        assert scripts_run(own_server) - before < 6  # one for all, one for the damaged name; maintenance may come too


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[Server]:
    """A cluster of one node."""
    server = Server(tmp_path / "one", "--cluster-enabled", "yes")
    server.start()
    try:
        server.ask("CLUSTER", "ADDSLOTS", *range(16384))
        until(lambda: b"cluster_state:ok" in server.ask("CLUSTER", "INFO"), "a cluster of one node")
        yield server
    finally:
        server.kill()


@pytest.mark.anyio
async def test_names_are_renewed_where_no_script_may_have_keys_of_several(one_node: Server) -> None:
    async with aclosing(connect(one_node.url, worker="w")) as backend:  # as behind a proxy: the client knows one server
        beats = await held_names(backend, ["a", "b", "c"])
        assert [verdict.verdict for verdict in await backend.beat(beats)] == ["renewed"] * 3
        before = scripts_run(one_node)
        await backend.beat(beats)
        assert scripts_run(one_node) - before >= 3
