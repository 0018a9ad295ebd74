"""The frame of the console: paths, headers, files, modes, and what is refused."""

import re
from importlib import resources
from pathlib import Path

import pytest

from leasekit.server.console.pages import PAGES
from tests.server.console.conftest import Site, seen
from tests.server.http.conftest import run

STATIC = Path(str(resources.files("leasekit.server.console") / "static"))
QUERIES = {"task": "?id=there-is-one", "kind": "?kind=k", "find": "?q=no-such-thing"}


@pytest.fixture(scope="module")
def visited(site: Site) -> Site:
    site.schedule("k", id="there-is-one")
    return site


@pytest.mark.parametrize("name", PAGES)
def test_each_page_is_there_with_a_strict_policy(visited: Site, name: str) -> None:
    page = visited.see(name + QUERIES.get(name, ""))
    assert page.status == 200, page.text
    policy = page.headers["content-security-policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("name", PAGES)
def test_each_page_has_a_title_a_main_part_and_labels(visited: Site, name: str) -> None:
    html = visited.see(name + QUERIES.get(name, "")).html
    assert re.search(r"<title>\S.* · leasekit</title>", html)
    assert html.count("<h1") == 1
    assert html.count("<main") == 1


@pytest.mark.parametrize("name", PAGES)
def test_all_links_are_relative_so_that_the_console_can_be_mounted_anywhere(visited: Site, name: str) -> None:
    for link in visited.see(name + QUERIES.get(name, "")).links:
        assert not link.startswith(("/", "http", "//")), link


def test_the_path_without_a_slash_leads_to_the_console(site: Site) -> None:
    answer = site.server.call("GET", "/console")
    assert (answer.status, answer.headers["location"]) == (308, "console/")


@pytest.mark.parametrize("name", [path.name for path in sorted(STATIC.iterdir())])
def test_each_file_is_served_and_kept_by_the_browser_while_it_is_the_same(site: Site, name: str) -> None:
    first = site.see(name)
    assert first.status == 200
    again = site.server.call("GET", f"/console/{name}", if_none_match=first.headers["etag"])
    assert (again.status, again.raw) == (304, b"")


def test_all_that_a_page_loads_is_less_than_150_kb(visited: Site) -> None:
    files = sum(path.stat().st_size for path in STATIC.iterdir())
    assert files + len(visited.see("").html) < 150_000


def test_scripts_never_write_html(site: Site) -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for word in ("innerHTML =", "insertAdjacentHTML", "document.write", "eval(", "outerHTML ="):
            assert word not in text, (path.name, word)


def test_an_unknown_page_and_an_unknown_task_say_so(site: Site) -> None:
    assert site.see("nothing").status == 404
    page = site.see("task?id=nobody")
    assert page.status == 404
    assert "there is no task 'nobody'" in page.text


def test_a_parameter_that_does_not_fit_is_refused_in_the_page(site: Site) -> None:
    page = site.see("tasks?min_attempts=many")
    assert page.status == 200
    assert "min_attempts" in page.text
    assert site.see("task?id=1&id=2").status == 422
    assert site.see("task").status == 422


def test_tasks_are_filtered_by_a_tag_which_the_page_of_a_task_links(site: Site) -> None:
    site.schedule("tagged", id="with", tags=["night run, 2", "<img src=x onerror=alert(1)>"])
    site.schedule("tagged", id="without")
    page = site.see("tasks?kind=tagged&tag=night+run%2C+2")
    assert ("task?id=with" in page.links, "task?id=without" in page.links) == (True, False)
    assert "tasks?tag=night+run%2C+2" in site.see("task?id=with").links
    assert "tag" in site.see(f"tasks?tag={'x' * 65}").text


def test_the_page_of_a_task_has_the_labels_that_it_requires_and_prefers(site: Site) -> None:
    site.schedule("copy", id="labelled", requires={"gpu": "t4"}, prefers={"zone": "eu"}, prefer_for=90)
    text = " ".join(site.see("task?id=labelled").text.split())
    assert "Requires gpu=t4" in text
    assert re.search(r"Prefers zone=eu ?for 1 ?m", text)


def test_a_page_is_only_looked_at(site: Site) -> None:
    assert site.server.call("POST", "/console/tasks", {}).status == 405


def test_a_foreign_host_or_origin_is_refused(site: Site) -> None:
    assert site.see("", host="evil.example").status == 403
    assert site.see("", origin="http://evil.example").status == 403


def test_the_console_can_be_off(tmp_path: Path) -> None:
    with run(f"sqlite:///{tmp_path}/tasks.db") as server:
        assert server.call("GET", "/console/").status == 404
        assert server.call("GET", "/console").status == 404


def test_an_error_of_a_page_is_logged_and_answered_without_details(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(site.server.engine.fleet, "nodes", broken)
    page = seen(site.server.call("GET", "/console/workers?fresh=1"))
    assert page.status == 500
    assert "secret detail" not in page.html
    assert "secret detail" in caplog.text


def test_many_readers_of_a_page_cost_one_look(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    nodes = site.server.engine.fleet.nodes

    async def counted() -> object:
        nonlocal looks
        looks += 1
        return await nodes()

    monkeypatch.setattr(site.server.engine.fleet, "nodes", counted)
    for _ in range(20):
        assert site.see("workers?").status == 200
    assert looks < 5


def test_a_status_that_no_task_has_is_not_searched_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.schedule("waiting-only")

    async def searched(**wanted: object) -> None:
        raise AssertionError(wanted)

    monkeypatch.setattr(site.server.engine.queries, "list_tasks", searched)
    assert "No task matches" in site.see("tasks?kind=waiting-only&status=dead").text
