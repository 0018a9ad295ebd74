"""A token that asks for hundreds of searches at once: others, and its own leases, hardly notice.

Steps are counted, not seconds.
"""

import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from leasekit.server import readers
from leasekit.server.fair_bound import CALLER
from leasekit.server.readers import Readers
from leasekit.server.roles.listing import Listing
from leasekit.task import NewTask
from leasekit.tokens import digest_of
from tests.server.http.conftest import RunServer
from tests.server.http.test_http_access import Service
from tests.waiting import eventually

LISTINGS = 230  # of one token, more than the reads that may wait
NOBODY = "nobody"  # the worker of no task


class Steps:
    """Makes searches for the tasks of `NOBODY` endless, and counts the steps that any other read is behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.behind: list[int] = []
        self.flooding = ""  # the caller whose searches are endless
        self._count = count()
        self._begun = 0
        look, run = Listing.look, Readers.run

        def searched(listing: Listing, *args: Any, **options: Any) -> Any:
            if listing._wanted.worker != NOBODY:
                return look(listing, *args, **options)
            self._begun = next(self._count)
            return None

        async def counted(of: Readers, call: Any, *, is_vital: bool = False, **more: bool) -> Any:
            asked_at = self._begun

            is_of_flood = CALLER.get() == self.flooding and not is_vital

            def begin() -> Any:
                if not is_of_flood:
                    self.behind.append(self._begun - asked_at)
                return call()

            return await run(of, begin, is_vital=is_vital, **more)

        monkeypatch.setattr(Listing, "look", searched)
        monkeypatch.setattr(Readers, "run", counted)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    with monkeypatch.context() as patch:
        yield Steps(patch)


def lease(service: Service, secret: str, kind: str) -> dict[str, str]:
    """Claim the task of a kind, and return how it is named by a beat or a result."""
    claim = {"worker": kind, "kinds": [kind], "claim_id": uuid.uuid4().hex}
    (task,) = service.call(secret, "POST", "/v1/claims", claim).json["tasks"]
    return {"id": task["id"], "token": task["token"]}


def work(service: Service, secret: str, kind: str) -> None:
    """Do what a worker does with a task."""
    item = lease(service, secret, kind)
    for path, body, verdict in (
        ("heartbeats", {"beats": [item]}, "renewed"),
        ("results", {"results": [item | {"outcome": "success"}]}, "settled"),
    ):
        answer = service.call(secret, "POST", f"/v1/{path}", {"worker": kind, **body})
        assert (answer.status, answer.json["verdicts"][0]["verdict"]) == (200, verdict)


def test_searches_of_one_token_that_find_nothing_hold_up_nobody(run_server: RunServer, steps: Steps) -> None:
    with run_server() as server, ExitStack() as stack:
        service = Service(server)
        flooding, other = (service.new(["work", "read"], (f"{kind}.*",)) for kind in ("flood", "other"))
        tasks = [NewTask(kind=kind, id=kind) for kind in ("flood.a", "other.a")]
        service.run(server.engine.schedule(tasks))
        access = server.engine.tokens.of_digest(digest_of(flooding))
        assert access is not None
        steps.flooding = access.caller
        request = (
            f"GET /v1/tasks?worker={NOBODY} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {flooding}\r\n\r\n"
        )
        sockets: list[socket.socket] = [stack.enter_context(server.open()) for _ in range(LISTINGS)]
        for connection in sockets:
            connection.sendall(request.encode())
        waiting = server.engine._readers._of_callers
        eventually(lambda: waiting.total >= readers._WAITING, "the searches to wait")

        work(service, other, "other.a")
        assert service.call(other, "GET", "/v1/tasks/other.a").json["status"] == "success"
        assert [task["id"] for task in service.call(other, "GET", "/v1/tasks").json["tasks"]] == ["other.a"]
        assert service.call(flooding, "GET", "/v1/tasks").status == 429
        work(service, flooding, "flood.a")
        assert len(steps.behind) >= 6
        # Those that threads had begun, and the turn of the other caller.
        assert max(steps.behind) <= readers._THREADS + 1
        for connection in sockets:
            connection.close()
        eventually(lambda: not waiting.total, "the searches to end with their connections")
