"""Acts: each says first what it will do, counts, and is judged again when it is sent."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from leasekit.server.console import bulk_acts
from leasekit.server.roles import chains
from tests.server.console.conftest import Seen, Site, seen
from tests.server.http.conftest import Answer, run


class Desk:
    """The forms of a console, as a browser sends them."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def look(self, act: str, **given: Any) -> Seen:
        """Open the page that says what an act will do."""
        return self.site.see(f"do?{urlencode({'act': act, **given})}")

    def send(self, page: Seen, *, origin: str | None = None, **fields: Any) -> Answer:
        """Send the form of a page."""
        hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.html)
        form = {name: unescape(value) for name, value in hidden} | fields
        origin = origin if origin is not None else f"http://127.0.0.1:{self.site.server.port}"
        headers = {"content_type": "application/x-www-form-urlencoded"} | ({"origin": origin} if origin else {})
        return self.site.server.call("POST", "/console/do", urlencode(form).encode(), **headers)

    def do(self, act: str, *, fields: dict[str, Any] | None = None, **given: Any) -> Seen:
        """Do an act, and follow the way to the page that shows it."""
        answer = self.send(self.look(act, **given), **(fields or {}))
        while answer.status == 200:  # a part of an act on many tasks
            answer = self.send(seen(answer))
        assert answer.status == 303, answer
        return self.site.see(answer.headers["location"].removeprefix("./"))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with run(f"sqlite:///{tmp_path}/tasks.db", console="on") as server:
        yield Desk(Site(server))


def status(desk: Desk, task_id: str) -> str:
    return str(desk.site.server.get(f"/v1/tasks/{task_id}")["status"])


def dead(desk: Desk, *ids: str, kind: str = "k", message: str = "boom") -> None:
    for task_id in ids:
        desk.site.schedule(kind, id=task_id, max_attempts=1)
        (task,) = desk.site.claim(kind)
        desk.site.settle(task, "retry", error={"type": "E", "message": message})


def test_a_waiting_task_is_cancelled_after_a_page_that_says_so(desk: Desk) -> None:
    desk.site.schedule("k", id="t")
    assert "It waits: it ends at once" in desk.look("cancel", id="t").text
    assert status(desk, "t") == "new"
    page = desk.do("cancel", id="t")
    assert "Cancelled" in page.text
    assert status(desk, "t") == "cancelled"


def test_the_page_of_a_running_task_names_the_worker_that_is_asked(desk: Desk) -> None:
    desk.site.schedule("k", id="t", claim=True)
    assert "It runs in worker 'w', which is asked to stop it" in desk.look("cancel", id="t").text
    desk.do("cancel", id="t")
    assert desk.site.server.get("/v1/tasks/t")["cancel_requested"]


def test_what_has_ended_has_no_button(desk: Desk) -> None:
    dead(desk, "t")
    page = desk.look("cancel", id="t")
    assert "there is nothing to cancel" in page.text
    assert "button" not in page.html.partition("<main")[2].partition("</main")[0].replace('class="button"', "")


def test_a_task_is_made_due(desk: Desk) -> None:
    desk.site.schedule("k", id="t", delay=3600)
    assert "Due now" in desk.do("run-now", id="t").text
    assert len(desk.site.claim("k")) == 1


def test_a_dead_task_is_redriven_once_however_often_the_form_is_sent(desk: Desk) -> None:
    dead(desk, "t")
    page = desk.look("redrive", id="t")
    assert desk.send(page).status == desk.send(page).status == 303
    history = desk.site.server.get("/v1/tasks/t")["history"]
    assert [entry["outcome"] for entry in history] == ["retry", "redriven"]
    assert history[-1]["worker"] == "127.0.0.1"


def test_a_kind_is_paused_with_a_reason_and_resumed(desk: Desk) -> None:
    desk.site.schedule("k", id="t")
    page = desk.look("pause", kind="k")
    assert "1 wait, 1 of them due: they go on waiting" in page.text
    paused = desk.do("pause", kind="k", fields={"duration": "3600", "reason": "the disk is full"})
    assert "the disk is full" in paused.text
    assert desk.site.claim("k") == []
    assert "Open again" in desk.do("open", kind="k").text
    assert len(desk.site.claim("k")) == 1


def test_a_collection_is_opened_from_the_overview(desk: Desk) -> None:
    desk.do("pause", collection="customers")
    assert "customers" in desk.site.see().text
    assert "do?act=open&collection=customers" in [unescape(link) for link in desk.site.see().links]
    desk.do("open", collection="customers")
    assert "customers" not in desk.site.see("?again=1").text


def test_settings_of_a_kind_are_reviewed_before_they_change(desk: Desk) -> None:
    for _ in range(3):
        desk.site.schedule("k", claim=True)
    form = desk.look("set-kind", kind="k")
    assert 'method="get"' in form.html
    review = desk.look("set-kind", kind="k", concurrency=2, max_attempts="null", review="true")
    assert "concurrency: default → 2" in review.text
    assert "max attempts: default → null" in review.text
    assert "3 run now: they go on, and none starts until fewer than 2 do" in review.text
    assert desk.site.server.call("GET", "/v1/kinds/k").status == 404
    assert "Changed" in seen(desk.site.server.call("GET", f"/console/{desk.send(review).headers['location']}")).text
    assert desk.site.server.get("/v1/kinds/k")["settings"] == {"concurrency": 2, "max_attempts": None}


def test_settings_that_the_form_does_not_have_stay(desk: Desk) -> None:
    retry = {"policy": "list", "waits": [1, 2]}
    desk.site.server.call("PUT", "/v1/kinds/k", {"retry": retry})
    desk.send(desk.look("set-kind", kind="k", weight=2, review="true"))
    assert desk.site.server.get("/v1/kinds/k")["settings"] == {"retry": retry, "weight": 2.0}


def test_a_form_of_settings_changes_what_its_page_says_and_nothing_else(desk: Desk) -> None:
    settings = "/v1/kinds/k"
    review = desk.look("set-kind", kind="k", concurrency=4, review="true")
    theirs = {"priority": 0, "max_attempts": 3}
    desk.site.server.call("PUT", settings, theirs)
    refused = desk.send(review)
    assert refused.status == 422
    assert "others have changed priority, max_attempts" in seen(refused).text
    assert desk.site.server.get(settings)["settings"] == theirs
    desk.site.server.call("DELETE", settings)
    assert desk.send(review).status == 303, "it has again what the page has shown"
    assert desk.send(review).status == 303, "a form that is sent twice is done once"
    assert desk.site.server.get(settings)["settings"] == {"concurrency": 4}


def test_a_form_of_settings_that_was_open_for_long_leaves_what_others_have_changed_since(desk: Desk) -> None:
    form = {"kind": "k", "review": "true", "was": '{"priority":1,"weight":2}', "priority": "1", "weight": "3"}
    desk.site.server.call("PUT", "/v1/kinds/k", {"max_attempts": 3, "weight": 2})
    review = desk.look("set-kind", **form)
    assert "weight: 2 → 3" in review.text
    assert "priority" not in review.text
    assert desk.send(review).status == 303
    assert desk.site.server.get("/v1/kinds/k")["settings"] == {"max_attempts": 3, "weight": 3.0}
    assert desk.look("set-kind", **form | {"was": "[]"}).status == 422


def test_settings_that_contradict_are_refused_with_the_reason(desk: Desk) -> None:
    page = desk.look("set-kind", kind="k", burst=5, review="true")
    assert page.status == 422
    assert "give `rate` too" in page.text


def test_dead_tasks_are_redriven_by_filter_after_a_count(desk: Desk) -> None:
    dead(desk, "a", "b", message="disk full")
    dead(desk, "c", message="other")
    page = desk.look("redrive-matching", kind="k", status="dead", error="disk")
    assert "2 tasks match" in page.text
    assert "2 tasks were redriven" in desk.do("redrive-matching", kind="k", status="dead", error="disk").text
    assert [status(desk, each) for each in "abc"] == ["enqueued", "enqueued", "dead"]


def test_ended_tasks_are_purged_by_filter_after_a_count(desk: Desk) -> None:
    dead(desk, "a", "b")
    desk.site.schedule("k", id="waits")
    assert "This cannot be undone" in desk.look("purge-matching", kind="k").text
    assert "2 tasks were purged" in desk.do("purge-matching", kind="k").text
    assert desk.site.server.call("GET", "/v1/tasks/a").status == 404
    assert status(desk, "waits") == "new"


def test_waiting_tasks_are_cancelled_by_filter_and_later_ones_are_left_alone(desk: Desk) -> None:
    desk.site.schedule("k", id="a")
    page = desk.look("cancel-matching", kind="k")
    assert "1 task matches" in page.text
    desk.site.schedule("k", id="later")
    assert desk.send(page).status == 303
    assert (status(desk, "a"), status(desk, "later")) == ("cancelled", "new")


def test_tasks_that_match_are_made_due(desk: Desk) -> None:
    desk.site.schedule("k", id="a", delay=3600)
    assert "1 tasks are due now" in desk.do("run-matching", kind="k").text
    assert len(desk.site.claim("k")) == 1


def test_an_act_on_many_tasks_goes_in_parts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"kind": "k", "id": f"t{n}"} for n in range(450)]
    desk.site.server.post("/v1/tasks", {"tasks": tasks})
    page = desk.look("cancel-matching", kind="k")
    monkeypatch.setattr(bulk_acts, "_LONGEST", 0.0)
    part = seen(desk.send(page))
    assert part.status == 200
    assert "200 so far; there are more" in part.text
    monkeypatch.undo()
    answer = desk.send(part)
    assert answer.headers["location"].endswith("done=many-cancelled&n=450")
    assert status(desk, "t449") == "cancelled"


def test_an_act_on_the_tasks_with_a_tag_keeps_to_them_in_all_its_parts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"kind": "k", "id": f"t{n}", "tags": ["old"] if n % 2 else []} for n in range(600)]
    desk.site.server.post("/v1/tasks", {"tasks": tasks})
    page = desk.look("cancel-matching", tag="old")
    assert "300 tasks match" in page.text
    monkeypatch.setattr(bulk_acts, "_LONGEST", 0.0)
    part = seen(desk.send(page))
    monkeypatch.undo()
    location = desk.send(part).headers["location"]
    assert location == "tasks?tag=old&done=many-cancelled&n=300"
    assert [status(desk, each) for each in ("t599", "t598")] == ["cancelled", "new"]


def test_a_count_that_takes_too_long_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"kind": "k", "id": f"t{n}", "collection": "c"} for n in range(3)]
    desk.site.server.post("/v1/tasks", {"tasks": tasks})
    monkeypatch.setattr(bulk_acts, "_LONGEST", -1.0)
    assert "0 or more tasks match" in desk.look("cancel-matching", kind="k", collection="c").text


def test_the_tasks_of_a_kind_or_a_status_are_counted_however_many_they_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.site.server.post("/v1/tasks", {"tasks": [{"kind": "k"}] * 3 + [{"kind": "named:k", "id": "named:k"}]})
    dead(desk, "a", "b", kind="other")
    desk.site.schedule("k", claim=True)
    monkeypatch.setattr(bulk_acts, "_LONGEST", -1.0)  # seconds for a count
    monkeypatch.setattr("leasekit.server.roles.bulk._COUNTED", 1)  # tasks of one step
    counts = {
        ("cancel-matching", "kind", "k"): "4 tasks match.",
        ("cancel-matching", "kind", "named:k"): "0 tasks match.",
        ("cancel-matching", "status", "claimed"): "1 task matches.",
        ("run-matching", "kind", "k"): "3 tasks match.",
        ("run-matching", "status", "claimed"): "0 or more tasks match.",
        ("redrive-matching", "kind", "other"): "2 tasks match.",
        ("purge-matching", "status", "dead"): "2 tasks match.",
        ("purge-matching", "kind", "other"): "2 tasks match.",
    }
    for (act, name, value), told in counts.items():
        assert told in desk.look(act, **{name: value}).text, (act, name, value)
    monkeypatch.undo()
    assert "name one of" in desk.look("purge-matching", status="new").text
    assert "has ended" in desk.look("cancel-matching", status="dead").text


def test_an_act_on_many_tasks_needs_a_filter(desk: Desk) -> None:
    page = desk.look("purge-matching")
    assert page.status == 422
    assert "needs a filter" in page.text


def test_a_chain_is_cancelled(desk: Desk) -> None:
    desk.site.schedule("k", id="root")
    desk.site.schedule("k", id="next", after=["root"])
    assert "2 of its tasks have not ended" in desk.look("cancel-chain", id="next").text
    assert "2 tasks were cancelled" in desk.do("cancel-chain", id="next").text
    assert status(desk, "next") == "cancelled"


def test_the_audit_log_counts_all_tasks_of_a_chain_that_was_cancelled_in_steps(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "STEP", 2)
    desk.site.schedule("k", id="first")
    for number in range(4):
        desk.site.schedule("k", id=f"next-{number}", parent="first")
    assert "5 tasks were cancelled" in desk.do("cancel-chain", id="first").text
    entries = desk.site.server.get("/v1/audit")["entries"]
    assert {(entry["act"], entry["target"]) for entry in entries} == {("chain.cancel", "first")}
    assert sum(entry["count"] for entry in entries) == 5


def test_a_periodic_task_is_paused_resumed_and_triggered_once(desk: Desk) -> None:
    desk.site.server.call("PUT", "/v1/periodic/hourly", {"kind": "k", "every": 3600})
    assert "paused" in desk.do("pause-periodic", name="hourly").text
    assert "It is paused, and stays so" in desk.look("trigger-periodic", name="hourly").text
    page = desk.look("trigger-periodic", name="hourly")
    assert desk.send(page).headers["location"] == desk.send(page).headers["location"]
    assert len(desk.site.server.get("/v1/tasks?kind=k")["tasks"]) == 1
    desk.do("resume-periodic", name="hourly")
    assert not desk.site.server.get("/v1/periodic/hourly").get("is_paused", False)


def test_a_worker_is_drained_after_a_page_that_says_what_it_holds_and_taken_back(desk: Desk) -> None:
    desk.site.schedule("k", id="t", claim=True)
    page = desk.look("drain", name="w")
    assert "It holds 1 task: those that run go on to their ends" in page.text
    page = desk.do("drain", name="w")
    assert "It drains: it finishes what it holds, and stops." in page.text
    assert '<span class="badge warn">draining</span>' in page.html
    assert desk.site.server.get("/v1/workers")["workers"][0]["draining_since"]
    page = desk.do("undrain", name="w")
    assert "Its drain is taken back." in page.text
    assert "draining" not in page.html
    entries = desk.site.server.get("/v1/audit")["entries"]
    assert [(entry["act"], entry["target"]) for entry in entries] == [("worker.undrain", "w"), ("worker.drain", "w")]
    assert desk.site.server.call("GET", "/console/do?act=drain&name=typo").status == 404


@pytest.mark.parametrize("origin", ["", "http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_form_of_another_origin_or_of_none_is_refused(desk: Desk, origin: str) -> None:
    desk.site.schedule("k", id="t")
    assert desk.send(desk.look("cancel", id="t"), origin=origin).status == 403
    assert status(desk, "t") == "new"


def test_a_link_never_acts(desk: Desk) -> None:
    desk.site.schedule("k", id="t")
    for path in ("do?act=cancel&id=t", "do?act=cancel-matching&kind=k", "do?act=pause&kind=k"):
        assert desk.site.see(path).status == 200
    assert status(desk, "t") == "new"
    assert desk.site.server.get("/v1/gates")["gates"] == []


def test_json_is_no_form(desk: Desk) -> None:
    origin = f"http://127.0.0.1:{desk.site.server.port}"
    assert desk.site.server.call("POST", "/console/do", {"act": "cancel", "id": "t"}, origin=origin).status == 415


def test_a_form_is_bounded(desk: Desk) -> None:
    assert desk.send(desk.look("pause", kind="k"), reason="x" * 70_000).status == 413
    assert desk.send(desk.look("pause", kind="k"), reason="x" * 501).status == 422


def test_an_unknown_act_and_a_task_that_is_gone_say_so(desk: Desk) -> None:
    assert desk.look("explode").status == 404
    assert desk.look("cancel", id="nobody").status == 404
    desk.site.schedule("k", id="t")
    page = desk.look("cancel", id="t")
    assert desk.send(page).status == 303
    answer = desk.send(page)
    assert answer.status == 303 or "has ended by now" in seen(answer).text


def test_a_read_only_console_offers_no_act_and_does_none(tmp_path: Path) -> None:
    with run(f"sqlite:///{tmp_path}/tasks.db", console="read-only") as server:
        desk = Desk(Site(server))
        desk.site.schedule("k", id="t")
        for page in ("task?id=t", "tasks?kind=k", "kind?kind=k", "dead?kind=k", "periodic"):
            assert not [link for link in desk.site.see(page).links if link.startswith("do")], page
        assert desk.look("cancel", id="t").status == 403
        front = seen(server.call("GET", "/console/"))
        assert desk.send(front, act="cancel", id="t").status == 403
        assert status(desk, "t") == "new"


def test_a_notice_is_one_of_ours_and_no_text_from_the_address(desk: Desk) -> None:
    assert "Due now" in desk.site.see("?done=due-now").text
    assert "evil" not in desk.site.see("?done=evil").text
    assert "tasks were purged" not in desk.site.see("?done=many-purged&n=evil").text
