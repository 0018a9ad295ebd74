"""The console of a store without a server: opened here, joined, mounted, and as a process."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import leasekit
from leasekit.console import StoreConsole
from leasekit.errors import ConfigError
from leasekit.server.console.visit import Mode
from leasekit.server.store.postgres.store import PostgresStore
from tests.postgres_server import PostgresServer
from tests.server.http.conftest import run

pytestmark = pytest.mark.anyio

ORIGIN = "https://ops.example"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    postgres: PostgresServer = request.getfixturevalue("postgres")
    database = postgres.new_database()
    PostgresStore(database).migrate()
    return database


@pytest.fixture
async def mounted() -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """Mount the console of a store into an application of another host."""
    opened: list[StoreConsole] = []
    clients: list[httpx.AsyncClient] = []

    def mount(url: str, mode: Mode = "on") -> httpx.AsyncClient:
        opened.append(StoreConsole(url, mode=mode))
        app = Starlette(routes=[Mount("/ops/tasks", opened[-1])])
        clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=ORIGIN))
        return clients[-1]

    yield mount
    for client in clients:
        await client.aclose()
    for console in opened:
        await console.aclose()


async def test_it_shows_and_changes_a_store_that_no_process_has_open(
    url: str, mounted: Callable[..., httpx.AsyncClient]
) -> None:
    client = mounted(url)
    assert (await client.get("/ops/tasks/")).status_code == 200
    async with leasekit.connect(url) as other:  # joins
        await other.aschedule("k", id="t")
    page = await client.get("/ops/tasks/task?id=t")
    assert "<title>t · leasekit</title>" in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    form = {"act": "cancel", "id": "t"}
    assert (
        await client.post("/ops/tasks/do", data=form, headers={"origin": "https://evil.example"})
    ).status_code == 403
    answer = await client.post("/ops/tasks/do", data=form, headers={"origin": ORIGIN})
    assert answer.status_code == 303
    assert not answer.headers["location"].startswith(("http", "/")), (
        "it is relative, so that it stays where it is mounted"
    )
    async with leasekit.connect(url) as other:
        task = await other.aget("t")
        assert task is not None
        assert task.status == "cancelled"


async def test_it_shows_what_another_process_has_open(
    tmp_path: Path, mounted: Callable[..., httpx.AsyncClient]
) -> None:
    with run(f"sqlite:///{tmp_path}/tasks.db") as server:
        server.post("/v1/tasks", {"tasks": [{"kind": "k", "id": "there"}]})
        # A test's server has no socket beside its store: the refusal says what is the matter.
        answer = await mounted(f"sqlite:///{tmp_path}/tasks.db").get("/ops/tasks/task?id=there")
        assert answer.status_code == 503


async def test_a_read_only_console_of_a_store_changes_nothing(
    url: str, mounted: Callable[..., httpx.AsyncClient]
) -> None:
    client = mounted(url, "read-only")
    async with leasekit.connect(url) as other:
        await other.aschedule("k", id="t")
        assert "do?act" not in (await client.get("/ops/tasks/task?id=t")).text
        form = {"act": "cancel", "id": "t"}
        assert (await client.post("/ops/tasks/do", data=form, headers={"origin": ORIGIN})).status_code == 403


def test_a_store_in_memory_has_no_other_console() -> None:
    with pytest.raises(ConfigError, match="its process's own"):
        StoreConsole("memory:")


@pytest.mark.slow
def test_the_command_prints_its_address_answers_this_machine_and_gives_the_store_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with leasekit.connect(url) as client:
        client.schedule("k", id="t")
    command = [sys.executable, "-m", "leasekit", "console", url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.rpartition("/console/")[0].rpartition(":")[2])

            def ask(path: str, host: str) -> tuple[int, str]:
                with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                    connection.request("GET", path, headers={"host": host})
                    response = connection.getresponse()
                    return response.status, response.read().decode()

            status, page = ask("/console/task?id=t", f"127.0.0.1:{port}")
            assert (status, "<title>t · leasekit</title>" in page) == (200, True)
            assert ask("/console/", "evil.example")[0] == 400
            with leasekit.connect(url) as client:  # joins
                assert client.get("t") is not None
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()
    with leasekit.connect(url) as client:
        assert client.get("t") is not None
