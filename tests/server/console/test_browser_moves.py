"""What one sees of workers and flows that move while a page of the console is open, in a real browser."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

import leasekit
from tests.browser import Page
from tests.server.console.conftest import Site

pytestmark = pytest.mark.slow

WORKER = """
import sys, threading, leasekit
url, name, kind = sys.argv[1:]
with leasekit.connect(url, worker=name) as client:
    worker = leasekit.Worker(client)
    @worker.handler(kind)
    def handle(payload):
        threading.Event().wait()
    worker.run()
"""
HOLDS = """
[...document.querySelectorAll('#workers tbody tr')].filter(row => row.cells[0].innerText.trim() == '{}')
    .map(row => row.cells[1].innerText.trim()).join()
"""


@contextlib.contextmanager
def working(url: str, name: str, kind: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker, without a supervisor, whose handlers do not end; it is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", WORKER, url, name, kind]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_tasks_of_a_killed_worker_move_to_another_while_one_looks(site: Site, tab: Callable[..., Page]) -> None:
    url = site.url.removesuffix("/console/")
    for number in range(3):
        site.schedule("endless", id=f"endless-{number}", claim_timeout=2, heartbeat_timeout=2)
    page = tab()
    page.open(site.url + "workers")
    with working(url, "doomed", "endless") as doomed:
        page.until(HOLDS.format("doomed") + "== '3'")
        with working(url, "heir", "endless"):
            page.until(HOLDS.format("heir") + "== '0'")
            doomed.send_signal(signal.SIGKILL)
            page.until(HOLDS.format("heir") + "== '3'")
            page.until(HOLDS.format("doomed") + "== '0'")
            page.open(site.url + "task?id=endless-0")
            assert "heir" in page.text
            assert "nothing was heard from worker" in page.text
    for number in range(3):
        site.server.post("/v1/tasks/cancel", {"ids": [f"endless-{number}"]})
    page.close()


class Vm(msgspec.Struct, frozen=True):
    name: str


def test_a_flow_is_followed_on_its_page_to_its_end(site: Site, tab: Callable[..., Page]) -> None:
    url = site.url.removesuffix("/console/")
    gates = {name: threading.Event() for name in ("build", "check")}
    flow = leasekit.Flow("followed", state=Vm)

    @flow.step(on_success="check")
    def build(vm: Vm) -> None:
        gates["build"].wait(60)

    @flow.step()
    def check(vm: Vm) -> None:
        gates["check"].wait(60)

    page = tab()
    with leasekit.connect(url, worker="of-flows") as client:
        started = flow.start(client, Vm("web"), id="followed-1")
        worker = leasekit.Worker(client)
        worker.add(flow)
        at_work = threading.Thread(target=worker.run)
        at_work.start()
        try:
            page.open(f"{site.url}task?id={started.id}")
            steps = "[...document.querySelectorAll('svg text')].map(each => each.textContent).join()"
            status = "(document.getElementById('chain-title')?.innerText ?? '')"
            page.until("document.body.innerText.includes('processing')")
            gates["build"].set()
            page.until(f"{steps}.includes('check') && {status}.includes('running')")
            gates["check"].set()
            page.until(f"{status}.includes('succeeded')")
        finally:
            for gate in gates.values():
                gate.set()
            worker.stop()
            at_work.join()
    assert page.problems == []
    page.close()
