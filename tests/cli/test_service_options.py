"""`--header`, `--ca`, `--proxy` and LEASEKIT_HEADERS: how a command reaches a server behind other people's proxies."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

SECRET = "Bearer hunter2"


@pytest.fixture
def asked() -> list[BaseHTTPRequestHandler]:
    return []


@pytest.fixture
def server(asked: list[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A proxy that lets in who knows the secret."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self)
            body = b'{"kinds": {"k": {"new": 2}}, "workers": [], "tasks": [], "gates": []}'
            self.send_response(200 if self.headers["Authorization"] == SECRET else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("command", ["stats", "status", "workers", "tasks"])
def test_a_header_is_sent(command: str, run: Run, server: str) -> None:
    done = run(command, "--backend", server, "--header", f"Authorization: {SECRET}", "--header", "X-Team: a")
    assert (done.exit_code, done.stderr) == (0, "")


def test_headers_come_from_the_environment(run: Run, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "401" in run("stats", "--backend", server).stderr
    monkeypatch.setenv("LEASEKIT_HEADERS", f"authorization: {SECRET}")
    assert run("stats", "--backend", server).stdout == "k\tnew\t2\n"


def test_a_token_file_is_read_also_where_the_code_of_the_worker_names_the_service(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.py").write_text('import leasekit\nworker = leasekit.Worker("http://127.0.0.1:9")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run("work", "named:worker", "--no-supervise", "--token-file", "none.token")
    assert (done.exit_code, done.stderr) == (
        2, "leasekit work: the access token cannot be read from none.token: No such file or directory\n",
    )  # fmt: skip


def test_a_proxy_is_asked(run: Run, server: str, asked: list[BaseHTTPRequestHandler]) -> None:
    header = ("--header", f"authorization: {SECRET}")
    assert run("stats", "--backend", "http://tasks.invalid", "--proxy", server, *header).stdout == "k\tnew\t2\n"
    assert asked[0].path == "http://tasks.invalid/v1/stats"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--header", "hunter2"], "--header must have the form 'Name: value'"),
        (["--ca", "/does/not/exist"], "ca=/does/not/exist has no certificates that can be read"),
        (["--proxy", "hunter2"], "proxy must be http://host:port"),
    ],
)
def test_what_cannot_be_used_is_wrong_usage(options: list[str], why: str, run: Run) -> None:
    done = run("stats", "--backend", "https://tasks.invalid", *options)
    assert done.exit_code == 2
    assert why in done.stderr
    assert "hunter2" not in done.stderr


def test_an_option_that_the_service_does_not_know_is_wrong_usage(run: Run) -> None:
    done = run("stats", "--header", "a: b")
    assert (done.exit_code, done.stderr) == (
        2, "leasekit stats: memory:// knows no option 'headers': it has no options\n",
    )  # fmt: skip
