"""The console in a real browser: what people do, and what must not happen to them."""

import contextlib
import importlib.util
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from leasekit.server.console import streams
from leasekit.server.unit_of_work import TaskEvent
from tests.browser import DESKTOP, PHONE, Page
from tests.ports import free_port
from tests.server.console.conftest import HOSTILE, HOSTILE_NAME, Site
from tests.server.http.conftest import run
from tests.server.http.test_http_process import SERVE

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"claim_timeout": 2, "heartbeat_timeout": 2}


@pytest.fixture(scope="module")
def busy(site: Site) -> Site:
    """A server with tasks in every state, and hostile names in all of them."""
    site.schedule("email", id="waits", payload={"to": "a@example.com"})
    site.schedule("email", id="later", delay=3600)
    site.schedule("email", id="runs", claim=True, payload=[1, 2])
    site.schedule("report", id="done")
    site.settle(site.claim("report")[0], "success", result={"rows": 12})
    site.schedule("report", id="next", after=["done"])
    site.schedule("report", id="dead", max_attempts=1)
    site.claim("report")
    (task,) = [each for each in site.claim("report") if each["id"] == "dead"] or [None]
    if task is not None:
        site.settle(task, "retry", error={"type": "ValueError", "message": "no rows", "traceback": "File x\n  y"})
    site.server.call("PUT", "/v1/periodic/hourly", {"kind": "email", "every": 3600})
    site.server.call("PUT", "/v1/kinds/email", {"concurrency": 5, "retry": {"policy": "list", "waits": [1, 60]}})
    site.server.call("PUT", "/v1/gates/collections/customers", {"reason": "moving house"})
    return site


PAGES = {
    "overview": "", "tasks": "tasks", "task": "task?id=runs", "dead task": "task?id=dead", "chain": "task?id=next",
    "kind": "kind?kind=email",
    "flows": "flows", "audit": "audit", "login": "login", "dead": "dead", "workers": "workers", "periodic": "periodic",
    "live": "live",
    "nothing found": "find?q=x", "refusal": "task?id=nobody", "cancel": "do?act=cancel&id=waits",
    "pause": "do?act=pause&kind=email", "settings": "do?act=set-kind&kind=email",
    "purge": "do?act=purge-matching&kind=report",
}  # fmt: skip


# What people do --------------------------------------------------------------------------------------------------


def test_the_tasks_of_a_worker_that_dies_move_while_one_looks(site: Site, tab: Callable[..., Page]) -> None:
    site.schedule("video", id="lost", **SHORT)
    site.claim("video", worker="victim")
    page = tab()
    page.open(site.url + "task?id=lost")
    assert "claimed" in page.text
    page.until("document.body.innerText.includes('nothing was heard from worker')")  # its lease has expired
    assert "enqueued" in page.text
    site.claim("video", worker="heir")
    page.until("document.body.innerText.includes('heir')")
    assert page.problems == []


def test_a_kind_is_paused_and_resumed_by_clicks(site: Site, tab: Callable[..., Page]) -> None:
    site.schedule("thumbnail")
    page = tab()
    page.open(site.url + "kind?kind=thumbnail")
    page.click_text("Pause…")
    page.until("document.body.innerText.includes('1 wait, 1 of them due')")
    page.run("document.querySelector('[name=reason]').value = 'the disk is full'")
    page.click("form.form button")
    page.until("document.body.innerText.includes('the disk is full')")
    assert site.claim("thumbnail") == []
    page.click_text("Resume…")
    page.until("document.querySelector('form.form button')?.textContent == 'Resume'")
    page.click("form.form button")
    page.until("document.body.innerText.includes('Open again')")
    assert len(site.claim("thumbnail")) == 1
    assert page.problems == []


def test_dead_tasks_are_filtered_counted_and_redriven_by_clicks(site: Site, tab: Callable[..., Page]) -> None:
    for name, message in (("d1", "disk full"), ("d2", "disk full"), ("d3", "other")):
        site.schedule("upload", id=name, max_attempts=1)
        site.settle(site.claim("upload")[0], "retry", error={"type": "E", "message": message})
    page = tab()
    page.open(site.url + "dead")
    page.run("document.querySelector('[name=kind]').value = 'upload'")
    page.run("document.querySelector('[name=error]').value = 'disk'")
    page.click_text("Filter")
    page.until("location.search.includes('disk') && document.querySelectorAll('#found tbody tr').length == 2")
    page.click_text("Redrive…")
    page.click_text("Redrive 2 tasks")
    page.until("document.body.innerText.includes('2 tasks were redriven')")
    assert {site.server.get(f"/v1/tasks/{each}")["status"] for each in ("d1", "d2")} == {"enqueued"}
    assert site.server.get("/v1/tasks/d3")["status"] == "dead"


def test_an_act_on_many_tasks_goes_on_by_itself(
    site: Site, tab: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.server.post("/v1/tasks", {"tasks": [{"kind": "many"}] * 500})
    page = tab()
    page.open(site.url + "do?act=cancel-matching&kind=many")
    monkeypatch.setattr("leasekit.server.console.bulk_acts._LONGEST", 0.0)
    page.click("form.form button")
    page.until("document.body.innerText.includes('500 tasks were cancelled')")


def test_a_search_that_has_found_nothing_yet_goes_on_by_itself(
    site: Site, tab: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.schedule("searched", id="oldest", key="needle")
    for _ in range(3):
        site.server.post("/v1/tasks", {"tasks": [{"kind": "searched", "key": "hay"}] * 1000})
    monkeypatch.setattr("leasekit.server.console.pages._PATIENCE", 0.0)  # each page looks at some hundred tasks
    page = tab()
    page.open(site.url + "tasks?kind=searched&key=needle")
    page.until("document.querySelector('#found a[href*=oldest]') !== null")
    assert "cursor=" in page.run("location.search")


def test_a_lost_server_is_told_and_the_page_goes_on_when_it_is_back(tab: Callable[..., Page], tmp_path: Path) -> None:
    port = free_port()

    @contextlib.contextmanager
    def serving() -> Iterator[None]:
        command = [*SERVE, "--port", str(port), "--store", f"sqlite:///{tmp_path}/tasks.db"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            try:
                yield
            finally:
                process.send_signal(signal.SIGTERM)

    page = tab()
    with serving():
        page.open(f"http://127.0.0.1:{port}/console/")
        page.until("document.getElementById('link').dataset.state == 'live'")
    page.until("document.getElementById('link').dataset.state == 'lost'")
    with serving():
        page.until("document.getElementById('link').dataset.state == 'live'")


def test_the_keyboard_reaches_everything(busy: Site, tab: Callable[..., Page]) -> None:
    page = tab()
    page.open(busy.url)
    page.until("document.getElementById('help-button').hidden === false")
    page.press("?")
    page.until("document.getElementById('help').open")
    page.run("document.getElementById('help').close()")
    page.press("ArrowDown")
    first = page.run("document.activeElement.textContent")
    page.press("ArrowDown")
    assert page.run("document.activeElement.textContent") != first
    page.press("ArrowUp")
    assert page.run("document.activeElement.textContent") == first
    page.press("/")
    page.until("document.activeElement.name == 'q'")
    page.run("document.activeElement.value = 'runs'; document.activeElement.form.requestSubmit()")
    page.until("location.pathname.endsWith('/task') && document.getElementById('help-button')?.hidden === false")
    page.press("g")
    page.press("t")
    page.until("location.pathname.endsWith('/tasks')")


def test_what_is_open_stays_open_while_the_page_is_kept_fresh(site: Site, tab: Callable[..., Page]) -> None:
    site.schedule("k", id="open", payload={"a": 1})
    page = tab()
    page.open(site.url + "task?id=open")
    page.run("document.querySelector('details').open = false")
    site.claim("k")
    page.until("document.body.innerText.includes('claimed')")
    assert page.run("document.querySelector('details').open") is False


def test_a_page_works_without_scripts(busy: Site, tab: Callable[..., Page]) -> None:
    page = tab()
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    page.open(busy.url + "tasks")
    page.send("Emulation.setScriptExecutionDisabled", value=False)
    assert page.run("document.querySelectorAll('#found tbody tr').length") > 0


# What must not happen --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server in which every name and value is hostile."""
    with run(f"sqlite:///{tmp_path_factory.mktemp('attacked')}/tasks.db", console="on") as server:
        site = Site(server)
        kind = name = HOSTILE_NAME
        more: dict[str, Any] = {"payload": {HOSTILE: HOSTILE}, "collection": name, "key": name}
        site.schedule(kind, id="runs" + name, **more)
        site.claim(kind, worker=name)
        site.schedule(kind, id="dead" + name, max_attempts=1, **more)
        for task in site.claim(kind, worker=name, limit=5):
            error = {"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE}
            beat = {"id": task["id"], "token": task["token"], "progress": HOSTILE, "started": True}
            server.post("/v1/heartbeats", {"worker": name, "beats": [beat]})
            site.settle(task, "fatal", worker=name, error=error)
        site.schedule(kind, id="waits" + name, **more)
        site.schedule(kind, id="chained" + name, parent="dead" + name, **more)
        server.call("PUT", "/v1/periodic/p", {"kind": kind, "every": 3600, "payload": HOSTILE})
        yield site


def test_nothing_hostile_runs_on_any_page(attacked: Site, tab: Callable[..., Page]) -> None:
    name = quote(HOSTILE_NAME)
    for gated in ("kinds", "collections"):
        path = f"/v1/gates/{gated}/{quote(HOSTILE_NAME, safe='')}?worker={name}"
        assert attacked.server.call("PUT", path, {"reason": HOSTILE}).status == 200
    page = tab()
    shown = 0
    for path in (
        "", "tasks", f"tasks?kind={name}&worker={name}&error={name}", f"task?id=runs{name}", f"task?id=dead{name}",
        f"task?id=waits{name}", f"task?id=chained{name}", f"kind?kind={name}", "dead", "workers", "periodic",
        f"live?kind={name}", f"find?q={name}", f"do?act=cancel&id=waits{name}", f"do?act=pause&kind={name}",
        f"do?act=pause&collection={name}", f"do?act=purge-matching&kind={name}", f"do?act={name}",
        f"tasks?cursor={name}", f"do?act=open&collection={name}",
    ):  # fmt: skip
        page.open(attacked.url + path)
        page.run("window.alert = () => { window.hit = true }")
        assert page.run("!window.hit && !document.querySelector('img, main script, main iframe')"), path
        assert not page.run("[...document.links].some(a => !a.href.startsWith('http:'))"), path
        shown += "<img src=x onerror=alert(1)>" in page.run("document.body.textContent")
    assert shown >= 15, "the names are shown as text"
    breaches = [problem for problem in page.problems if "Content Security Policy" in problem]
    assert breaches == []


def test_hostile_events_are_text_on_the_live_page(attacked: Site, tab: Callable[..., Page]) -> None:
    page = tab()
    page.open(attacked.url + "live")
    page.until("document.getElementById('link').dataset.state == 'live'")
    attacked.schedule(HOSTILE_NAME, id="event" + HOSTILE_NAME)
    page.until("document.querySelectorAll('#events tbody tr').length > 0")
    assert "onerror=alert(1)" in page.text
    assert page.run("!document.querySelector('#events img, #events script')")
    assert page.problems == []


def test_eight_tabs_have_one_stream_and_none_hangs(busy: Site, tab: Callable[..., Page]) -> None:
    tabs = [tab() for _ in range(8)]
    for page in tabs:
        page.front()
        page.open(busy.url + "live")
    for page in tabs:
        page.front()
        assert page.run("fetch('tasks').then(answer => answer.status)") == 200
    states = [page.run("document.getElementById('link').dataset.state") for page in tabs]
    assert states.count("live") == 1, states
    for page in tabs:
        page.close()


def test_200_000_events_leave_no_trend_in_the_heap_of_the_page(
    busy: Site, tab: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_SAMPLE", 10_000)
    page = tab()
    page.open(busy.url + "live")
    page.until("document.getElementById('link').dataset.state == 'live'")
    at = datetime.now(UTC)
    heaps: list[int] = []
    for part in range(5):
        for step in range(5):
            events = [
                TaskEvent(event="scheduled", at=at, id=f"t{part}-{step}-{n}", kind="k", worker="w") for n in range(8000)
            ]
            busy.server.loop.call_soon_threadsafe(busy.server.engine.feed.hear, events)
            want = (part * 5 + step + 1) * 8000
            page.until(f"parseInt(document.getElementById('event-count').value.replaceAll(',', '')) >= {want}")
        heaps.append(page.heap())
    assert page.run("document.querySelectorAll('#events tbody tr').length") == 300
    assert heaps[-1] < heaps[1] * 1.2 + 500_000, heaps


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_rules_of_accessibility_find_nothing_serious(busy: Site, tab: Callable[..., Page], dark: bool) -> None:
    found = importlib.util.find_spec("axe_core_python")
    assert found is not None
    assert found.origin is not None
    axe = Path(found.origin).with_name("axe.min.js").read_text()
    page = tab(dark=dark)
    faults: dict[str, Any] = {}
    for name, path in PAGES.items():
        page.open(busy.url + path)
        page.run(axe + ";true")
        answer = page.run("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (each["id"], [node["html"][:150] for node in each["nodes"]][:3])
            for each in answer["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        if serious:
            faults[name] = serious
    assert faults == {}
    page.close()


def test_pictures_of_each_page_fit_every_screen(busy: Site, tab: Callable[..., Page], tmp_path: Path) -> None:
    for size, of_size in ((DESKTOP, "desktop"), (PHONE, "phone")):
        for dark in (False, True):
            page = tab(size, dark=dark)
            for name, path in PAGES.items():
                page.open(busy.url + path)
                wide = page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wide <= 0, (name, of_size, wide)
                page.picture(tmp_path / f"{name} {of_size} {'dark' if dark else 'light'}.png")
            assert [problem for problem in page.problems if "404" not in problem] == []
            page.close()
    assert len(list(tmp_path.iterdir())) == 4 * len(PAGES)


def test_nothing_moves_while_a_page_is_kept_fresh(busy: Site, tab: Callable[..., Page]) -> None:
    page = tab()
    page.open(busy.url)
    page.run(
        "window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(e => window.moved += e.value))"
        ".observe({type: 'layout-shift', buffered: true}); true"
    )
    before = page.run("document.getElementById('kinds').innerText")
    for _ in range(3):
        busy.schedule("email")
    page.until(f"document.getElementById('kinds').innerText != {before!r}".replace("\\t", "\\t"))
    assert page.run("window.moved") < 0.02


def test_a_page_is_there_within_a_moment(busy: Site) -> None:
    busy.see("")
    times: list[float] = []
    for n in range(5):
        begun = time.perf_counter()
        assert busy.see(f"?n={n}").status == 200
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.1, times
