"""Secrets: with a codec that encrypts, no file, log, metric or command shows what tasks carry, whatever dies when."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import leasekit
from tests.process.conftest import Fleet
from tests.test_codecs import Aes
from tests.waiting import eventually

SECRET = "canary-8d21"
KEY = "of the tests, and of no other use"


def codec() -> Aes:
    return Aes(key=KEY[:32].encode(), errors=True)


def leaks(home: Path, *outputs: bytes) -> Iterator[str]:
    for path in home.rglob("*"):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            yield str(path)
    yield from (output.decode() for output in outputs if SECRET.encode() in output)


@pytest.mark.slow
def test_no_file_log_metric_or_command_shows_a_secret_when_worker_and_server_are_killed(fleet: Fleet) -> None:
    fleet.handlers(
        """
        from tests.process.test_secrets import codec

        worker = leasekit.Worker(hooks=[hear], codec=codec())

        @worker.handler("secret", run="thread")
        def secret(payload, held):
            assert payload["password"].startswith("canary-"), payload
            held.progress(payload["password"])
            note("start", attempt=held.attempt, resumed=held.checkpoint == payload["password"])
            while held.fence == 1 or not os.path.exists("server-is-gone"):
                time.sleep(0.01)
            held.then("next", payload)
            note("end")
            return payload
        """
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    server = fleet.serve()

    def work(name: str) -> None:
        options = ("work", "handlers:worker", "--backend", fleet.url, "--ttl", "6", "--spool", "spool")
        fleet.start(name, "-m", "leasekit", *options, **environment)

    work("first")
    with leasekit.connect(fleet.url, codec=codec()) as client:
        payload = {"password": SECRET}
        task = client.schedule("secret", payload, claim_timeout=60, heartbeat_timeout=60)
        first = eventually(lambda: fleet.notes("start"), what="the first run")[0]
        eventually(lambda: (it := client.get(task.id)) is not None and it.progress == SECRET, what="its checkpoint")
        os.kill(first["pid"], signal.SIGKILL)
        second = eventually(lambda: fleet.notes("start")[1:], what="the second run")[0]
        assert second["resumed"]
    server.kill()
    (fleet.home / "server-is-gone").touch()
    eventually(lambda: [path for path in (fleet.home / "spool").rglob("*") if path.is_file() and path.stat().st_size])
    os.kill(second["pid"], signal.SIGKILL)
    assert not list(leaks(fleet.home))

    fleet.serve(fleet.port)
    with leasekit.connect(fleet.url, codec=codec()) as client:
        (info,) = client.wait_tasks(task.id, timeout=60)
        assert (info.result, info.payload, info.progress) == (payload, payload, SECRET)
        (follows,) = client.list_tasks(kind="next").tasks
        assert follows.payload == payload
    command = [sys.executable, "-m", "leasekit", "status", task.id, "--backend", fleet.url]
    shown = [subprocess.check_output([*command, *option]) for option in ([], ["--json"])]
    assert b"(encoded with aes-1)" in shown[0]
    assert b'"$codec"' in shown[1]
    with urllib.request.urlopen(f"{fleet.url}/metrics") as metrics:  # noqa: S310 - the test's own server
        assert not list(leaks(fleet.home, *shown, metrics.read()))
