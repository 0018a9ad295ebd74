"""Listings in pages: the client asks for all of them, and no server makes it ask for ever."""

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from leasekit.errors import ProtocolError
from leasekit_http import backend
from tests.adapters.http.conftest import Meet, Stranger

pytestmark = pytest.mark.anyio

KINDS: dict[str, Any] = {name: {"new": 1} for name in ("a", "b & c", "ü")}
WORKERS = [{"name": name, "last_seen": None, "running": 1} for name in KINDS]


async def one_by_one(stranger: Stranger) -> None:
    """Answer a page of one item."""
    target = urlsplit(stranger.request.split(b" ")[1].decode())
    names = list(KINDS)
    (after,) = parse_qs(target.query).get("cursor", [None])
    n = 0 if after is None else names.index(after) + 1
    cursor = names[n] if n + 1 < len(names) else None
    page = {"kinds": {names[n]: KINDS[names[n]]}, "workers": WORKERS[n : n + 1], "cursor": cursor}
    await stranger.answer(json.dumps(page).encode())


async def test_stats_are_those_of_all_pages(meet: Meet) -> None:
    async with meet(one_by_one) as client:
        assert (await client.stats()).kinds == KINDS


async def test_workers_are_those_of_all_pages(meet: Meet) -> None:
    async with meet(one_by_one) as client:
        assert [worker.name for worker in await client.workers()] == list(KINDS)


async def test_a_listing_without_an_end_is_refused(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_MOST_PAGES", 3)
    async with meet(lambda stranger: stranger.answer(b'{"kinds": {}, "cursor": "again"}')) as client:
        with pytest.raises(ProtocolError, match="more than 3 pages"):
            await client.stats()
