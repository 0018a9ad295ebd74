"""The whole life of a task by plain requests, with every repeat and every stale write."""

import itertools
from typing import Any
from urllib.parse import quote

from tests.server.http.conftest import Running

_ids = (f"claim-{n}" for n in itertools.count())


def schedule(server: Running, *tasks: dict[str, Any]) -> Any:
    return server.post("/v1/tasks", {"tasks": list(tasks)})["tasks"]


def claim(server: Running, kind: str, *, worker: str = "w", limit: int = 10, claim_id: str | None = None) -> Any:
    body = {"worker": worker, "kinds": [kind], "limit": limit, "wait": 0, "claim_id": claim_id or next(_ids)}
    return server.post("/v1/claims", body)["tasks"]


def beat(server: Running, task: Any, *, worker: str = "w", **more: Any) -> Any:
    body = {"worker": worker, "beats": [{"id": task["id"], "token": task["token"], **more}]}
    (verdict,) = server.post("/v1/heartbeats", body)["verdicts"]
    return verdict


def settle(server: Running, task: Any, outcome: str, *, worker: str = "w", **more: Any) -> Any:
    result = {"id": task["id"], "token": task["token"], "outcome": outcome, **more}
    (verdict,) = server.post("/v1/results", {"worker": worker, "results": [result]})["verdicts"]
    return verdict


def cancel(server: Running, *ids: str) -> Any:
    return [v["verdict"] for v in server.post("/v1/tasks/cancel", {"ids": list(ids)})["verdicts"]]


def test_a_task_from_its_schedule_to_its_success(server: Running) -> None:
    payload = {"text": "ü\u2028", "number": 12345678901234567890, "nested": [[None, True, 1.5]]}
    (made,) = schedule(server, {"kind": "life", "id": "life-1", "payload": payload, "collection": "c", "priority": 0})
    assert made == {"id": "life-1", "created": True, "status": "new"}

    (task,) = claim(server, "life")
    assert task["payload"] == payload
    assert (task["id"], task["kind"], task["collection"], task["priority"]) == ("life-1", "life", "c", 0)
    assert (task["attempt"], task["ttl"], task["progress"]) == (1, 300.0, None)
    assert server.get("/v1/tasks/life-1")["status"] == "claimed"

    assert beat(server, task, started=False)["verdict"] == "renewed"
    assert server.get("/v1/tasks/life-1")["status"] == "claimed"
    assert beat(server, task, progress={"page": 3}) == {"id": "life-1", "verdict": "renewed", "ttl": 300.0}
    running = server.get("/v1/tasks/life-1")
    assert (running["status"], running["progress"], running["worker"]) == ("processing", {"page": 3}, "w")

    assert settle(server, task, "success", result={"pages": 12}) == {"id": "life-1", "verdict": "settled"}
    ended = server.get("/v1/tasks/life-1")
    assert (ended["status"], ended["result"]) == ("success", {"pages": 12})
    assert [run["outcome"] for run in ended["history"]] == ["success"]


def test_a_task_is_scheduled_once_however_often_it_is_sent(server: Running) -> None:
    task = {"kind": "once", "id": "once-1", "payload": [1]}
    assert [schedule(server, task)[0]["created"] for _ in range(3)] == [True, False, False]
    assert len(claim(server, "once")) == 1


def test_an_id_that_is_taken_by_another_task_is_a_conflict(server: Running) -> None:
    schedule(server, {"kind": "taken", "id": "taken-1", "payload": 1})
    (found,) = schedule(server, {"kind": "taken", "id": "taken-1", "payload": 2})
    assert (found["created"], found["conflict"]) == (False, True)
    assert server.get("/v1/tasks/taken-1")["payload"] == 1


def test_a_claim_repeated_gets_the_same_tasks_with_the_same_tokens(server: Running) -> None:
    schedule(server, {"kind": "again", "id": "again-1"})
    first = claim(server, "again", claim_id="again")
    assert claim(server, "again", claim_id="again") == first
    assert claim(server, "again", claim_id="another") == []


def test_a_result_repeated_is_settled_again_and_any_other_is_gone(server: Running) -> None:
    schedule(server, {"kind": "repeat", "id": "repeat-1"})
    (task,) = claim(server, "repeat")
    assert settle(server, task, "success", result=1)["verdict"] == "settled"
    assert settle(server, task, "success", result=1)["verdict"] == "settled"
    assert settle(server, task, "success", result=2)["verdict"] == "gone"
    assert settle(server, task, "retry")["verdict"] == "gone"
    assert beat(server, task)["verdict"] == "gone"
    assert server.get("/v1/tasks/repeat-1")["result"] == 1


def test_a_token_of_an_earlier_claim_is_gone_and_changes_nothing(server: Running) -> None:
    schedule(server, {"kind": "stale", "id": "stale-1"})
    (first,) = claim(server, "stale")
    assert settle(server, first, "retry", retry_after=0)["verdict"] == "settled"
    (second,) = claim(server, "stale")
    assert second["fence"] > first["fence"]
    assert second["token"] != first["token"]

    assert beat(server, first, progress="stale")["verdict"] == "gone"
    assert settle(server, first, "success", result="stale")["verdict"] == "gone"
    task = server.get("/v1/tasks/stale-1")
    assert (task["status"], task["progress"], task["result"]) == ("claimed", None, None)
    assert settle(server, second, "success")["verdict"] == "settled"


def test_a_guessed_token_is_gone(server: Running) -> None:
    schedule(server, {"kind": "guess", "id": "guess-1"})
    (task,) = claim(server, "guess")
    assert len(task["token"]) >= 22  # 128 bits in base 64
    for token in (task["id"], str(task["fence"]), task["token"][:-1], task["token"] + "A", task["token"].swapcase()):
        forged = {**task, "token": token}
        assert beat(server, forged, worker="other")["verdict"] == "gone"
        assert settle(server, forged, "success", worker="other")["verdict"] == "gone"
    assert server.get("/v1/tasks/guess-1")["status"] == "claimed"


def test_a_task_that_is_given_back_runs_elsewhere_as_if_it_had_not_begun(server: Running) -> None:
    schedule(server, {"kind": "back", "id": "back-1"})
    (task,) = claim(server, "back")
    assert settle(server, task, "release")["verdict"] == "settled"
    (again,) = claim(server, "back", worker="other")
    assert again["attempt"] == 1


def test_progress_reaches_the_next_holder(server: Running) -> None:
    schedule(server, {"kind": "resume", "id": "resume-1"})
    (task,) = claim(server, "resume")
    beat(server, task, progress={"page": 1})
    settle(server, task, "retry", progress={"page": 2}, retry_after=0, error={"message": "no"})
    (again,) = claim(server, "resume")
    assert (again["progress"], again["attempt"]) == ({"page": 2}, 2)


def test_successors_are_scheduled_with_the_result_and_once(server: Running) -> None:
    schedule(server, {"kind": "parent", "id": "parent-1"})
    (task,) = claim(server, "parent")
    then = [{"kind": "child", "payload": n} for n in range(3)]
    for _ in range(2):
        assert settle(server, task, "success", then=then)["verdict"] == "settled"
    assert sorted(child["payload"] for child in claim(server, "child")) == [0, 1, 2]


def test_cancel_of_what_waits_what_runs_what_has_ended_and_what_never_was(server: Running) -> None:
    schedule(server, {"kind": "cancel", "id": "cancel-running"})
    (task,) = claim(server, "cancel")
    schedule(server, {"kind": "cancel", "id": "cancel-waiting"})
    ids = ["cancel-waiting", "cancel-running", "cancel-unknown"]
    assert cancel(server, *ids) == ["cancelled", "cancel_requested", "gone"]
    assert beat(server, task)["cancel_requested"] is True
    assert settle(server, task, "cancelled")["verdict"] == "settled"
    assert server.get("/v1/tasks/cancel-running")["status"] == "cancelled"
    schedule(server, {"kind": "cancel", "id": "cancel-late"})
    (late,) = claim(server, "cancel")
    settle(server, late, "success")
    assert cancel(server, "cancel-late") == ["gone"]


def test_every_item_of_a_batch_has_its_own_verdict_in_order(server: Running) -> None:
    schedule(server, *({"kind": "batch", "id": f"batch-{n}"} for n in range(5)))
    tasks = {task["id"]: task for task in claim(server, "batch")}
    beats = [{"id": f"batch-{n}", "token": tasks[f"batch-{n}"]["token"] if n % 2 else "stale"} for n in range(5)]
    verdicts = server.post("/v1/heartbeats", {"worker": "w", "beats": beats})["verdicts"]
    assert [v["id"] for v in verdicts] == [b["id"] for b in beats]
    assert [v["verdict"] for v in verdicts] == ["gone", "renewed", "gone", "renewed", "gone"]


def test_a_listing_goes_on_where_its_last_page_ended(server: Running) -> None:
    schedule(server, *({"kind": "page", "id": f"page-{n}"} for n in range(5)))
    seen: list[str] = []
    cursor = ""
    while True:
        page = server.get(f"/v1/tasks?kind=page&limit=2{cursor}")
        seen += [task["id"] for task in page["tasks"]]
        if not page.get("cursor"):
            break
        cursor = f"&cursor={page['cursor']}"
    assert sorted(seen) == [f"page-{n}" for n in range(5)]


def test_a_task_may_be_called_whatever_a_route_is_called(server: Running) -> None:
    for name in ("cancel", "..", ".", "a b", "100%"):
        schedule(server, {"kind": "named", "id": name})
        path = {"..": "%2E%2E", ".": "%2E", "a b": "a%20b", "100%": "100%25"}.get(name, name)
        assert server.get(f"/v1/tasks/{path}")["id"] == name


def test_stats_count_kinds_and_statuses(server: Running) -> None:
    schedule(server, {"kind": "counted"}, {"kind": "counted"})
    (task,) = claim(server, "counted", limit=1)
    settle(server, task, "success")
    counts = server.get("/v1/stats")["kinds"]["counted"]
    assert {status: n for status, n in counts.items() if n} == {"new": 1, "success": 1}


def test_a_worker_tells_its_window_with_claims_and_heartbeats(server: Running) -> None:
    def told() -> Any:
        (info,) = [info for info in server.get("/v1/workers")["workers"] if info["name"] == "waits"]
        return info["window"], info["waiting"]

    schedule(server, {"kind": "windowed"})
    body = {"worker": "waits", "kinds": ["windowed"], "claim_id": next(_ids)}
    (task,) = server.post("/v1/claims", {**body, "window": {"size": 56}})["tasks"]
    assert told() == (56, 0)
    one = {"id": task["id"], "token": task["token"]}
    server.post("/v1/heartbeats", {"worker": "waits", "beats": [one], "window": {"size": 60, "waiting": 7}})
    assert told() == (60, 7)
    server.post("/v1/heartbeats", {"worker": "waits", "beats": [one]})
    assert told() == (60, 7)


def test_a_worker_that_holds_a_lease_is_listed(server: Running) -> None:
    schedule(server, {"kind": "held"})
    claim(server, "held", worker="holder")
    assert "holder" in str(server.get("/v1/workers")["workers"])


def test_stats_and_workers_come_in_pages(server: Running) -> None:
    kinds = [f"page {n} &+?" for n in range(5)]
    schedule(server, *({"kind": kind} for kind in kinds))
    for n, kind in enumerate(kinds):
        claim(server, kind, worker=f"paged-{n}")
    for listing, names in (("stats", kinds), ("workers", [f"paged-{n}" for n in range(5)])):
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page = server.get(f"/v1/{listing}?limit=2&cursor={quote(cursor)}")
            items = list(page["kinds"]) if listing == "stats" else [worker["name"] for worker in page["workers"]]
            assert len(items) == 2 or page["cursor"] is None
            found, cursor = found + items, page["cursor"]
        assert found == sorted(set(found))
        assert set(names) <= set(found)
    assert server.call("GET", "/v1/stats?limit=0").status == 422


def test_it_is_healthy_and_ready(server: Running) -> None:
    assert server.get("/healthz") == {"status": "ok"}
    assert server.get("/readyz")["status"] == "ready"
