"""A flow over a cloud's API: create a virtual machine, wait until it runs, record it; or roll back.

    python examples/17_create_vm.py

The cloud is a small server in this process. It refuses every third request (429), and one machine never starts. In the
end each machine that runs is recorded, and none is left over, also if workers are killed meanwhile.
"""

import json
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from msgspec import Struct

import leasekit

# The flow --------------------------------------------------------------------------------------------------------


class Vm(Struct, frozen=True):
    """The state that each step gets and returns."""

    name: str
    address: str | None = None


flow = leasekit.Flow("create-vm", state=Vm)


@flow.step(on_success="verify", on_failure="roll_back")
def create(vm: Vm) -> None:
    ask("PUT", vm.name)  # under the name that the flow gives it: to create it twice creates one


@flow.step(retry_every=0.2, retry_until=5, on_success="record", on_failure="roll_back")
def verify(vm: Vm) -> Vm:
    found = ask("GET", vm.name)
    if found["state"] != "running":
        raise leasekit.NotYet(f"it is {found['state']}")
    return Vm(vm.name, found["address"])


@flow.step(on_failure="roll_back")
def record(vm: Vm) -> None:
    records = Path(os.environ["RECORDS"])
    (records / vm.name).write_text(str(vm.address), encoding="utf-8")  # as often as it is written: one record


@flow.step(max_attempts=None)
def roll_back(vm: Vm, step: leasekit.Step) -> None:
    assert step.failure is not None
    print(f"{vm.name}: rolled back, because {step.failure.step} failed: {step.failure.error['message']}")
    (Path(os.environ["RECORDS"]) / vm.name).unlink(missing_ok=True)
    ask("DELETE", vm.name)  # also if it is not there


def ask(method: str, name: str) -> dict[str, Any]:
    """Call the cloud. If it refuses because there are too many requests, the step is called again, as no failure."""
    request = urllib.request.Request(f"{os.environ['CLOUD']}/{name}", method=method)  # noqa: S310 - the cloud's own URL
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except urllib.error.HTTPError as error:
        if error.code == 429:
            raise leasekit.NotYet("the cloud refuses: too many requests", after=0.1) from None
        raise


# The cloud -------------------------------------------------------------------------------------------------------


class Cloud:
    """Machines by their names. One whose name begins with "broken" never starts; `refuses` counts refused requests."""

    def __init__(self) -> None:
        self.machines: dict[str, float] = {}  # when each was created
        self.refuses = 0
        self._requests = 0
        self._lock = threading.Lock()

    def answer(self, method: str, name: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self._requests += 1
            if self._requests % 3 == 0:
                self.refuses += 1
                return 429, {"error": "slow down"}
            if method == "PUT":
                self.machines.setdefault(name, time.monotonic())
            elif method == "DELETE":
                self.machines.pop(name, None)
            elif name not in self.machines:
                return 404, {"error": "no such machine"}
            return 200, self._about(name)

    def _about(self, name: str) -> dict[str, Any]:
        age = time.monotonic() - self.machines.get(name, time.monotonic())
        runs = age > 0.5 and not name.startswith("broken")
        return {"state": "running" if runs else "starting", "address": "10.0.0.7" if runs else None}


@contextmanager
def serving(cloud: Cloud) -> Generator[str]:
    """Serve the cloud while the block runs; give its URL."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            status, body = cloud.answer(self.command, self.path.lstrip("/"))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_DELETE = respond  # noqa: N815 - names that the server looks for

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# All of it -------------------------------------------------------------------------------------------------------


def main() -> None:
    cloud = Cloud()
    with tempfile.TemporaryDirectory() as folder, serving(cloud) as url:
        records = Path(folder) / "records"
        records.mkdir()
        os.environ |= {"CLOUD": url, "RECORDS": str(records)}
        with leasekit.connect(f"sqlite:///{folder}/tasks.db") as client:
            worker = leasekit.Worker(client)
            worker.add(flow)
            at_work = threading.Thread(target=worker.run)
            at_work.start()
            try:
                names = ["web-1", "web-2", "broken-1", "web-3"]
                ids = [flow.start(client, Vm(name), id=name).id for name in names]
                infos = [ended(client, flow_id) for flow_id in ids]
            finally:
                worker.stop()
                at_work.join()

        for info in infos:
            print(f"{info.id}: {info.status} after {info.workload} executions of steps")
        recorded = {path.name for path in records.iterdir()}
        assert [info.status for info in infos] == ["succeeded", "succeeded", "rolled_back", "succeeded"]
        assert recorded == cloud.machines.keys() == {"web-1", "web-2", "web-3"}
        assert cloud.refuses


def ended(client: leasekit.Client, flow_id: str) -> leasekit.FlowInfo:
    """Return a flow once it has ended."""
    while True:
        info = client.flow(flow_id)
        assert info is not None
        if info.status != "running":
            return info
        time.sleep(0.05)


if __name__ == "__main__":
    main()
