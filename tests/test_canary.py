"""A secret is found nowhere but where it was given: not in logs, errors, metrics, traces, files, pages, or `ps`."""

import base64
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import leasekit
from leasekit import telemetry
from leasekit.errors import BackendError
from leasekit.server.console.pages import PAGES
from leasekit.tokens import SCOPES
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.slow

IN_DEBUG = "import logging; logging.basicConfig(level=logging.DEBUG); from leasekit.cli.app import app; app()"
WORKER = """
import os, sys, logging
import leasekit

worker = leasekit.Worker()

@worker.handler("quick")
def quick(payload):
    print(repr(worker), sys.argv, flush=True)

@worker.handler("failing", max_attempts=1)
def failing(payload):
    raise ValueError("as it is meant to be")

@worker.handler("apart", run="process")
def apart(payload):
    print(sys.argv, open("/proc/self/cmdline").read(), flush=True)

@worker.handler("spooled")
def spooled(payload):
    open("begun", "w").close()
    while not os.path.exists("go"):
        pass
    return "a result that is spooled"
"""


class Place:
    """A folder in which everything happens, and what was seen of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.given = folder / "given"  # where secrets are
        self.logs = folder / "logs"
        self.work = folder / "work"
        for each in (self.given, self.logs, self.work):
            each.mkdir()
        (self.work / "app.py").write_text(WORKER)
        self.store = f"sqlite:///{folder}/tasks.db"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seen: dict[str, bytes] = {}

    def see(self, name: str, what: object) -> None:
        self.seen[f"{len(self.seen)} {name}"] = what if isinstance(what, bytes) else str(what).encode()

    def command(self, *arguments: str, fails: bool = False, token: Path | None = None) -> None:
        done = subprocess.run(
            [sys.executable, "-c", IN_DEBUG, *arguments],
            cwd=self.work,
            env=os.environ | {"LEASEKIT_URL": self.url, "COLUMNS": "200", "LEASEKIT_TOKEN_FILE": str(token or "")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.returncode) is fails, done
        self.see(" ".join(arguments), done.stdout + done.stderr)

    @contextmanager
    def process(self, name: str, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
        with (self.logs / name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", IN_DEBUG, *arguments],
                cwd=self.work,
                env=os.environ | {"XDG_STATE_HOME": str(self.folder / "state"), "LEASEKIT_URL": self.url} | environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            self.see_processes()
            process.send_signal(signal.SIGTERM)
            process.wait()

    def see_processes(self) -> None:
        """Look at the command lines of all processes of this user, as `ps` shows them."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                self.see(str(path), path.read_bytes())
            except OSError:  # it has ended
                continue

    @contextmanager
    def serving(self) -> Iterator[None]:
        arguments = ("serve", "--store", self.store, "--port", str(self.port), "--require-tokens")
        with self.process("server", *arguments):
            eventually(self.is_up)
            yield

    def is_up(self) -> bool:
        try:
            return self.ask("GET", "/readyz").startswith(b"200")
        except OSError:
            return False

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> bytes:
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            raw = f"{answer.status} {answer.getheaders()} ".encode() + answer.read(200_000)
        self.see(f"{method} {path}", raw)
        return raw

    def spooled(self) -> bytes:
        return b"".join(data for name, data in self.files() if f"{self.folder}/spool" in name)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the store, the spool, the logs, and all else that was written."""
        for path in self.folder.rglob("*"):
            if self.given not in path.parents:
                with suppress(OSError):  # a folder, a socket, or a file that is gone by now
                    yield str(path), path.read_bytes()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def forms_of(secret: str) -> list[bytes]:
    """Return the secret without its prefix, the beginning of that, and forms in which it may hide."""
    body = secret[3:].encode()
    hidden = [base64.b64encode(secret.encode()[at:]).rstrip(b"=")[:-2] for at in range(3)]
    return [body, body[:16], body[-16:], body[::-1], body.hex().encode(), quote(body).encode(), *hidden]


def use_client(place: Place, secret: str, caplog: pytest.LogCaptureFixture) -> None:
    """Use a client with traces, metrics and debug logs, for what works and for what fails."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracing, metering = TracerProvider(), MeterProvider([reader])
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    with caplog.at_level(logging.DEBUG), leasekit.connect(place.url, token=secret) as client:
        telemetry.instrument(client, tracer_provider=tracing, meter_provider=metering)
        client.schedule_all([leasekit.NewTask(kind=kind) for kind in ("quick", "failing", "apart")])
        made = client.create_token("other", scopes=["read"], kinds=["quick"])
        for value in (client, client.url, made, made.info, client.stats(), client.tokens(), client.audit()):
            place.see("repr", f"{value!r} {value}")
        failing: list[Any] = [
            lambda: client.create_token("other", scopes=["read"]),
            lambda: client.rotate_token("nobody"),
            lambda: client.list_tasks(cursor="made up"),
        ]
        with leasekit.connect(place.url, token=made.secret) as narrow:
            failing.append(lambda: narrow.schedule("quick"))
            for fail in failing:
                with pytest.raises(BackendError) as caught:
                    fail()
                place.see("error", "".join(traceback.format_exception(caught.value)) + repr(caught.value))
        client.revoke_token("other")
    with leasekit.connect(f"http://127.0.0.1:{free_port()}", token=secret, retry_for=0.1) as nowhere:
        with pytest.raises(BackendError) as caught:
            nowhere.stats()
        place.see("error", "".join(traceback.format_exception(caught.value)))
    place.see("traces", " ".join(span.to_json() for span in spans.get_finished_spans()))
    measured = reader.get_metrics_data()
    assert measured is not None
    place.see("metrics", measured.to_json())
    place.see("log of the client", caplog.text)


def use_console(place: Place, secret: str) -> None:
    form = {"content_type": "application/x-www-form-urlencoded", "origin": f"http://127.0.0.1:{place.port}"}
    answer = place.ask("POST", "/console/login", urlencode({"token": secret}), **form)
    cookie = answer.partition(b"leasekit-console=")[2].partition(b";")[0].decode()
    assert cookie, answer
    assert b"admin" in place.ask("GET", "/console/", cookie=f"leasekit-console={cookie}")
    for page in PAGES:
        place.ask("GET", f"/console/{page}?kind=quick&name=quick&id=spooled", cookie=f"leasekit-console={cookie}")
    place.ask("POST", "/console/login", urlencode({"token": secret[:-1]}), **form)
    place.ask("GET", f"/console/tasks?token={cookie}")


def use_api(place: Place, secret: str) -> None:
    good = {"authorization": f"Bearer {secret}", "content_type": "application/json"}
    for path in (
        "/metrics",
        "/openapi.json",
        "/v1/tokens",
        "/v1/audit",
        "/v1/workers",
        "/v1/nodes",
        "/v1/tasks/nobody",
    ):
        place.ask("GET", path, **good)
    for path in ("/v1/tasks", "/v1/claims", "/v1/tokens"):
        place.ask("POST", path, "{", **good)
        place.ask("POST", path, json.dumps({"a": 1}), **good)
    for bad in (f"Bearer {secret[:-1]}", f"Bearer {secret} ", f"Basic {secret}", secret, f"Bearer {secret}{secret}"):
        place.ask("GET", "/v1/stats", authorization=bad)
    place.ask("GET", "/v1/stats", host="evil.example", authorization=f"Bearer {secret}")


def test_a_secret_is_found_only_where_it_was_given(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    secrets = []
    for name in ("admin", "worker"):
        scopes = [option for scope in SCOPES for option in ("--scope", scope)]
        place.command("token", "create", name, "--store", place.store, *scopes, "--out", str(place.given / name))
        secrets.append((place.given / name).read_text().strip())
    admin, of_worker = secrets
    options = ("--spool", str(place.folder / "spool"), "--log-level", "debug")
    with place.process("worker", "work", "app:worker", *options, LEASEKIT_TOKEN=of_worker):
        with place.serving():
            use_client(place, admin, caplog)
            use_api(place, admin)
            use_console(place, admin)
            file = place.given / "admin"
            for command in (("stats",), ("tasks",), ("workers",), ("token", "list", "--json"), ("audit", "--json")):
                place.command(*command, token=file)
            place.command("schedule", "spooled", "--id", "spooled", token=file)
            place.command("token", "show", "nobody", fails=True, token=file)
            place.command("stats", "--backend", f"http://127.0.0.1:{free_port()}", fails=True, token=file)
            eventually((place.work / "begun").exists)
        (place.work / "go").touch()
        eventually(lambda: b"a result that is spooled" in place.spooled())
        place.see("spool", place.spooled())
        with place.serving(), leasekit.connect(place.url, token=admin) as client:
            client.wait_tasks("spooled")

    seen = [*place.seen.items(), *place.files()]
    everything = b"".join(data for _, data in seen)
    for expected in (b"ValueError: as it is meant to be", b"leasekit_access_tokens_refused", b"DEBUG", b"app:worker\0"):
        assert expected in everything, expected
    found = [name for name, data in seen for secret in secrets for form in forms_of(secret) if form in data]
    assert found == []


def test_what_looks_for_secrets_finds_them() -> None:
    secret = "lk_" + "0123456789" * 5
    for hidden in (
        secret,
        secret[3:25],
        base64.b64encode(f"user:{secret}".encode()).decode(),
        secret[3:].encode().hex(),
    ):
        assert any(form in hidden.encode() for form in forms_of(secret)), hidden
