"""A server whose disk takes nothing any more, for real: its kernel refuses every write to a file."""

import json
import resource
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.process.conftest import Fleet
from tests.waiting import eventually


@pytest.mark.slow
def test_what_cannot_be_written_is_not_acknowledged_and_it_heals_without_a_restart(fleet: Fleet) -> None:
    server = fleet.serve()

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        with closing(HTTPConnection("127.0.0.1", fleet.port, timeout=60)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def schedule(task_id: str) -> tuple[int, Any]:
        return call("POST", "/v1/tasks", {"tasks": [{"kind": "k", "id": task_id}]})

    assert schedule("before")[0] == 200
    _, claimed = call("POST", "/v1/claims", {"worker": "w", "kinds": ["k"], "limit": 1, "wait": 0, "claim_id": "c"})
    held = {"id": "before", "token": claimed["tasks"][0]["token"]}

    # Any write to a regular file fails from here on (EFBIG). No privilege is needed for it, nor to take it back.
    _, most = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, most))
    status, problem = schedule("meanwhile")
    assert (status, problem["title"]) == (503, "Service Unavailable")
    assert problem["detail"].startswith("the store failed: ")
    assert call("POST", "/v1/heartbeats", {"worker": "w", "beats": [held]})[0] == 503
    status, problem = call("GET", "/readyz")
    assert (status, problem["detail"].startswith("the store failed: ")) == (503, True)
    assert call("GET", "/v1/tasks/before")[1]["status"] == "claimed", "reading goes on"
    assert call("GET", "/v1/tasks/meanwhile")[0] == 404
    assert call("GET", "/healthz")[0] == 200

    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (most, most))
    assert eventually(lambda: call("GET", "/readyz")[0] == 200, what="its recovery")
    _, verdicts = call("POST", "/v1/results", {"worker": "w", "results": [held | {"outcome": "success"}]})
    assert verdicts["verdicts"][0]["verdict"] == "settled"
    assert schedule("meanwhile") == (200, {"tasks": [{"id": "meanwhile", "created": True, "status": "new"}]})

    # And all of it is on the disk.
    server.kill()
    fleet.serve()
    assert call("GET", "/v1/tasks/before")[1]["status"] == "success"
    assert call("GET", "/v1/tasks/meanwhile")[1]["status"] == "new"
