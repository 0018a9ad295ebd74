"""Access tokens over HTTP: each route, with each scope, for kinds of the token and for others."""

import asyncio
import hashlib
import json
import socket
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import pytest
from msgspec import Raw

from leasekit.periodic import PeriodicTaskItem
from leasekit.server.http import auth, lease_kinds, sending
from leasekit.server.http.needs import Where
from leasekit.server.http.operations import Operation
from leasekit.server.http.reach import Reach
from leasekit.server.http.routes import OPERATIONS
from leasekit.server.roles.gates import Gated
from leasekit.server.roles.periodic import Put
from leasekit.server.roles.tokens import Create
from leasekit.task import Beat, KindSettings, NewTask, Outcome, Settlement, TaskInfo
from leasekit.tokens import SCOPES, Scope, digest_of, is_secret, new_secret
from leasekit.wire import GateRequest, TokenRequest
from tests.server.http.conftest import PATIENCE, Answer, Running, RunServer
from tests.waiting import eventually

pytestmark = pytest.mark.slow_with("postgres")  # what is refused hardly depends on the store

T = TypeVar("T")
OWN, FOREIGN = "own.report", "foreign.report"
FORBIDDEN, UNAUTHENTICATED = (f"urn:leasekit:problem:{what}" for what in ("forbidden", "unauthenticated"))


class Service:
    """A server that has tokens, and tasks of two kinds."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.admin = self.local_token("admin", ["submit", "work", "read", "operate"])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.server.loop).result(PATIENCE)

    def local_token(self, name: str, scopes: Sequence[Scope], kinds: tuple[str, ...] = ("*",), **more: Any) -> str:
        """Make a token as one does where the store is; return its secret."""
        secret = new_secret()
        digest = digest_of(secret).hex()
        order = TokenRequest(
            id=uuid.uuid4().hex, name=name, digest=digest, scopes=list(scopes), kinds=list(kinds), **more
        )
        self.run(self.server.engine.operations.change_token(Create(order)))
        return secret

    def new(self, scopes: Sequence[Scope], kinds: tuple[str, ...] = ("own.*",), **more: Any) -> str:
        return self.local_token(uuid.uuid4().hex, scopes, kinds, **more)

    def call(self, secret: str | None, method: str, path: str, body: Any = None) -> Answer:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        return self.server.call(method, path, body, **headers)

    def task(self, kind: str, **options: Any) -> str:
        (scheduled,) = self.run(self.server.engine.schedule([NewTask(kind=kind, id=uuid.uuid4().hex, **options)]))
        return scheduled.id

    def dead(self, kind: str) -> str:
        task_id = self.task(kind, max_attempts=1)
        engine = self.server.engine

        async def fail() -> None:
            claim = await engine.claim(worker="w", kinds=[kind], limit=1000, wait=0, claim_id=uuid.uuid4().hex)
            for task in claim.tasks:
                outcome: Outcome = "fatal" if task.id == task_id else "release"
                await engine.results("w", [Settlement(id=task.id, token=task.token, outcome=outcome)])

        self.run(fail())
        return task_id

    def close(self, gated: Gated) -> None:
        self.run(self.server.engine.operations.set_gate(gated.closed(GateRequest(), None)))

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self.server.polls) + len(self.server.waits)

    def status(self, task_id: str) -> str:
        info = self.run(self.server.engine.queries.get(task_id))
        return "removed" if info is None else str(info.status)


@pytest.fixture(scope="module")
def service(server: Running) -> Iterator[Service]:
    """A service that locks nobody out: the tests send bad tokens from one address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "_FAILURES", 10_000)
        yield Service(server)


class Asked(NamedTuple):
    """A request for one kind."""

    path: str
    body: Any = None
    concerns: str = ""
    """What it would change or show: a task, or the kind."""


def requests(service: Service, name: str, kind: str) -> Asked:
    """Return the request that tests send to an operation, for this kind."""
    match name:
        case "schedule":
            return Asked("/v1/tasks", {"tasks": [{"kind": kind}]}, kind)
        case "get_task":
            return Asked(f"/v1/tasks/{(task := service.task(kind))}", None, task)
        case "reschedule":
            return Asked(f"/v1/tasks/{(task := service.task(kind))}", {"delay": 3600}, task)
        case "cancel":
            return Asked("/v1/tasks/cancel", {"ids": [(task := service.task(kind))]}, task)
        case "ended":
            return Asked("/v1/tasks/ended", {"ids": [(task := service.task(kind))]}, task)
        case "cancel_matching" | "reschedule_matching":
            task = service.task(kind)
            path = f"/v1/tasks/{name.replace('_', '-')}"
            change = {} if name == "cancel_matching" else {"delay": 3600}
            dry = service.call(service.admin, "POST", path, {"kind": kind, "dry_run": True, **change}).json
            return Asked(path, {"kind": kind, "token": dry["token"], **change}, task)
        case "cancel_chain":
            return Asked("/v1/chains/cancel", {"id": (task := service.task(kind))}, task)
        case "redrive":
            return Asked("/v1/tasks/redrive", {"ids": [(task := service.dead(kind))]}, task)
        case "purge":
            return Asked("/v1/tasks/purge", {"ids": [(task := service.dead(kind))]}, task)
        case "vacuum":
            return Asked("/v1/vacuum", {})
        case "claim":
            return Asked("/v1/claims", {"worker": "w", "kinds": [kind], "claim_id": uuid.uuid4().hex}, kind)
        case "heartbeat" | "results":
            task = service.task(kind)
            claim = {"worker": "w", "kinds": [kind], "claim_id": uuid.uuid4().hex, "limit": 1000}
            held = service.call(service.admin, "POST", "/v1/claims", claim).json["tasks"]
            token = next(each["token"] for each in held if each["id"] == task)
            item = {"id": task, "token": token}
            if name == "heartbeat":
                return Asked("/v1/heartbeats", {"worker": "w", "beats": [item]}, task)
            return Asked("/v1/results", {"worker": "w", "results": [{**item, "outcome": "success"}]}, task)
        case "cancels":
            return Asked("/v1/cancels", {"worker": "w"})
        case "get_kind" | "set_kind" | "delete_kind":
            service.run(service.server.engine.operations.set_kind(kind, KindSettings(priority=1), by=None))
            return Asked(f"/v1/kinds/{kind}", {"priority": 3} if name == "set_kind" else None, kind)
        case "close_kind" | "open_kind":
            gated = f"{kind}.{uuid.uuid4().hex}"
            if name == "open_kind":
                service.close(Gated.kind(gated))
            return Asked(f"/v1/gates/kinds/{gated}", {} if name == "close_kind" else None, gated)
        case "close_collection" | "open_collection":
            gated = uuid.uuid4().hex
            if name == "open_collection":
                service.close(Gated.collection(gated))
            return Asked(f"/v1/gates/collections/{gated}", {} if name == "close_collection" else None)
        case "drain_worker" | "undrain_worker":
            claim = {"worker": (worker := uuid.uuid4().hex), "kinds": [kind], "claim_id": uuid.uuid4().hex}
            service.call(service.admin, "POST", "/v1/claims", claim)
            if name == "undrain_worker":
                service.run(service.server.engine.operations.drain(worker, by=None))
            return Asked(f"/v1/workers/{worker}/drain", {} if name == "drain_worker" else None, worker)
        case "get_periodic" | "set_periodic" | "delete_periodic" | "pause_periodic" | "trigger_periodic":
            periodic = uuid.uuid4().hex
            daily = PeriodicTaskItem(kind=kind, every=86400)
            service.run(service.server.engine.operations.change_periodic(Put(periodic, daily, None)))
            what = {"pause_periodic": "/pause", "trigger_periodic": "/trigger"}.get(name, "")
            body = {"set_periodic": {"kind": kind, "every": 60}, "pause_periodic": {}, "trigger_periodic": {}}.get(name)
            return Asked(f"/v1/periodic/{periodic}{what}", body, periodic)
        case "create_token":
            order = {"id": uuid.uuid4().hex, "name": uuid.uuid4().hex, "digest": uuid.uuid4().hex * 2}
            return Asked("/v1/tokens", {**order, "scopes": ["operate"], "kinds": [kind]}, kind)
        case "get_token" | "revoke_token" | "rotate_token":
            service.local_token(token := uuid.uuid4().hex, ["operate"], (kind,))
            rotate = name == "rotate_token"
            body = {"digest": uuid.uuid4().hex * 2} if rotate else None
            return Asked(f"/v1/tokens/{token}{'/rotate' * rotate}", body, token)
        case "list_audit" | "list_tokens" | "list_tasks" | "list_kinds" | "list_gates" | "list_periodic":
            service.task(kind)
            service.run(service.server.engine.operations.set_kind(kind, KindSettings(priority=1), by=None))
            service.run(
                service.server.engine.operations.set_gate(Gated.kind(f"{kind}-closed").closed(GateRequest(), None))
            )
            service.run(
                service.server.engine.operations.change_periodic(
                    Put(f"p-{kind}", PeriodicTaskItem(kind=kind, every=86400), None)
                )
            )
            return Asked(f"/v1/{name.removeprefix('list_')}", None, kind)
        case "stats" | "workers" | "nodes":
            service.task(kind)
            return Asked(f"/v1/{name}", None, kind)
        case "prometheus":
            return Asked("/metrics")
        case "healthz" | "readyz":
            return Asked(f"/{name}")
        case _:
            pytest.fail(f"no test sends a request to the operation {name}: add one, for one kind")


def name_of(operation: Operation) -> str:
    return operation.run.__name__


WITH_TOKENS = [operation for operation in OPERATIONS if not operation.needs.is_open]
STREAM = "events"  # has tests of its own
ASKED = [operation for operation in WITH_TOKENS if name_of(operation) != STREAM]
of_operation = pytest.mark.parametrize("operation", ASKED, ids=name_of)


def send(service: Service, secret: str | None, operation: Operation, asked: Asked) -> Answer:
    return service.call(secret, operation.method, asked.path, asked.body)


@pytest.mark.parametrize("operation", WITH_TOKENS, ids=name_of)
def test_no_operation_answers_without_a_token(service: Service, operation: Operation) -> None:
    asked = Asked("/v1/events") if name_of(operation) == STREAM else requests(service, name_of(operation), OWN)
    answer = send(service, None, operation, asked)
    assert (answer.status, answer.json["type"]) == (401, UNAUTHENTICATED)
    assert answer.headers["www-authenticate"] == 'Bearer realm="leasekit"'


def test_only_the_probes_are_open(service: Service) -> None:
    assert {name_of(each) for each in OPERATIONS if each.needs.is_open} == {"healthz", "readyz"}
    assert service.call(None, "GET", "/healthz").status == 200
    assert service.call(None, "GET", "/readyz").status == 200
    assert service.call(None, "GET", "/openapi.json").status == 401
    assert service.call(service.new(["submit"]), "GET", "/openapi.json").status == 200


@pytest.mark.parametrize("operation", WITH_TOKENS, ids=name_of)
def test_an_operation_with_scopes_names_at_least_one(operation: Operation) -> None:
    assert operation.needs.scopes
    assert operation.needs.where is not Where.NOWHERE


def not_there(answer: Answer) -> list[str]:
    """Return the tasks that an answer does not know."""
    gone: list[str] = answer.json.get("unknown", [])
    return gone + [verdict["id"] for verdict in answer.json.get("verdicts", ()) if verdict["verdict"] == "gone"]


@of_operation
def test_a_token_without_the_scope_is_refused_and_told_which_it_lacks(service: Service, operation: Operation) -> None:
    others = [scope for scope in SCOPES if scope not in operation.needs.scopes]
    asked = requests(service, name_of(operation), OWN)
    for scope in others:
        answer = send(service, service.new([scope], ("*",)), operation, asked)
        assert (answer.status, answer.json["type"]) == (403, FORBIDDEN), scope
        assert f"lacks the scope {' or '.join(operation.needs.scopes)}" in answer.json["detail"]


@of_operation
def test_a_token_with_a_scope_may_act_for_its_own_kinds(service: Service, operation: Operation) -> None:
    for scope in operation.needs.scopes:
        kinds = ("*",) if operation.needs.where is Where.ALL else ("own.*",)
        asked = requests(service, name_of(operation), OWN)
        answer = send(service, service.new([scope], kinds), operation, asked)
        if name_of(operation) == "set_periodic" and scope == "submit":
            assert answer.status == 403  # only what the code of a worker declares
            continue
        refused_by_the_store = answer.status == 422 and "autovacuum" in answer.raw.decode()
        assert answer.status == 200 or refused_by_the_store, (scope, answer)
        if operation.needs.where is Where.ITEMS:
            assert asked.concerns not in not_there(answer)


@of_operation
def test_a_token_for_other_kinds_learns_and_changes_nothing(service: Service, operation: Operation) -> None:
    asked = requests(service, name_of(operation), FOREIGN)
    is_task = len(asked.concerns) == 32  # an id
    before = service.status(asked.concerns) if is_task else ""
    answer = send(service, service.new(list(operation.needs.scopes)), operation, asked)
    match operation.needs.where:
        case Where.PATH | Where.TASKS | Where.KINDS | Where.ALL:
            assert (answer.status, answer.json["type"]) == (403, FORBIDDEN)
        case Where.TASK:
            assert (answer.status, answer.json["type"]) == (404, "urn:leasekit:problem:no-such-task")
        case Where.ITEMS:
            assert not_there(answer) == [asked.concerns]
        case Where.PERIODIC:
            assert answer.status in ((403,) if "set" in name_of(operation) else (200, 404))
        case Where.TOKENS:
            assert answer.status in (200, 403, 404)
            assert name_of(operation) == "list_tokens" or answer.status != 200
        case _:
            assert answer.status == 200
            named = [verdict.get("verdict") for verdict in answer.json.get("tasks", ()) if "verdict" in verdict]
            assert set(named) <= {"gone"}
    if answer.status == 200 and name_of(operation) not in {"delete_periodic", "redrive"}:
        assert FOREIGN not in answer.raw.decode()
    if is_task:
        assert service.status(asked.concerns) == before


def test_a_foreign_task_is_answered_like_one_that_does_not_exist(service: Service) -> None:
    secret, foreign = service.new(["read"]), service.task(FOREIGN)
    there, not_there = (service.call(secret, "GET", f"/v1/tasks/{task}") for task in (foreign, "nobody"))
    assert there.json | {"detail": ""} == not_there.json | {"detail": ""}
    assert there.json["detail"].replace(foreign, "nobody") == not_there.json["detail"]


def test_nobody_waits_for_the_end_of_a_foreign_task(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    get = service.server.engine.queries.get

    async def noted(task_id: str, *, wait: float = 0) -> TaskInfo | None:
        asked.append(task_id)
        return await get(task_id, wait=wait)

    monkeypatch.setattr(service.server.engine.queries, "get", noted)
    secret, foreign, own = service.new(["read"]), service.task(FOREIGN), service.task(OWN)
    answers = [service.call(secret, "GET", f"/v1/tasks/{task}?wait=0.01").status for task in (foreign, own)]
    assert (answers, asked) == ([404, 200], [own])


def test_a_task_that_became_a_foreign_one_while_a_request_waited_is_not_shown(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = service.task(FOREIGN, payload="secret")
    service.run(service.server.engine.cancel([task_id]))

    async def as_before(ids: Collection[str], **_: bool) -> dict[str, str]:
        return dict.fromkeys(ids, OWN)

    monkeypatch.setattr(service.server.engine.queries, "kinds_of", as_before)
    secret = service.new(["read"])
    assert service.call(secret, "GET", f"/v1/tasks/{task_id}?wait=1").status == 404
    ended = service.call(secret, "POST", "/v1/tasks/ended", {"ids": [task_id], "wait": 1})
    assert ended.json == {"unknown": [task_id]}


def test_an_id_of_a_foreign_task_tells_nothing_of_its_status(service: Service) -> None:
    dead = service.dead(FOREIGN)
    body = {"tasks": [{"id": dead, "kind": OWN}]}
    (answer,) = service.call(service.new(["submit"]), "POST", "/v1/tasks", body).json["tasks"]
    assert (answer["conflict"], answer["status"]) == (True, "new")
    (all_kinds,) = service.call(service.new(["submit"], ("*",)), "POST", "/v1/tasks", body).json["tasks"]
    assert all_kinds["status"] == "fatal_failure"


@pytest.mark.parametrize("name", ["named:leader", "once:message-7"])
def test_nobody_takes_the_id_of_a_name_for_a_task_of_another_kind(service: Service, name: str) -> None:
    secret = service.new(["submit", "work"])
    for task in ({"kind": OWN, "id": name}, {"kind": name, "id": "another"}, {"kind": name}):
        assert service.call(service.admin, "POST", "/v1/tasks", {"tasks": [task]}).status == 422, task
    held = requests(service, "results", OWN).body["results"][0]
    results = {"worker": "w", "results": [{**held, "then": [{"kind": OWN, "id": name}]}]}
    assert service.call(secret, "POST", "/v1/results", results).status == 422
    assert service.status(name) == "removed"


def test_bulk_acts_and_listings_see_only_kinds_of_the_token(service: Service) -> None:
    own, foreign = service.dead(OWN), service.dead(FOREIGN)
    secret = service.new(["operate", "read"])
    listed = service.call(secret, "GET", "/v1/tasks?status=fatal_failure&limit=1000").json["tasks"]
    assert own in {task["id"] for task in listed}
    assert {task["kind"] for task in listed} == {OWN}
    redriven = service.call(secret, "POST", "/v1/tasks/redrive", {"status": "fatal_failure", "limit": 1000}).json
    assert own in {verdict["id"] for verdict in redriven["tasks"]}
    assert service.status(foreign) == "fatal_failure"
    dry = {"min_attempts": 1, "dry_run": True}
    assert set(service.call(secret, "POST", "/v1/tasks/cancel-matching", dry).json["kinds"]) <= {OWN}
    own = service.dead(OWN)
    purged = service.call(secret, "POST", "/v1/tasks/purge", {}).json
    assert set(purged["kinds"]) == {OWN}
    assert (service.status(own), service.status(foreign)) == ("removed", "fatal_failure")


def test_a_purge_of_foreign_ids_alone_purges_nothing_else(service: Service) -> None:
    own, foreign = service.dead(OWN), service.dead(FOREIGN)
    answer = service.call(service.new(["operate"]), "POST", "/v1/tasks/purge", {"ids": [foreign]})
    assert answer.json["kinds"] == {}
    assert (service.status(own), service.status(foreign)) == ("fatal_failure", "fatal_failure")


@pytest.mark.parametrize("act", ["purge", "redrive", "cancel-matching", "reschedule-matching"])
@pytest.mark.parametrize("name", ["error", "error_type"])
def test_whoever_may_not_read_does_not_count_by_what_is_in_errors(service: Service, act: str, name: str) -> None:
    body: dict[str, Any] = {"kind": OWN, name: "guess", "dry_run": True}
    body |= {"delay": 5} if act == "reschedule-matching" else {}
    blind = service.call(service.new(["operate"], ("*",)), "POST", f"/v1/tasks/{act}", body)
    assert (blind.status, blind.json["type"]) == (403, FORBIDDEN)
    assert "needs the scope read" in blind.json["detail"]
    assert service.call(service.new(["operate", "read"]), "POST", f"/v1/tasks/{act}", body).status == 200


@pytest.mark.parametrize("act", ["cancel", "reschedule", "redrive", "purge"])
def test_kinds_are_judged_where_tasks_are_changed(service: Service, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """An id that was purged may be that of a foreign task by the time of the change."""
    foreign = service.dead(FOREIGN) if act in ("redrive", "purge") else service.task(FOREIGN)

    async def stale(self: Any, ids: Collection[str], **_: bool) -> dict[str, str]:
        return dict.fromkeys(ids, OWN)

    monkeypatch.setattr("leasekit.server.queries.Queries.kinds_of", stale)
    before = service.call(service.admin, "GET", f"/v1/tasks/{foreign}").json
    if act == "reschedule":
        answer = service.call(service.new(["operate"]), "PATCH", f"/v1/tasks/{foreign}", {"priority": 0})
    else:
        answer = service.call(service.new(["operate"]), "POST", f"/v1/tasks/{act}", {"ids": [foreign]})
    assert answer.status == (404 if act == "reschedule" else 200)
    after = service.call(service.admin, "GET", f"/v1/tasks/{foreign}").json
    assert (after["status"], after["priority"]) == (before["status"], before["priority"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("claims", {"kinds": [OWN], "claim_id": "consumer-name"}),
        ("heartbeats", {"beats": [{"id": "t", "token": "t"}]}),
        ("results", {"results": [{"id": "t", "token": "t", "outcome": "success"}]}),
        ("cancels", {}),
    ],
)
def test_nobody_works_under_the_name_of_a_consumer(service: Service, path: str, fields: dict[str, Any]) -> None:
    """Consumers would share the kinds with it, and leave it some whose tasks nobody moves."""
    answer = service.call(service.new(["work"]), "POST", f"/v1/{path}", {"worker": "leasekit-consumer-x"} | fields)
    assert answer.status == 422
    assert "those of the server's consumers" in answer.json["detail"]


def test_a_worker_is_listed_to_tokens_for_all_kinds_of_those_that_use_its_name(service: Service) -> None:
    own, foreign = service.new(["work", "read"]), service.new(["work"], ("foreign.*",))
    mine, theirs, anybodys = (f"{who}-{uuid.uuid4().hex}" for who in ("mine", "theirs", "anybodys"))
    beat = {"worker": theirs, "beats": [{"id": "gone", "token": "t"}]}
    assert service.call(foreign, "POST", "/v1/heartbeats", beat).status == 200
    for secret, worker in ((service.admin, anybodys), (own, anybodys), (own, theirs), (own, mine)):
        claim = {"worker": worker, "kinds": [OWN], "claim_id": uuid.uuid4().hex, "limit": 0}
        assert service.call(secret, "POST", "/v1/claims", claim).status == 200

    def listed(secret: str) -> set[str]:
        workers = service.call(secret, "GET", "/v1/workers?limit=1000").json["workers"]
        return {worker["name"] for worker in workers} & {mine, theirs, anybodys}

    assert listed(own) == {mine}
    assert listed(service.new(["read"], ("own.*", "foreign.*"))) == {mine, theirs}
    assert listed(service.admin) == {mine, theirs, anybodys}


def test_a_refusal_names_the_tasks_whose_kinds_are_foreign(service: Service) -> None:
    body = {"tasks": [{"kind": OWN}, {"kind": FOREIGN}, {"kind": OWN}, {"kind": FOREIGN}]}
    answer = service.call(service.new(["submit"]), "POST", "/v1/tasks", body)
    assert [(error["item"], error["field"]) for error in answer.json["errors"]] == [(1, "kind"), (3, "kind")]
    without_scope = service.call(service.new(["read"], ("*",)), "POST", "/v1/tasks", body)
    assert "errors" not in without_scope.json


def test_a_periodic_task_of_a_foreign_kind_cannot_be_taken_over(service: Service) -> None:
    engine, name = service.server.engine, uuid.uuid4().hex
    service.run(engine.operations.change_periodic(Put(name, PeriodicTaskItem(kind=FOREIGN, every=86400), None)))
    secret = service.new(["operate"])
    refused = service.call(secret, "PUT", f"/v1/periodic/{name}", {"kind": OWN, "every": 60})
    assert (refused.status, "take another name" in refused.json["detail"]) == (403, True)
    assert service.call(secret, "DELETE", f"/v1/periodic/{name}").status == 200  # as if there were none
    info = service.run(engine.queries.periodic(name))
    assert info is not None
    assert info.task.kind == FOREIGN


def test_a_firing_on_request_whose_id_a_foreign_task_has_gets_one_of_its_own(service: Service) -> None:
    name, operator = uuid.uuid4().hex, service.new(["operate"])
    service.call(operator, "PUT", f"/v1/periodic/{name}", {"kind": OWN, "every": 3600})
    taken = {"kind": FOREIGN, "id": f"{name}@2026-01-01T00:00:00Z"}
    task = service.call(service.admin, "POST", "/v1/tasks", {"tasks": [taken]}).json["tasks"][0]["id"]
    service.call(service.admin, "POST", "/v1/tasks/cancel", {"ids": [task]})
    answer = service.call(operator, "POST", f"/v1/periodic/{name}/trigger", {"at": "2026-01-01T00:00:00Z"})
    made = answer.json
    assert (made["created"], made.get("conflict", False), made["status"]) == (True, False, "new")
    assert made["id"] != task
    again = service.call(operator, "POST", f"/v1/periodic/{name}/trigger", {"at": "2026-01-01T00:00:00Z"}).json
    assert (again["id"], again["created"]) == (made["id"], False), "a repeat fires once"
    assert service.call(service.admin, "GET", f"/v1/tasks/{made['id']}").json["kind"] == OWN


def test_code_cannot_declare_a_periodic_task_by_the_name_of_a_foreign_one(service: Service) -> None:
    engine, name = service.server.engine, uuid.uuid4().hex
    service.run(engine.operations.change_periodic(Put(name, PeriodicTaskItem(kind=FOREIGN, every=86400), None)))
    path = f"/v1/periodic/{name}?is_declared=true"
    assert service.call(service.new(["submit"]), "PUT", path, {"kind": OWN, "every": 60}).status == 403
    info = service.run(engine.queries.periodic(name))
    assert info is not None
    assert info.task.kind == FOREIGN


def test_pages_of_periodic_tasks_name_none_of_a_foreign_kind(service: Service) -> None:
    engine, prefix = service.server.engine, uuid.uuid4().hex
    for number, kind in enumerate([FOREIGN, OWN, FOREIGN, FOREIGN, OWN, FOREIGN]):
        item = PeriodicTaskItem(kind=kind, every=86400)
        service.run(engine.operations.change_periodic(Put(f"{prefix}-{number}", item, None)))
    secret, pages = service.new(["read"]), list[list[str]]()
    cursor: str | None = prefix
    while cursor is not None and cursor.startswith(prefix):
        page = service.call(secret, "GET", f"/v1/periodic?limit=1&cursor={cursor}").json
        pages.append([task["name"] for task in page["periodic"]])
        cursor = page["cursor"]
        assert cursor is None or [cursor] == pages[-1]
    assert pages[:2] == [[f"{prefix}-1"], [f"{prefix}-4"]]


def test_only_a_reader_gets_the_payload_of_a_periodic_task_that_it_changes(service: Service) -> None:
    engine, name = service.server.engine, uuid.uuid4().hex
    item = PeriodicTaskItem(kind=OWN, every=86400, payload=Raw(b'"hidden"'))
    service.run(engine.operations.change_periodic(Put(name, item, None)))
    path = f"/v1/periodic/{name}"
    scopes: list[tuple[list[Scope], str | None]] = [(["operate"], None), (["operate", "read"], "hidden")]
    for given, payload in scopes:
        answer = service.call(service.new(given), "POST", f"{path}/pause", {"is_paused": True})
        assert (answer.status, answer.json["task"]["payload"]) == (200, payload)
    sent = {"kind": OWN, "every": 86400, "payload": "mine"}
    assert service.call(service.new(["operate"]), "PUT", path, sent).json["task"]["payload"] == "mine"


def test_a_result_schedules_only_what_its_token_may_submit(service: Service) -> None:
    asked = requests(service, "results", OWN)
    asked.body["results"][0]["then"] = [{"kind": FOREIGN}]
    attempts: list[list[Scope]] = [["work"], ["work", "submit"]]
    for scopes in attempts:
        answer = service.call(service.new(scopes), "POST", asked.path, asked.body)
        assert (answer.status, answer.json["errors"][0]["field"]) == (422, "then")
    assert service.call(service.new(["work", "submit"], ("*",)), "POST", asked.path, asked.body).status == 200


def test_a_repeated_claim_has_tasks_only_for_the_token_that_made_it(service: Service) -> None:
    kind = f"own.{uuid.uuid4().hex}"
    task = service.task(kind)
    mine, other = service.new(["work"]), service.new(["work"])
    body = {"worker": "w", "kinds": [kind], "claim_id": "same", "limit": 5}
    first = service.call(mine, "POST", "/v1/claims", body).json["tasks"]
    assert [each["id"] for each in first] == [task]
    assert service.call(other, "POST", "/v1/claims", body).json["tasks"] == []
    assert service.call(other, "POST", "/v1/claims", body | {"limit": 0}).json["tasks"] == []
    again = service.call(mine, "POST", "/v1/claims", body).json["tasks"]
    assert again == first


def test_answers_that_one_token_does_not_read_hold_up_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_TOGETHER", 1_000_000)
    monkeypatch.setattr(sending, "_PAUSE", 0.01)
    for _ in range(7):  # more than the kernel keeps for a connection
        service.task("own.big", payload="x" * 1_000_000)
    service.task(OWN)
    service.task(FOREIGN)
    slow, other = service.new(["work"]), service.new(["work"], ("foreign.*",))

    def claim(kind: str, limit: int = 1) -> dict[str, Any]:
        return {"worker": "w", "kinds": [kind], "limit": limit, "claim_id": uuid.uuid4().hex}

    body = json.dumps(claim("own.big", 7))
    head = ("POST /v1/claims HTTP/1.1", "Host: localhost", f"Authorization: Bearer {slow}")
    more = ("Content-Type: application/json", f"Content-Length: {len(body)}", "", body)
    with service.server.open() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall("\r\n".join((*head, *more)).encode())
        assert connection.recv(1)
        assert service.call(slow, "POST", "/v1/claims", claim(OWN)).status == 429
        answer = service.call(other, "POST", "/v1/claims", claim(FOREIGN))
        assert (answer.status, len(answer.json["tasks"])) == (200, 1)


def test_a_ticket_of_a_foreign_task_is_refused_like_that_of_none(service: Service) -> None:
    foreign, own = service.task(FOREIGN), service.task(kind := f"own.{uuid.uuid4().hex}")
    tickets = [{"id": each, "fence": 0} for each in (foreign, "nobody", own)]
    body = {"worker": "w", "kinds": [kind], "claim_id": uuid.uuid4().hex, "tickets": tickets}
    answer = service.call(service.new(["work"]), "POST", "/v1/claims", body).json
    assert (answer["refused"], [task["id"] for task in answer["tasks"]]) == ([foreign, "nobody"], [own])


def test_the_kind_of_a_lease_is_looked_up_once_and_holds_for_no_other_lease(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []
    queries = service.server.engine.queries
    kinds_of = queries.kinds_of

    async def counted(ids: Collection[str]) -> dict[str, str]:
        looked_up.extend(ids)
        return await kinds_of(ids)

    monkeypatch.setattr(service.server.lease_kinds, "_kinds_of", counted)
    secret, beats = service.new(["work"]), []
    for kind in (OWN, FOREIGN):
        beats += requests(service, "heartbeat", kind).body["beats"]
    body = {"worker": "w", "beats": beats}
    for _ in range(3):
        verdicts = service.call(secret, "POST", "/v1/heartbeats", body).json["verdicts"]
        assert [verdict["verdict"] for verdict in verdicts] == ["renewed", "gone"]
    assert sorted(looked_up) == sorted(beat["id"] for beat in beats)
    service.call(secret, "POST", "/v1/heartbeats", {"worker": "w", "beats": [beats[1] | {"token": beats[0]["token"]}]})
    assert looked_up.count(beats[1]["id"]) == 2


@pytest.mark.anyio
async def test_only_some_leases_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kinds_of(ids: Collection[str]) -> dict[str, str]:
        return {task_id: f"kind of {task_id}" for task_id in ids if task_id != "unknown"}

    monkeypatch.setattr(lease_kinds, "_MOST", 3)
    known = lease_kinds.LeaseKinds(kinds_of)
    beats = [Beat(id=task_id, token="t") for task_id in ("a", "b", "unknown", "c", "d", "a")]
    kinds = ["kind of a", "kind of b", None, "kind of c", "kind of d", "kind of a"]
    assert await known.of(beats) == kinds == await known.of(beats)
    assert len(known._known) == 3


# Tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_makes_none_that_may_do_more_or_lives_longer(service: Service) -> None:
    until = datetime.now(UTC) + timedelta(days=1)
    secret = service.new(["operate", "read"], ("own.*", "other"), expires_at=until)

    def order(**changed: Any) -> Answer:
        digest = hashlib.sha256(uuid.uuid4().bytes).hexdigest()
        body = {"id": uuid.uuid4().hex, "name": uuid.uuid4().hex, "digest": digest, "scopes": ["read"]}
        body |= {"kinds": ["own.a"], "expires_at": until.isoformat()}
        return service.call(secret, "POST", "/v1/tokens", body | changed)

    for fine in ({}, {"kinds": ["own.*"]}, {"kinds": ["own.b*", "other"]}, {"scopes": ["operate", "read"]}):
        assert order(**fine).status == 200, fine
    later = (until + timedelta(seconds=1)).isoformat()
    wider: list[dict[str, Any]] = [
        {"kinds": ["*"]}, {"kinds": ["own*"]}, {"kinds": ["other*"]}, {"kinds": ["own.a", "foreign"]},
        {"kinds": ["other.x"]},
        {"scopes": ["work"]}, {"scopes": ["read", "submit"]}, {"expires_at": later}, {"expires_at": None},
    ]  # fmt: skip
    for more in wider:
        answer = order(**more)
        assert (answer.status, answer.json["type"]) == (403, FORBIDDEN), more
    assert order(kinds=["own.*.x"]).status == 422


@pytest.mark.parametrize("name", ["local", "-", "--store", "-k", "admin ", " admin"])
def test_a_name_that_means_something_else_is_refused(service: Service, name: str) -> None:
    body = {"id": uuid.uuid4().hex, "name": name, "digest": uuid.uuid4().hex * 2, "scopes": ["read"], "kinds": ["*"]}
    answer = service.call(service.admin, "POST", "/v1/tokens", body)
    assert (answer.status, answer.json["errors"][0]["field"]) == (422, "name")


def test_a_narrow_operator_neither_sees_nor_ends_a_wider_token(service: Service) -> None:
    narrow = service.new(["operate"])
    names = {token["name"] for token in service.call(narrow, "GET", "/v1/tokens").json["tokens"]}
    assert "admin" not in names
    for method, path, body in (
        ("GET", "/v1/tokens/admin", None),
        ("DELETE", "/v1/tokens/admin", None),
        ("POST", "/v1/tokens/admin/rotate", {"digest": "ab" * 32}),
    ):
        assert service.call(narrow, method, path, body).status == 404
    assert service.call(service.admin, "GET", "/v1/stats").status == 200


def test_an_operator_of_some_kinds_leaves_room_for_those_of_all(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasekit.server.roles.tokens._MOST_OF_SOME", 1)
    monkeypatch.setattr("leasekit.server.roles.gates._MOST_OF_SOME", 0)
    narrow = service.new(["operate"])
    for secret, made, closed in ((narrow, 409, 422), (service.admin, 200, 200)):
        body = {"id": uuid.uuid4().hex, "name": uuid.uuid4().hex, "digest": uuid.uuid4().hex * 2, "kinds": ["own.x"]}
        assert service.call(secret, "POST", "/v1/tokens", {**body, "scopes": ["operate"]}).status == made
        gate = f"/v1/gates/kinds/own.{uuid.uuid4().hex}"
        assert service.call(secret, "PUT", gate, {"mode": "pause"}).status == closed
        service.call(service.admin, "DELETE", gate)


def test_a_token_that_is_ended_by_its_name_is_that_of_the_name(service: Service) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["operate"])
    decoy = {"id": name, "name": "decoy", "digest": uuid.uuid4().hex * 2, "scopes": ["operate"], "kinds": ["*"]}
    assert service.call(secret, "POST", "/v1/tokens", decoy).status == 409
    assert service.call(secret, "POST", "/v1/tokens", decoy | {"id": "admin"}).status == 422
    revoke(service, name)
    assert service.call(secret, "GET", "/v1/tokens").status == 401


def test_a_repeated_order_makes_one_token_and_an_id_or_name_is_used_once(service: Service) -> None:
    body = {"id": uuid.uuid4().hex, "name": uuid.uuid4().hex, "digest": uuid.uuid4().hex * 2, "scopes": ["read"]}
    body["kinds"] = ["*"]
    first, again = (service.call(service.admin, "POST", "/v1/tokens", body) for _ in range(2))
    assert first.json == again.json
    for changed in ({"id": uuid.uuid4().hex}, {"name": "another"}, {"digest": uuid.uuid4().hex * 2}):
        assert service.call(service.admin, "POST", "/v1/tokens", body | changed).status == 409, changed


def test_a_revoked_token_is_refused_at_once_and_like_an_unknown_one(service: Service) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["read"])
    assert service.call(secret, "GET", "/v1/stats").status == 200
    service.call(service.admin, "DELETE", f"/v1/tokens/{name}")
    revoked, unknown = (service.call(each, "GET", "/v1/stats") for each in (secret, new_secret()))
    assert revoked.status == 401
    assert revoked.json == unknown.json


def test_a_token_is_revoked_at_once_however_many_reads_wait(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["read"])
    assert service.call(secret, "GET", "/v1/stats").status == 200
    monkeypatch.setattr("leasekit.server.readers._WAITING", 0)
    assert service.call(service.admin, "DELETE", f"/v1/tokens/{name}").status == 200
    assert service.call(secret, "GET", "/v1/stats").status == 401


def test_an_expired_token_is_refused(service: Service) -> None:
    until = datetime.now(UTC) + timedelta(seconds=0.3)
    secret = service.new(["read"], expires_at=until)
    while datetime.now(UTC) <= until:
        assert service.call(secret, "GET", "/v1/stats").status in (200, 401)
    assert service.call(secret, "GET", "/v1/stats").status == 401


def test_a_rotated_token_has_both_secrets_for_a_while(service: Service) -> None:
    old = service.local_token(name := uuid.uuid4().hex, ["read"])
    new, newest = new_secret(), new_secret()
    rotate = {"digest": digest_of(new).hex(), "overlap": 60}
    assert service.call(service.admin, "POST", f"/v1/tokens/{name}/rotate", rotate).status == 200
    assert [service.call(each, "GET", "/v1/stats").status for each in (old, new)] == [200, 200]
    rotate = {"digest": digest_of(newest).hex()}
    assert service.call(service.admin, "POST", f"/v1/tokens/{name}/rotate", rotate).status == 200
    assert [service.call(each, "GET", "/v1/stats").status for each in (old, new, newest)] == [401, 401, 200]
    again = service.call(service.admin, "POST", f"/v1/tokens/{name}/rotate", {"digest": digest_of(old).hex()})
    assert again.status == 200  # it is not kept for ever


@pytest.mark.parametrize("header", ["lk_", "Basic abc", "Bearer", "Bearer x", "Bearer lk_" + "0" * 49, "Bearer \xff"])
def test_what_is_no_token_is_refused_in_the_same_words(service: Service, header: str) -> None:
    answer = service.server.call("GET", "/v1/stats", authorization=header)
    assert (answer.status, answer.json["type"]) == (401, UNAUTHENTICATED)
    assert answer.json == service.call(new_secret(), "GET", "/v1/stats").json


def revoke(service: Service, name: str) -> None:
    assert service.call(service.admin, "DELETE", f"/v1/tokens/{name}").status == 200


def rotate(service: Service, name: str) -> None:
    body = {"digest": uuid.uuid4().hex * 2}
    assert service.call(service.admin, "POST", f"/v1/tokens/{name}/rotate", body).status == 200


Ends = Callable[[Service, str], None]
ENDS = pytest.mark.parametrize("end", [revoke, rotate])
"""The ways in which a secret ends."""


@ENDS
def test_a_request_whose_secret_ends_while_its_body_arrives_does_nothing(service: Service, end: Ends) -> None:
    """A body may take half a minute: a token that was revoked long ago would make itself another one."""
    secret = service.local_token(name := uuid.uuid4().hex, ["submit"])
    body = json.dumps({"tasks": [{"kind": "arrives", "id": (task_id := uuid.uuid4().hex)}]}).encode()
    head = b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (secret.encode(), len(body))
    with service.server.open() as connection:
        connection.sendall(head + body[:5])
        eventually(lambda: service.server.bodies.size == 5)
        end(service, name)
        connection.sendall(body[5:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
    assert service.call(service.admin, "GET", f"/v1/tasks/{task_id}").status == 404


def test_who_may_not_read_is_told_no_settings_of_others(service: Service) -> None:
    kind = uuid.uuid4().hex
    assert service.call(service.admin, "PUT", f"/v1/kinds/{kind}", {"priority": 3, "max_attempts": 7}).status == 200
    operator = service.local_token(uuid.uuid4().hex, ["operate"])
    declared = service.call(operator, "PUT", f"/v1/kinds/{kind}?is_declared=true", {"concurrency": 5})
    assert declared.status == 200
    assert declared.json["settings"] == declared.json["declared"] == {"concurrency": 5}


@ENDS
def test_a_stream_ends_when_its_secret_does_and_shows_only_its_kinds(service: Service, end: Ends) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["read"], ("own.*",))
    with service.server.open() as stream:
        stream.sendall(f"GET /v1/events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n\r\n".encode())
        seen = b""
        while b"retry:" not in seen:
            seen += stream.recv(65536)
        foreign, own = service.task(FOREIGN), service.task(OWN)
        while own.encode() not in seen:
            seen += stream.recv(65536)
        assert foreign.encode() not in seen
        end(service, name)
        while data := stream.recv(65536):  # until the server ends it
            if data.endswith(b"0\r\n\r\n"):
                break
            assert b":\n\n" not in data, "after a quarter of a minute the stream goes on"
        assert data.endswith(b"0\r\n\r\n")


@ENDS
@pytest.mark.parametrize("path", ["claims", "cancels", "tasks/ended"])
def test_what_waits_ends_when_its_secret_does(service: Service, path: str, end: Ends) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["work", "read"], ("own.*",))
    body = {
        "claims": {"worker": "w", "kinds": [f"own.{name}"], "claim_id": name, "wait": 60},
        "cancels": {"worker": name, "wait": 60},
        "tasks/ended": {"ids": [service.task(OWN, delay=3600)], "wait": 60},
    }[path]
    with service.server.open() as waiting:
        raw = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n"
        waiting.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)
        eventually(lambda: service.waiting, "the request to wait")
        end(service, name)
        assert waiting.recv(65536).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("what", ["claims", "events", "body"])
def test_what_began_without_a_token_ends_with_the_first_one(run_server: RunServer, what: str) -> None:
    with run_server() as server:
        body = json.dumps({"worker": "w", "kinds": ["k"], "claim_id": "c", "wait": 60}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        path, rest = ("GET /v1/events", b"\r\n") if what == "events" else ("POST /v1/claims", head + body)
        with server.open() as waiting:
            waiting.sendall(
                f"{path} HTTP/1.1\r\nhost: localhost\r\n".encode() + rest[: -10 if what == "body" else None]
            )
            if what == "events":
                assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
            else:
                eventually(lambda: server.engine.claims_waiting or server.bodies.size)
            Service(server)
            if what == "body":
                waiting.sendall(rest[-10:])
            data = b""
            while b"HTTP/1.1 401" not in data and not data.endswith(b"0\r\n\r\n"):
                part = waiting.recv(65536)
                assert part, data
                data += part


def test_bad_tokens_are_locked_out_and_good_ones_are_not(
    run_server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_FAILURES", 20)
    with run_server() as server:
        service = Service(server)
        answers = [service.call(new_secret(), "GET", "/v1/stats") for _ in range(30)]
        assert [answer.status for answer in answers[:20]] == [401] * 20
        assert answers[-1].status == 429
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert service.call(service.admin, "GET", "/v1/stats").status == 200


def test_requests_without_a_token_lock_nobody_out(run_server: RunServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_FAILURES", 20)
    with run_server() as server:
        service = Service(server)
        assert {service.call(None, "GET", "/v1/stats").status for _ in range(30)} == {401}
        assert service.call(new_secret(), "GET", "/v1/stats").status == 401


def test_a_server_without_tokens_asks_for_none_on_its_own_machine(run_server: RunServer) -> None:
    with run_server() as server:
        assert server.call("GET", "/v1/stats").status == 200
        assert server.call("GET", "/v1/stats", authorization="Basic of-a-proxy").status == 200
        assert server.call("GET", "/v1/stats", authorization=f"Bearer {new_secret()}").status == 401


def test_a_server_that_others_can_reach_needs_a_token_while_its_store_has_none(run_server: RunServer) -> None:
    with run_server(reach=Reach.of(is_open=True, has_tls=True, needs_tokens=False, names=[], proxies=[])) as server:
        assert server.call("GET", "/v1/stats").status == 401
        assert server.call("GET", "/healthz").status == 200


def test_once_there_was_a_token_requests_need_one(run_server: RunServer) -> None:
    with run_server() as server:
        service = Service(server)
        assert server.call("GET", "/v1/stats").status == 401
        assert service.call(service.admin, "DELETE", "/v1/tokens/admin").status == 200
        assert server.call("GET", "/v1/stats").status == 401


# The audit log ---------------------------------------------------------------------------------------------------


def entries(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.call(service.admin, "GET", "/v1/audit?limit=1000").json["entries"]
    return found


def test_code_that_declares_a_kind_again_writes_no_second_entry(service: Service) -> None:
    kind = f"own.{uuid.uuid4().hex}"
    path, secret = f"/v1/kinds/{kind}?is_declared=true", service.new(["operate"], (kind,))
    for weight in (2.0, 2.0, 3.0):
        answer = service.call(secret, "PUT", path, {"weight": weight})
        assert (answer.status, answer.json["declared"]) == (200, {"weight": weight})
    assert [entry["act"] for entry in entries(service) if entry.get("target") == kind] == ["kind.declare"] * 2
    assert service.call(service.new(["work", "submit"], (kind,)), "PUT", path, {"weight": 9.0}).status == 403


NO_ACTS = {"list_tokens", "get_token", "list_audit"}
OPERATORS = [each for each in ASKED if "operate" in each.needs.scopes and name_of(each) not in NO_ACTS]


@pytest.mark.parametrize("operation", OPERATORS, ids=name_of)
def test_each_act_of_an_operator_writes_one_entry(service: Service, operation: Operation) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["operate"])
    asked = requests(service, name_of(operation), OWN)
    before = {entry["id"] for entry in entries(service)}
    answer = send(service, secret, operation, asked)
    new = [entry for entry in entries(service) if entry["id"] not in before]
    if answer.status == 422:  # this store has no file to make smaller
        assert (name_of(operation), new) == ("vacuum", [])
        return
    (entry,) = new
    assert entry["by"] == name
    assert entry["count"] >= (name_of(operation) not in {"cancel_chain", "vacuum"})  # this file has no free space
    assert entry["act"]


def test_an_act_that_finds_nothing_is_in_the_log_and_a_dry_run_is_not(service: Service) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["operate"])
    service.call(secret, "POST", "/v1/tasks/purge", {"kind": "nothing", "dry_run": True})
    service.call(secret, "POST", "/v1/tasks/purge", {"kind": "nothing", "older_than": 5})
    service.call(secret, "POST", "/v1/tasks/redrive", {"ids": ["nobody"], "dry_run": True})
    service.call(secret, "POST", "/v1/tasks/redrive", {"ids": ["nobody"]})
    made = [entry for entry in entries(service) if entry["by"] == name]
    assert [(entry["act"], entry["count"]) for entry in made] == [("tasks.redrive", 0), ("tasks.purge", 0)]
    assert (made[1]["target"], made[1]["fields"]) == ("nothing", ["kind", "older_than"])


def acts(service: Service, by: str) -> list[tuple[str, int]]:
    """Return what was done with an access token, the earliest first, and to how many."""
    return [(entry["act"], entry["count"]) for entry in reversed(entries(service)) if entry["by"] == by]


AGAIN = ["close_collection", "close_kind", "delete_kind", "delete_periodic", "open_collection", "open_kind",
         "pause_periodic", "purge", "rotate_token", "set_kind", "set_periodic", "undrain_worker",
         "cancel", "create_token", "cancel_matching"]  # fmt: skip


@pytest.mark.parametrize("name", AGAIN)
def test_the_log_counts_nothing_for_what_was_so_already(service: Service, name: str) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    (operation,) = (each for each in ASKED if name_of(each) == name)
    asked = requests(service, name, f"own.{uuid.uuid4().hex}")
    for _ in range(3):
        assert send(service, secret, operation, asked).status == 200
    assert [count for _, count in acts(service, by)] == [1, 0, 0]


def test_the_log_counts_nothing_for_a_repeat(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    kind, again = f"own.{uuid.uuid4().hex}", uuid.uuid4().hex
    redrive = {"ids": [service.dead(kind), service.dead(kind), "nobody"], "redrive_id": again}
    waits = f"/v1/tasks/{service.task(kind)}"
    for method, path, body in [
        *[("POST", "/v1/tasks/redrive", redrive)] * 3,
        *[("PATCH", waits, {"delay": 9, "request_id": again})] * 3,
    ]:
        assert service.call(secret, method, path, body).status == 200
    assert [count for _, count in acts(service, by)] == [2, 0, 0, 1, 0, 0]


def test_the_log_counts_a_task_once_that_is_named_five_times(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    kind = f"own.{uuid.uuid4().hex}"
    dead, waits = service.dead(kind), service.task(kind)
    for path, task in (("redrive", dead), ("cancel", waits), ("purge", waits)):
        assert service.call(secret, "POST", f"/v1/tasks/{path}", {"ids": [task] * 5}).status == 200
    assert acts(service, by) == [("tasks.redrive", 1), ("tasks.cancel", 1), ("tasks.purge", 1)]


def test_the_log_counts_nothing_for_a_reschedule_that_is_refused(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    service.run(service.server.engine.cancel([ended := service.task(OWN)]))
    for task, status in ((ended, 422), ("nobody", 404), (service.task(OWN), 200)):
        assert service.call(secret, "PATCH", f"/v1/tasks/{task}", {"delay": 9}).status == status
    assert [count for _, count in acts(service, by)] == [0, 0, 1]


def test_the_log_counts_the_revocation_of_a_token_once(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["operate"])
    service.local_token(name := uuid.uuid4().hex, ["operate"])
    token = service.call(service.admin, "GET", f"/v1/tokens/{name}").json["id"]
    for _ in range(2):
        assert service.call(secret, "DELETE", f"/v1/tokens/{token}").status == 200
    assert acts(service, by) == [("token.revoke", 1), ("token.revoke", 0)]


def test_the_log_has_the_drain_of_a_worker_that_is_unknown(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["operate"])
    assert service.call(secret, "PUT", f"/v1/workers/{by}/drain", {}).status == 404
    assert acts(service, by) == [("worker.drain", 0)]


def test_the_log_names_the_settings_of_a_kind_that_were_changed(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["operate"])
    path = f"/v1/kinds/own.{uuid.uuid4().hex}"
    for method, query, body in (
        ("PUT", "", {"max_attempts": 3, "concurrency": 4}),
        ("PUT", "", {"max_attempts": 3}),
        ("PUT", "", {"max_attempts": None, "priority": 2}),
        ("PUT", "", {"max_attempts": None, "priority": 2}),
        ("PUT", "?is_declared=true", {"max_attempts": 5}),
        ("DELETE", "", None),
        ("DELETE", "", None),
    ):
        assert service.call(secret, method, path + query, body).status == 200
    made = [(entry["fields"], entry["count"]) for entry in reversed(entries(service)) if entry["by"] == by]
    assert made == [
        (["concurrency", "max_attempts"], 1),
        (["concurrency"], 1),
        (["max_attempts", "priority"], 1),
        ([], 0),
        (["max_attempts"], 1),
        (["max_attempts", "priority"], 1),
        ([], 0),
    ]


def test_settings_that_others_have_changed_are_a_conflict(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["operate"])
    path = f"/v1/kinds/own.{uuid.uuid4().hex}"
    for method, was, body, status in (
        ("PUT", "%7B%7D", {"priority": 1}, 200),
        ("PUT", "%7B%7D", {"priority": 1}, 200),
        ("PUT", "%7B%7D", {"weight": 2}, 409),
        ("DELETE", "%7B%7D", None, 409),
        ("DELETE", "%7B%22priority%22%3A9%7D", None, 409),
        ("DELETE", "%7B%22prio%22%3A1%7D", None, 409),
        ("DELETE", "1", None, 409),
        ("DELETE", "", None, 409),
        ("DELETE", "%7B%22priority%22%3A1%7D", None, 200),
    ):
        answer = service.call(secret, method, f"{path}?was={was}", body)
        assert answer.status == status
        assert status == 200 or [error["field"] for error in answer.json["errors"]] == ["was"]
    assert acts(service, by) == [("kind.set", 1), ("kind.set", 0), ("kind.delete", 1)]


def test_the_log_names_what_was_given_as_null(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    body = {"kind": OWN, "every": 60, "max_attempts": None}
    assert service.call(secret, "PUT", f"/v1/periodic/{by}", body).status == 200
    (entry,) = (entry for entry in entries(service) if entry["by"] == by)
    assert entry["fields"] == ["every", "kind", "max_attempts"]


def test_the_log_tells_what_was_removed_from_what_was_left(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["operate"], ("own.*",))
    for kind in (FOREIGN, OWN):
        name = requests(service, "delete_periodic", kind).concerns
        assert service.call(secret, "DELETE", f"/v1/periodic/{name}").status == 200
    assert service.call(secret, "DELETE", "/v1/periodic/nothing").status == 200
    made = [(entry["act"], entry["count"]) for entry in entries(service) if entry["by"] == by]
    assert made == [("periodic.delete", count) for count in (0, 1, 0)], "the latest first"


def test_the_log_names_the_task_or_chain_that_a_request_is_for(service: Service) -> None:
    secret = service.local_token(by := uuid.uuid4().hex, ["submit", "operate"])
    task, other = service.task(OWN), service.task(OWN)
    for method, path, body in (
        ("PATCH", f"/v1/tasks/{task}", {"delay": 9}),
        ("POST", "/v1/tasks/cancel", {"ids": [task, "nobody"]}),
        ("POST", "/v1/tasks/cancel", {"ids": [task]}),
        ("POST", "/v1/chains/cancel", {"id": other}),
        ("POST", "/v1/tasks/redrive", {"ids": [task]}),
    ):
        assert service.call(secret, method, path, body).status == 200
    made = [(entry["act"], entry["target"]) for entry in reversed(entries(service)) if entry["by"] == by]
    assert made == [
        ("task.reschedule", task),
        ("tasks.cancel", None),
        ("tasks.cancel", task),
        ("chain.cancel", other),
        ("tasks.redrive", task),
    ]


def test_the_log_has_names_and_no_values(service: Service) -> None:
    canary = "canary-5bf1c0"
    body = {"kind": OWN, "every": 60, "payload": {"secret": canary}}
    service.call(service.admin, "PUT", "/v1/periodic/with-payload", body)
    service.call(service.admin, "PUT", f"/v1/gates/kinds/{OWN}-x", {"reason": canary})
    assert canary not in json.dumps(entries(service))


def test_a_submitter_who_cancels_is_not_in_the_log(service: Service) -> None:
    secret = service.local_token(name := uuid.uuid4().hex, ["submit"])
    service.call(secret, "POST", "/v1/tasks/cancel", {"ids": [service.task(OWN)]})
    assert [entry for entry in entries(service) if entry["by"] == name] == []


def test_no_secret_is_stored_or_logged(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    secret = service.new(["read"])
    for path in ("/v1/stats", "/v1/tasks/nobody", "/v1/tasks?kind=%00"):
        answer = service.call(secret, "GET", path)
        assert secret not in answer.raw.decode() + str(answer.headers)
    listed = service.call(service.admin, "GET", "/v1/tokens").raw.decode()
    metrics = service.call(service.admin, "GET", "/metrics").raw.decode()
    rows = service.run(service.server.engine._readers.read(lambda view: view.tokens()))
    assert is_secret(secret)
    assert not any(secret[3:] in text for text in (listed, metrics, repr(rows), caplog.text))
