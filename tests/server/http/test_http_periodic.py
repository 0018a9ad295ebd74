"""Periodic tasks over HTTP: the calls of operators."""

from typing import Any

import pytest

from tests.server.http.conftest import Running, RunServer


def call(server: Running, method: str, path: str, body: Any = None) -> Any:
    answer = server.call(method, f"/v1/periodic{path}", body)
    return answer.status, answer.json


@pytest.fixture
def name(server: Running, request: pytest.FixtureRequest) -> str:
    name = request.node.name[:60].replace("[", "-").replace("]", "")
    status, info = call(server, "PUT", f"/{name}?worker=ada", {"kind": "k", "cron": "0 7 * * *", "tz": "Europe/Berlin"})
    assert (status, info["name"], info["changed_by"]) == (200, name, "ada")
    return str(name)


def test_one_is_got_with_its_next_firings_and_listed_until_it_is_deleted(server: Running, name: str) -> None:
    status, info = call(server, "GET", f"/{name}")
    assert (status, info["task"]["cron"], len(info["next_at"])) == (200, "0 7 * * *", 5)
    assert name in [one["name"] for one in call(server, "GET", "")[1]["periodic"]]
    for _ in range(2):
        assert call(server, "DELETE", f"/{name}") == (200, {"name": name})
    status, problem = call(server, "GET", f"/{name}")
    assert (status, problem["type"]) == (404, "urn:leasekit:problem:no-such-periodic")


def test_the_list_comes_in_pages(server: Running, name: str) -> None:
    call(server, "PUT", f"/{name}-2", {"kind": "k", "every": 86400})
    names = list[str]()
    cursor: str | None = ""
    while cursor is not None:
        _, page = call(server, "GET", f"?limit=1&cursor={cursor}")
        names += [one["name"] for one in page["periodic"]]
        cursor = page["cursor"]
    assert {name, f"{name}-2"} <= set(names)
    assert names == sorted(set(names))


def test_whoever_has_an_access_token_is_named_by_it_alone(run_server: RunServer) -> None:
    """Authors share the firings of a look: a client that chose its name would have as many shares as names."""
    with run_server() as server:
        server.give_token()
        _, info = call(server, "PUT", "/p?worker=ada", {"kind": "k", "cron": "0 7 * * *"})
        assert info["changed_by"] == "everything"
        _, info = call(server, "POST", "/p/pause?worker=bob", {})
        assert info["changed_by"] == "everything"


def test_one_is_paused_and_resumed(server: Running, name: str) -> None:
    status, info = call(server, "POST", f"/{name}/pause", {})
    assert (status, info["is_paused"], info.get("next_at")) == (200, True, None)
    status, info = call(server, "POST", f"/{name}/pause", {"is_paused": False})
    assert (status, info.get("is_paused"), len(info["next_at"])) == (200, None, 1)


def test_a_trigger_that_is_repeated_with_its_instant_makes_one_task(server: Running, name: str) -> None:
    for created in (True, False):
        status, answer = call(server, "POST", f"/{name}/trigger", {"at": "2026-01-01T00:00:00+01:00"})
        assert (status, answer["id"], answer["created"]) == (200, f"{name}@2025-12-31T23:00:00Z", created)
    assert call(server, "POST", f"/{name}/trigger", {})[1]["created"]


@pytest.mark.parametrize("path", ["pause", "trigger"])
def test_one_that_is_unknown_is_not_there(server: Running, path: str) -> None:
    assert call(server, "POST", f"/unknown/{path}", {})[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "k", "cron": "0 0 31 2 *"}, "cron"),
        ({"kind": "k", "cron": "0 7 * * *", "tz": "Mars/Base"}, "tz"),
        ({"kind": "k", "every": 60, "payload": "x" * 70_000}, "payload"),
        ({"kind": "named:x", "every": 60}, "kind"),
    ],
)
def test_a_fault_is_named_with_its_field(server: Running, body: Any, field: str) -> None:
    status, problem = call(server, "PUT", "/refused", body)
    assert (status, problem["errors"][0]["field"]) == (422, field)
    assert call(server, "GET", "/refused")[0] == 404


def test_a_cursor_that_no_name_can_be_is_refused(server: Running) -> None:
    status, problem = call(server, "GET", "?cursor=%00")
    assert (status, problem["status"]) == (422, 422)
