"""The picture in README: made from a server with some hours of plausible work behind it.

`LEASEKIT_PICTURES=docs/pictures` writes it there; look at it, and commit it.
"""

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from leasekit.server.history import Counts
from leasekit.server.store import MinuteRow
from leasekit.server.tally import SECONDS
from tests.browser import Page, Size
from tests.server.console.conftest import Site
from tests.server.http.conftest import run

pytestmark = pytest.mark.slow

RATES = {
    "email": 34,
    "invoice.render": 12,
    "report.monthly": 2,
    "search.index": 55,
    "thumbnail": 90,
    "video.transcode": 3,
}
"""Kinds, and the runs that end in a minute."""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Site]:
    with run(f"sqlite:///{tmp_path}/tasks.db", console="on") as server:
        site, rng = Site(server), random.Random(7)
        now = int(time.time() // 60)
        rows = [
            MinuteRow(at, kind, "node", msgspec.json.encode(minute(rng, at, now, kind)))
            for at in range(now - 240, now)
            for kind in RATES
        ]
        asyncio.run_coroutine_threadsafe(server.engine._write_minutes(rows), server.loop).result(30)
        for kind, rate in RATES.items():
            server.post("/v1/tasks", {"tasks": [{"kind": kind, "payload": {"n": n}} for n in range(rate)]})
            later = [{"kind": kind, "delay": 600} for _ in range(rate // 2)]
            server.post("/v1/tasks", {"tasks": later})
            for worker in ("worker-1:4121", "worker-2:4122"):
                site.claim(kind, worker=worker, limit=max(1, rate // 12))
        for _ in range(3):
            (task,) = site.claim("invoice.render", worker="worker-1:4121")
            site.settle(task, "fatal", worker="worker-1:4121", error={"type": "ValueError", "message": "no address"})
        for task in site.claim("thumbnail", worker="worker-2:4122", limit=40):
            site.settle(task, "success", worker="worker-2:4122")
        server.call("PUT", "/v1/gates/kinds/report.monthly", {"reason": "the warehouse moves"})
        yield site


def minute(rng: random.Random, at: int, now: int, kind: str) -> Counts:
    is_outage = kind == "search.index" and 21 <= now - at <= 26
    ended = round(RATES[kind] * (0.75 + 0.25 * ((at // 7) % 3)) * rng.uniform(0.7, 1.2))
    failed = round(ended * 0.7) if is_outage else sum(rng.random() < 0.02 for _ in range(ended))
    starts = [0] * (len(SECONDS) + 1)
    starts[0], starts[1], starts[2] = round(ended * 0.8), round(ended * 0.17), ended // 30
    return Counts(ended, ended - failed, failed, 1 if is_outage else 0, 0, starts, starts)


def test_the_picture_of_the_readme(shop: Site, tab: Callable[..., Page], tmp_path: Path) -> None:
    page = tab(Size(1160, 640))
    page.open(shop.url)
    page.until("document.getElementById('link').dataset.state == 'live'")
    path = page.picture(tmp_path / "console.png")
    assert path.stat().st_size > 20_000
    assert page.problems == []
    if folder := os.environ.get("LEASEKIT_PICTURES"):
        shutil.copy(path, Path(folder) / "console.png")
