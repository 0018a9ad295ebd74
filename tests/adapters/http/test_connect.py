"""URLs: what is an address of a server, and what is refused without being repeated."""

import pytest

import leasekit
import leasekit_http
from leasekit.backend import Scheduler
from leasekit.errors import ConfigError, Unavailable
from leasekit.registry import open_backend
from leasekit_http import HttpBackend
from tests.adapters.http.conftest import Meet, Stranger

NO_ADDRESSES = [
    "http://",
    "http:///path",
    "http://host:port",
    "http://host:99999",
    "ftp://host",
    "host:8077",
    "",
    "http://[::1",
    "http://host/?a=b",
    "http://host/#a",
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        leasekit_http.connect(url, worker="w")


@pytest.mark.parametrize("url", ["http://host?ttl=abc", "http://a,b?ttl=30", "http+unix:///run/a.sock?ttl=nan"])
def test_an_option_in_a_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="has an option, 'ttl': leave it out"):
        leasekit_http.connect(url, worker="w")


@pytest.mark.parametrize("url", ["http://user:hunter2@host", "http://hunter2@host", "https://:hunter2@host/p"])
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="host") as refused:
        leasekit_http.connect(url, worker="w")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://localhost:8077", "https://tasks.example.org/prefix"])
def test_both_schemes_are_registered(url: str) -> None:
    backend = open_backend(url, worker="w")
    assert isinstance(backend, HttpBackend)
    assert isinstance(backend, Scheduler)


PATHS = {
    "a": b"/v1/tasks/a",
    "..": b"/v1/tasks/%2E%2E",
    ".": b"/v1/tasks/%2E",
    "a b": b"/v1/tasks/a%20b",
    "a?b#c": b"/v1/tasks/a%3Fb%23c",
    "100%": b"/v1/tasks/100%25",
    "%41": b"/v1/tasks/%2541",
}


@pytest.mark.anyio
@pytest.mark.parametrize(("task_id", "path"), PATHS.items())
async def test_an_id_is_one_segment_of_the_path_whatever_is_in_it(meet: Meet, task_id: str, path: bytes) -> None:
    seen: list[bytes] = []

    async def look(stranger: Stranger) -> None:
        seen.append(stranger.request.split(b" ")[1])

    async with meet(look) as backend:
        with pytest.raises(Unavailable):
            await backend.get(task_id)
    assert seen == [path]


@pytest.mark.anyio
async def test_the_path_of_the_url_is_a_prefix(meet: Meet) -> None:
    seen: list[bytes] = []

    async def look(stranger: Stranger) -> None:
        seen.append(stranger.request.split(b" ")[1])
        await stranger.answer(b'{"kinds":{}}')

    async with meet(look) as near:
        behind_proxy = leasekit_http.connect(f"{near.url}/tasks/", worker="w")
        await behind_proxy.stats()
        await behind_proxy.aclose()
    assert seen == [b"/tasks/v1/stats"]


def test_a_client_keeps_all_addresses_of_its_url() -> None:
    with leasekit.connect("http://127.0.0.1:1,127.0.0.1:2/p/") as client:
        assert client.url == "http://127.0.0.1:1,127.0.0.1:2/p/"
