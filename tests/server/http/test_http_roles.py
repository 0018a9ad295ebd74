"""Servers with some of the roles: each answers what is of its roles, and names the role that another request needs."""

import asyncio

import pytest

from leasekit.errors import ProtocolError
from leasekit.server.http.routes import OPERATIONS
from leasekit.server.node_roles import ALL_ROLES, Role, role_of
from leasekit.task import NewTask, Settlement
from leasekit_http import HttpBackend
from tests.server.http.conftest import Running, RunServer

PATHS = {operation.path: operation for operation in OPERATIONS}


def refused(server: Running, path: str) -> bool:
    operation = PATHS[path]
    place = path.replace("{", "").replace("}", "")
    return server.call(operation.method, place, b"{}" if operation.body is not None else None).status == 421


@pytest.mark.parametrize("role", Role)
def test_a_server_of_one_role_refuses_what_is_of_another(run_server: RunServer, role: Role) -> None:
    paths = [path for path in PATHS if path != "/v1/events" or role is not Role.FRONTEND]  # whose answer does not end
    with run_server(roles=frozenset({role})) as server:
        answered = {path for path in paths if not refused(server, path)}
        assert answered == {path for path in paths if role_of(path) in (role, None)}


def test_a_refusal_names_the_role_that_is_needed(run_server: RunServer) -> None:
    with run_server(roles=frozenset({Role.FRONTEND, Role.CONSUMER})) as server:
        answer = server.call("POST", "/v1/heartbeats", {"worker": "w", "beats": []})
    assert (answer.status, answer.json["type"]) == (421, "urn:leasekit:problem:misdirected")
    assert answer.json["detail"] == ("this server has the role frontend,consumer: send this request to a server of hsc")


@pytest.mark.anyio
async def test_a_client_tells_what_a_server_of_another_role_has_said(run_server: RunServer) -> None:
    with run_server(roles=frozenset({Role.HSC})) as server:
        backend = HttpBackend(f"http://127.0.0.1:{server.port}", worker="w")
        with pytest.raises(ProtocolError, match="send this request to a server of frontend"):
            await backend.schedule([NewTask(kind="k")])
        await backend.aclose()


def test_metrics_say_which_roles_a_server_has(run_server: RunServer) -> None:
    with run_server(roles=frozenset({Role.HSC, Role.CONSUMER})) as server:
        text = server.call("GET", "/metrics").raw.decode()
    assert [line for line in text.splitlines() if line.startswith("leasekit_role{")] == [
        'leasekit_role{role="consumer"} 1.0',
        'leasekit_role{role="hsc"} 1.0',
    ]


def test_each_operation_is_of_one_role_or_of_all_servers() -> None:
    assert {role_of(path) for path in PATHS} == {*ALL_ROLES, None} - {Role.CONSUMER}


@pytest.mark.anyio
async def test_a_worker_needs_no_other_server_than_one_of_the_hsc(run_server: RunServer) -> None:
    with run_server(roles=frozenset({Role.HSC})) as server:
        scheduling = server.engine.schedule([NewTask(kind="k", id="a")])
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scheduling, server.loop))
        backend = HttpBackend(f"http://127.0.0.1:{server.port}", worker="w")
        (task,) = (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).tasks
        (verdict,) = await backend.settle([Settlement(id="a", token=task.token, outcome="success")])
        assert verdict.verdict == "settled"
        await backend.aclose()
