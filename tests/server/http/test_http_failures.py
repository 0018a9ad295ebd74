"""What the engine cannot do reaches the client as a status that says whether to ask again, and nothing else."""

import contextlib
import logging
import socket
from typing import Any

import pytest

from leasekit.errors import Refused, Throttled, Unavailable
from leasekit.server.http import problems
from leasekit.server.log_limit import LogLimit
from tests.server.http.conftest import PATIENCE, Running

TASK = {"tasks": [{"kind": "k"}]}


def failing(monkeypatch: pytest.MonkeyPatch, server: Running, method: str, error: Exception) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(server.engine.queries if method == "list_tasks" else server.engine, method, fail)


@pytest.mark.parametrize(("wait", "told"), [(2.3, "3"), (0.0, "1"), (None, "1"), (60.0, "60")])
def test_an_engine_that_sheds_is_429_with_whole_seconds(
    monkeypatch: pytest.MonkeyPatch, server: Running, wait: float | None, told: str
) -> None:
    failing(monkeypatch, server, "schedule", Throttled("too much waits", retry_after=wait))
    answer = server.call("POST", "/v1/tasks", TASK)
    assert (answer.status, answer.headers["retry-after"]) == (429, told)
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_engine_that_sheds_a_claim_that_waits_is_429_too(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    failing(monkeypatch, server, "claim", Throttled("too many wait"))
    answer = server.call("POST", "/v1/claims", {"worker": "w", "kinds": ["k"], "wait": 9, "claim_id": "c"})
    assert answer.status == 429


def test_a_store_that_does_not_answer_is_503(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    failing(monkeypatch, server, "schedule", Unavailable("the disk is full"))
    answer = server.call("POST", "/v1/tasks", TASK)
    assert (answer.status, answer.json["detail"]) == (503, "the disk is full")


def test_what_only_the_engine_can_refuse_is_422(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    failing(monkeypatch, server, "list_tasks", Refused("no such cursor", errors=[{"field": "cursor", "detail": "odd"}]))
    answer = server.call("GET", "/v1/tasks?cursor=7")
    assert (answer.status, answer.json["errors"]) == (422, [{"field": "cursor", "detail": "odd"}])


def test_an_unexpected_error_is_logged_and_not_told(
    monkeypatch: pytest.MonkeyPatch, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, server, "schedule", RuntimeError("a secret of the house"))
    with caplog.at_level(logging.ERROR, logger="leasekit.server"):
        answer = server.call("POST", "/v1/tasks", TASK)
    assert answer.status == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert b"secret" not in answer.raw
    assert "a secret of the house" in caplog.text


def test_a_flood_of_errors_is_no_flood_in_the_log(
    monkeypatch: pytest.MonkeyPatch, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(problems.logger, "filters", [LogLimit()])
    failing(monkeypatch, server, "schedule", RuntimeError("oh"))
    for _ in range(12):
        assert server.call("POST", "/v1/tasks", TASK).status == 500
    assert len(caplog.records) == 10


def test_what_is_not_http_after_good_requests_is_cut_and_not_logged(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal would be taken for the answer to the first request; answers on a closed connection would be logged."""
    request = b"GET /v1/stats HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request * 3 + b"garbage\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(4096) == b""
    server.call("GET", "/v1/stats")  # the others have ended by now
    assert caplog.text == ""


def test_it_is_ready_without_room_for_new_tasks_and_says_so(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    monkeypatch.setattr(server.engine.room, "lack", "the disk of the store is almost full")
    assert server.get("/readyz") == {"status": "ready", "detail": "the disk of the store is almost full"}


def test_it_is_not_ready_while_its_store_is_not(monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    async def not_yet() -> str:
        return "the disk is full"

    monkeypatch.setattr(server.engine, "ready", not_yet)
    answer = server.call("GET", "/readyz")
    assert (answer.status, answer.json["detail"]) == (503, "the disk is full")
    assert server.get("/healthz") == {"status": "ok"}
