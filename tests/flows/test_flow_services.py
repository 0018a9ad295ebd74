"""Flows on every service that knows chains: the same few, from start to end, with a resume and a cancel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import leasekit
from leasekit import Client, Flow, NotYet, Refused, Step, Worker
from leasekit_redis import maintenance
from tests.postgres_server import PostgresServer
from tests.redis_server import Server
from tests.server.http.conftest import run
from tests.waiting import eventually


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), "--appendonly", "no")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(params=["http", "postgresql", "redis"])
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    if request.param == "http":
        with run(f"sqlite:///{tmp_path}/tasks.db") as server, leasekit.connect(f"http://127.0.0.1:{server.port}") as to:
            yield to
        return
    if request.param == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        url = postgres.emptied()
    else:
        redis: Server = request.getfixturevalue("redis_server")
        monkeypatch.setattr(maintenance, "INTERVAL", 0.2)  # a join is made ready by maintenance
        url = f"redis://127.0.0.1:{redis.port}/0"
    with leasekit.connect(url) as to:
        yield to


class Album:
    """A flow with all edges, and what its steps do."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.waits = 2
        self.breaks: set[str] = set()
        self.cancels: set[str] = set()
        self.flow = flow = Flow(name, state=list[str])

        @flow.step(on_success="convert", on_failure="clean", max_attempts=1)
        def fetch(pages: list[str]) -> list[str]:
            self.check("fetch")
            return [*pages, "cover"]

        @flow.step(each=lambda pages: pages, on_success="publish", max_attempts=1)
        def convert(page: str) -> str:
            self.check(page)
            return page.upper()

        @flow.step(retry_every=0)
        def publish(pages: list[str], step: Step) -> list[str]:
            if self.waits:
                self.waits -= 1
                raise NotYet
            return step.results

        @flow.step()
        def clean(pages: list[str]) -> list[str]:
            return []

        self.worker = Worker(client)
        self.worker.add(flow)

    def check(self, what: str) -> None:
        if what in self.cancels:
            self.client.cancel_flow(self.flow_id)
        if what in self.breaks:
            raise RuntimeError(f"{what} is broken")

    def run(self) -> leasekit.FlowInfo:
        self.flow_id = self.flow.start(self.client, ["a", "b"]).id
        return self.go_on()

    def go_on(self) -> leasekit.FlowInfo:
        """Run what is due until the flow has stopped: Redis makes a join ready a while after its last branch."""
        return eventually(self._stopped, "the end of the flow")

    def _stopped(self) -> leasekit.FlowInfo | None:
        self.worker.drain()
        info = self.client.flow(self.flow_id)
        assert info is not None
        return None if info.status == "running" else info


@pytest.fixture
def album(client: Client, request: pytest.FixtureRequest) -> Album:
    return Album(client, f"album-{abs(hash(request.node.name))}")


def test_a_flow_runs_to_its_end(album: Album) -> None:
    info = album.run()
    assert (info.status, info.state) == ("succeeded", ["A", "B", "COVER"])
    assert info.workload == 1 + 3 + 3
    found, _ = album.client.flows(album.flow.name)
    assert found == [info]


def test_a_flow_goes_back(album: Album) -> None:
    album.breaks = {"fetch"}
    info = album.run()
    assert (info.status, info.state) == ("rolled_back", [])


def test_a_flow_is_resumed_with_the_branch_that_failed(album: Album) -> None:
    album.breaks = {"b"}
    info = album.run()
    assert (info.status, info.steps) == ("failed", ["convert"])
    album.breaks = set()
    album.client.resume_flow(info.id)
    info = album.go_on()
    assert (info.status, info.state, info.workload) == ("succeeded", ["A", "B", "COVER"], 8)


def test_a_flow_is_cancelled_while_a_step_ends(album: Album) -> None:
    album.cancels = {"fetch"}
    info = album.run()
    assert (info.status, info.workload) == ("cancelled", 1)
    assert [step.step for step in info.history] == ["fetch", *["convert"] * 3, "publish"]
    with pytest.raises(Refused, match="is cancelled"):
        album.client.resume_flow(info.id)


def test_a_codec_hides_the_state_from_the_service(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with leasekit.connect(url, codec=leasekit.codecs.Compressed()) as client:
        info = Album(client, "album").run()
        assert (info.status, info.state, info.workload) == ("succeeded", ["A", "B", "COVER"], 7)
    with leasekit.connect(url) as client:
        seen = client.flow(info.id)
        assert seen is not None
        assert (seen.status, seen.steps, {step.step for step in seen.history}) == ("ended", [], {"?"})
        assert seen.ended_at == info.ended_at
