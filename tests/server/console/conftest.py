"""A server with a console, and tasks in every state."""

import uuid
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.browser import Page, running
from tests.server.http.conftest import Answer, Running, run

HOSTILE = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>{{7*7}}javascript:alert(3)"
"""A value that must be shown as text."""
HOSTILE_NAME = "<img src=x onerror=alert(1)>\"'&<script>alert(2){{7*7}}javascript:alert(3)"
"""A name of a task, kind, worker or collection that must be shown as text."""


class Seen(NamedTuple):
    """A page, as it was answered."""

    status: int
    headers: dict[str, str]
    html: str
    text: str
    tags: set[str]
    links: list[str]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "action"}]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


class Site:
    """The console of a running server."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}/console/"

    def see(self, page: str = "", **headers: str) -> Seen:
        """Ask for a page."""
        answer: Answer = self.server.call("GET", f"/console/{page}", **headers)
        return seen(answer)

    def schedule(self, kind: str, *, claim: bool = False, **options: Any) -> str:
        """Schedule a task; with `claim`, have a worker `w` hold it."""
        task = {"kind": kind, **options}
        made = self.server.post("/v1/tasks", {"tasks": [task]})["tasks"][0]["id"]
        if claim:
            self.claim(kind)
        return str(made)

    def claim(self, kind: str, *, worker: str = "w", limit: int = 1) -> list[Any]:
        """Have a worker claim tasks."""
        body = {"worker": worker, "kinds": [kind], "limit": limit, "claim_id": uuid.uuid4().hex}
        return list(self.server.post("/v1/claims", body)["tasks"])

    def settle(self, task: Any, outcome: str, *, worker: str = "w", **more: Any) -> None:
        """End a run."""
        result = {"id": task["id"], "token": task["token"], "outcome": outcome, **more}
        answer = self.server.post("/v1/results", {"worker": worker, "results": [result]})
        assert answer["verdicts"][0]["verdict"] == "settled", answer


def seen(answer: Answer) -> Seen:
    """Read a page."""
    html = answer.raw.decode()
    reader = _Reader()
    reader.feed(html)
    assert "style" not in reader.tags | reader.attributes, "inline styles are refused by the policy"
    assert not any(name.startswith("on") for name in reader.attributes), reader.attributes
    text = " ".join(" ".join(reader.text).split())
    return Seen(answer.status, answer.headers, html, text, reader.tags, reader.links)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The console of a server of this module's own."""
    with run(f"sqlite:///{tmp_path_factory.mktemp('console')}/tasks.db", console="on") as server:
        yield Site(server)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Page]]:
    """Open tabs of a browser of this module's own."""
    with running(Path(tmp_path_factory.mktemp("browser"))) as open_tab:
        yield open_tab
