"""A worker's health over HTTP, as a probe of a platform sees it."""

import http.client
import json
import re
import signal
from contextlib import closing
from typing import Any

import pytest

import leasekit
from tests.process.conftest import Fleet, Process
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def port_of(worker: Process) -> int:
    return int(eventually(lambda: re.findall(r"health is answered at http://\S+:(\d+)/", worker.log.read_text()))[-1])


def probe(port: int) -> tuple[int, Any] | None:
    """Status and body; None: there was no answer within a second."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as connection:
        try:
            connection.request("GET", "/")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except OSError:
            return None


def is_ok(port: int) -> bool:
    return (probe(port) or (0,))[0] == 200


def test_a_worker_that_holds_the_interpreter_does_not_answer(fleet: Fleet) -> None:
    fleet.handlers(
        """
        import ctypes

        @worker.handler("hang")
        def hang(payload):
            ctypes.PyDLL(None).sleep(3600)  # a PyDLL keeps the GIL
        """
    )
    fleet.serve()
    worker = fleet.work("worker", "--health", "0")
    port = port_of(worker)
    eventually(lambda: is_ok(port))
    with leasekit.connect(fleet.url) as client:
        client.schedule("hang", max_attempts=1)
        eventually(lambda: probe(port) is None)
        assert probe(port) is None


def test_a_worker_is_healthy_while_its_server_is_away_and_while_it_drains(fleet: Fleet) -> None:
    fleet.handlers(
        """
        @worker.handler("long")
        def long(payload, held):
            note("begun")
            while not os.path.exists("go"):
                time.sleep(0.01)
        """
    )
    server = fleet.serve()
    worker = fleet.work("worker", "--health", "127.0.0.1:0")
    port = port_of(worker)
    with leasekit.connect(fleet.url) as client:
        client.schedule("long")
    eventually(lambda: fleet.notes("begun"))
    status, body = probe(port) or (0, {})
    assert (status, body["status"]) == (200, "ok")
    assert body["trust_left"] > 200
    server.kill()
    eventually(lambda: "does not answer" in worker.log.read_text())
    assert is_ok(port)
    worker.popen.send_signal(signal.SIGTERM)
    eventually(lambda: (probe(port) or (0, {}))[1].get("detail") == "the worker drains")
    (fleet.home / "go").touch()
    worker.kill()


def test_a_worker_whose_driver_alone_is_stuck_answers_503(fleet: Fleet) -> None:
    fleet.handlers(
        """
        def stuck(event):
            if isinstance(event, hooks.Claimed):
                time.sleep(3600)

        worker.listen(stuck)

        @worker.handler("k")
        def k(payload):
            pass
        """
    )
    fleet.serve()
    port = port_of(fleet.work("worker", "--health", "127.0.0.1:0"))
    with leasekit.connect(fleet.url) as client:
        client.schedule("k")
    detail = "the driver's thread has had no turn for"
    eventually(lambda: detail in (probe(port) or (0, {}))[1].get("detail", ""))
    status, body = probe(port) or (0, {})
    assert (status, body["status"]) == (503, "unhealthy")


def test_the_next_worker_of_a_supervisor_takes_the_port_over(fleet: Fleet) -> None:
    fleet.handlers("@worker.handler('k')\ndef k(payload):\n    if os.fork() == 0: time.sleep(3600)\n    os._exit(1)")
    fleet.serve()
    worker = fleet.work("worker", "--health", "127.0.0.1:0")
    first = port_of(worker)
    worker.stop()
    worker = fleet.work("again", "--health", f"127.0.0.1:{first}")
    port = port_of(worker)
    assert port == first
    eventually(lambda: is_ok(port))
    with leasekit.connect(fleet.url) as client:
        client.schedule("k", max_crashes=0)
        eventually(lambda: "it is started again" in worker.log.read_text())
    eventually(lambda: worker.log.read_text().count("health is answered") == 2)
    eventually(lambda: is_ok(port))


@pytest.mark.parametrize("address", ["x", "127.0.0.1:", "127.0.0.1:99999", "192.0.2.1:8078", "no.such.invalid:1"])
def test_an_address_that_cannot_be_used_is_one_clear_error(fleet: Fleet, address: str) -> None:
    fleet.handlers("@worker.handler('k')\ndef k(payload):\n    pass")
    fleet.url = "http://127.0.0.1:1"
    worker = fleet.work("worker", "--health", address)
    assert worker.popen.wait(60) == 2
    assert f"--health {address} cannot be used (" in worker.log.read_text()
