"""A server of its own for rows that send requests by hand, and single calls to it."""

import json
import re
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from harness.chaos.processes import Process, wait_for
from harness.chaos.world import World

MEGABYTES = 500  # that a server may have: each of its rooms has 64, and decoding one body takes 200
SLOWEST = 5.0  # seconds that a heartbeat may take; most tasks have a ttl of minutes


def loaded(world: World, store: str = "loaded.db") -> tuple[Process, int, bytes]:
    """Start workers, and another server of a store of its own; return that, its port, and a heartbeat for it."""
    world.work()
    world.schedule("steady", 4)
    server = world.intrude("loaded", store=store)
    wait_for(lambda: "listening on" in server.said, what="the second server")
    address = re.search(r"listening on http://127\.0\.0\.1:(\d+)", server.said)
    assert address is not None
    port = int(address[1])
    call(port, "/v1/tasks", encoded(tasks=[{"kind": "beaten", "claim_timeout": 600, "heartbeat_timeout": 600}]))
    (held,) = claim(port, "beaten", 1)
    return server, port, encoded(worker="w", beats=[{"id": held["id"], "token": held["token"]}])


def peak(server: Process) -> int:
    """Return the most megabytes of memory that a process has had."""
    status = Path(f"/proc/{server.popen.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def call(port: int, path: str, body: bytes, *, method: str = "POST", token: str = "") -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body or None, headers(token))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def headers(token: str = "") -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def claim(port: int, kind: str, limit: int, *, token: str = "") -> list[dict[str, Any]]:
    body = encoded(worker="w", kinds=[kind], limit=limit, claim_id=f"{kind}-{time.monotonic_ns()}")
    tasks: list[dict[str, Any]] = json.loads(call(port, "/v1/claims", body, token=token)[1])["tasks"]
    return tasks
