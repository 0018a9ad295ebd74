"""An answer counts for the request that it answers: one that a middlebox delivers again is not that of the next."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.proxy import Proxy
from leasekit.errors import ProtocolError, Refused
from leasekit.task import Beat, NewTask, Settlement, Stats
from leasekit_http import HttpBackend
from tests.adapters.http.conftest import Meet, Stranger

pytestmark = pytest.mark.anyio


SERVE = "from leasekit.server.http.process import serve; serve('127.0.0.1', 0, 'memory:')"
STATS = b'{"kinds":{}}'
OF_ANOTHER = "another request"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition("//")[2].strip()
            assert address, "the server did not start"
            yield f"http://{address}"
        finally:
            process.kill()


async def test_a_repeated_answer_does_not_acknowledge_a_beat_that_never_arrived(server: str) -> None:
    async with Proxy(server) as proxy:
        backend = HttpBackend(proxy.url, worker="w")
        await backend.schedule([NewTask(kind="repeated", id="repeated")])
        (task,) = (await backend.claim(["repeated"], limit=1, wait=0, claim_id="c")).tasks
        beats = [Beat(id=task.id, token=task.token)]

        proxy.repeat_answer("POST", "/v1/heartbeats", repeats=5)
        assert [verdict.verdict for verdict in await backend.beat(beats)] == ["renewed"]
        proxy.hang("requests")
        with pytest.raises(ProtocolError, match=OF_ANOTHER) as refused:
            await backend.beat(beats)
        assert "it may be repeated" in str(refused.value)
        assert task.token not in str(refused.value)

        proxy.mend()
        for _ in range(3):  # the stale bytes went with their connection
            assert [verdict.verdict for verdict in await backend.beat(beats)] == ["renewed"]
        settled = await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])
        assert [verdict.verdict for verdict in settled] == ["settled"]
        assert proxy.fired["repeat_answer"] == 1
        await backend.aclose()


async def test_a_repeated_refusal_does_not_refuse_the_next_request(server: str) -> None:
    async with Proxy(server) as proxy:
        backend = HttpBackend(proxy.url, worker="w")
        proxy.repeat_answer("POST", "/v1/tasks")
        with pytest.raises(Refused):
            await backend.schedule([NewTask(kind="not/a kind")])
        with pytest.raises(ProtocolError, match=OF_ANOTHER):
            await backend.schedule([NewTask(kind="refused")])
        assert [one.created for one in await backend.schedule([NewTask(kind="refused")])] == [True]
        await backend.aclose()


def request_of(stranger: Stranger) -> str:
    """What the client calls its request."""
    (value,) = [
        line.partition(":")[2].strip()
        for line in stranger.request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
        if line.lower().startswith("leasekit-request:")
    ]
    return str(value)


async def test_every_try_has_a_value_of_its_own(meet: Meet) -> None:
    seen: list[str] = []

    async def look(stranger: Stranger) -> None:
        seen.append(request_of(stranger))
        await stranger.answer(STATS, headers=f"Leasekit-Request: {seen[-1]}\r\n")

    async with meet(look) as backend, meet(look) as other:
        for _ in range(3):
            assert await backend.stats() == Stats(kinds={})
            assert await other.stats() == Stats(kinds={})
            await backend.aclose()  # opened again
    assert len(set(seen)) == 6
    assert all(value.isascii() and value.isprintable() and len(value) <= 64 for value in seen)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "429 Later", "503 Busy", "204 No Content"])
@pytest.mark.parametrize("value", ["other", "", "{0}x", "{0}, {0}", "\xff"])
async def test_whatever_the_answer_to_another_request_says_is_an_outage(meet: Meet, status: str, value: str) -> None:
    async def confuse(stranger: Stranger) -> None:
        header = f"leasekit-request: {value.format(request_of(stranger))}\r\n"
        await stranger.answer(b"" if status.startswith("204") else STATS, status=status, headers=header)

    async with meet(confuse) as backend:
        with pytest.raises(ProtocolError, match=OF_ANOTHER):
            await backend.stats()


async def test_an_answer_that_names_no_request_is_judged_by_what_it_says(meet: Meet) -> None:
    async def answer(stranger: Stranger) -> None:
        await stranger.answer(STATS)

    async with meet(answer) as backend:
        assert await backend.stats() == Stats(kinds={})


async def test_a_worker_is_drained_only_by_an_answer_that_names_its_claim(meet: Meet) -> None:
    headers = ["", "leasekit-request: {0}\r\n"]

    async def answer(stranger: Stranger) -> None:
        named = headers.pop(0).format(request_of(stranger))
        await stranger.answer(b'{"waited":0.0,"tasks":[],"draining":true}', headers=named)

    async with meet(answer) as backend:
        with pytest.raises(ProtocolError, match="has no leasekit-request header"):
            await backend.claim(["k"], limit=1, wait=0, claim_id="c")
        assert (await backend.claim(["k"], limit=1, wait=0, claim_id="c")).draining
