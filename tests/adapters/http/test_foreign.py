"""Whoever answers in the place of the server: nothing ends, nothing is lost, and the error says who that was."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

import leasekit
from harness.proxy import Proxy
from harness.proxy.foreign import FOREIGN, ForeignAnswer
from leasekit._driver.reporting.spool import Spool
from leasekit.errors import BackendError, ProtocolError, Refused, Throttled, Unavailable
from leasekit.task import Beat, NewTask, Settlement
from leasekit_http import HttpBackend
from tests.adapters.http.conftest import Meet, Stranger
from tests.sampling import slow_after

SERVE = [sys.executable, "-c", "import typer; from leasekit.cli.serve import serve; typer.run(serve)"]
TOKEN = "5d41402abc4b2a76b9719d911017c592"
CALLS: dict[str, Callable[[HttpBackend], Any]] = {
    "claim": lambda backend: backend.claim(["k"], limit=1, wait=0, claim_id="c"),
    "beat": lambda backend: backend.beat([Beat(id="a", token=TOKEN, progress=1)]),
    "settle": lambda backend: backend.settle([Settlement(id="a", token=TOKEN, outcome="success", result=1)]),
    "schedule": lambda backend: backend.schedule([NewTask(kind="k", id="a")]),
    "cancel": lambda backend: backend.cancel(["a"]),
    "get": lambda backend: backend.get("a"),
    "list_tasks": lambda backend: backend.list_tasks(),
    "stats": lambda backend: backend.stats(),
    "workers": lambda backend: backend.workers(),
}
DOCUMENT = b'{"type":"urn:leasekit:problem:%s","status":%d,"title":"No","detail":"because"}'


def problem(word: str, status: int) -> ForeignAnswer:
    return ForeignAnswer(status, "application/problem+json", DOCUMENT % (word.encode(), status))


async def error_of(meet: Meet, answer: ForeignAnswer, call: Callable[[HttpBackend], Any]) -> BackendError:
    async with meet(lambda stranger: stranger.send(answer.raw)) as backend:
        with pytest.raises(BackendError) as raised:
            await call(backend)
    return raised.value


@pytest.mark.anyio
@pytest.mark.parametrize("name", slow_after(3, CALLS))
async def test_an_answer_of_somebody_else_is_an_outage_that_is_told(meet: Meet, name: str) -> None:
    for answer in FOREIGN:
        error = await error_of(meet, answer, CALLS[name])
        assert isinstance(error, Unavailable), (answer, error)
        assert f"answered {answer.status}" in str(error)
        assert "http://127.0.0.1:" in str(error)
        assert repr(answer.body[:9].decode(errors="replace"))[1:6] in str(error)


@pytest.mark.anyio
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("word", "status", "expected"),
    [
        ("refused", 400, Refused), ("refused", 413, Refused), ("refused", 422, Refused),
        ("malformed", 400, ProtocolError),  # what was sent was JSON: something on the way has broken it
        ("misdirected", 403, ProtocolError), ("misdirected", 404, ProtocolError), ("misdirected", 405, ProtocolError),
        ("misdirected", 415, ProtocolError), ("misdirected", 431, ProtocolError),
        ("later", 408, Unavailable), ("later", 429, Throttled),
        ("later", 500, Unavailable), ("later", 503, Unavailable),
        ("of-a-later-version", 422, ProtocolError),
    ],
)  # fmt: skip
async def test_only_a_refusal_of_what_the_request_holds_refuses(
    meet: Meet, name: str, word: str, status: int, expected: type[BackendError]
) -> None:
    assert type(await error_of(meet, problem(word, status), CALLS[name])) is expected


@pytest.mark.anyio
async def test_a_task_that_is_not_there_is_none_and_refuses_no_write(meet: Meet) -> None:
    unknown = problem("no-such-task", 404)
    async with meet(lambda stranger: stranger.send(unknown.raw)) as backend:
        assert await backend.get("a") is None
    assert type(await error_of(meet, unknown, CALLS["settle"])) is ProtocolError


@pytest.mark.anyio
async def test_a_value_that_was_no_json_from_the_start_is_refused(meet: Meet) -> None:
    broken = Settlement(id="a", token=TOKEN, outcome="success", result=Raw(b"{oops"))
    assert type(await error_of(meet, problem("malformed", 400), lambda backend: backend.settle([broken]))) is Refused


@pytest.mark.anyio
async def test_no_token_is_repeated_where_an_answer_echoes_the_request(meet: Meet) -> None:
    async def echo(stranger: Stranger) -> None:
        body = stranger.request.partition(b"\r\n\r\n")[2]
        text = b"<pre>" + body.replace(b'"', b"&quot;") + b"</pre> " + body
        await stranger.send(ForeignAnswer(403, "text/html", text).raw)

    async with meet(echo) as backend:
        for name in ("beat", "settle"):
            with pytest.raises(ProtocolError) as raised:
                await CALLS[name](backend)
            assert TOKEN[:8] not in str(raised.value)
            assert len(str(raised.value)) < 400


@pytest.mark.anyio
async def test_an_address_where_somebody_else_answers_is_passed_over(meet: Meet) -> None:
    async def portal(stranger: Stranger) -> None:
        await stranger.send(ForeignAnswer(200, "text/html", b"<html>Welcome to our hotel</html>").raw)

    async def ours(stranger: Stranger) -> None:
        await stranger.answer(b'{"verdicts":[{"id":"a","verdict":"settled"}]}')

    async with meet(portal) as first, meet(ours) as second:
        both = HttpBackend(first.url, second.url, worker="w")
        assert [verdict.verdict for verdict in await CALLS["settle"](both)] == ["settled"]
        await both.aclose()


# From end to end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store: Path = tmp_path_factory.mktemp("server") / "tasks.db"
    with subprocess.Popen(
        [*SERVE, "--port", "0", "--store", f"sqlite:///{store}"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.mark.parametrize("path", slow_after(3, ["*", "/v1/results", "/v1/heartbeats", "/v1/claims", "/v1/tasks"]))
def test_work_ends_with_its_real_result_whoever_answers_meanwhile(
    server: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = f"foreign-{path.rpartition('/')[2].replace('*', 'any')}"
    with Proxy(server) as proxy, leasekit.connect(proxy.url) as client, caplog.at_level(logging.INFO):
        for _ in range(4):
            proxy.foreign("*" if path == "*" else "POST", path, times=3)
            scheduled = client.schedule(kind)
            task = next(iter(client.tasks(kind)))
            with leasekit.lease(task) as held:
                held.progress({"page": 1})
                held.complete({"pages": 12})
            proxy.mend()
            info = client.get(scheduled.id)
            assert info is not None
            assert (info.status, info.result, info.error, info.attempt) == ("success", {"pages": 12}, None, 1)
        assert proxy.fired["foreign"] >= 1


def test_a_result_from_the_spool_outlives_whoever_answers_meanwhile(server: str, tmp_path: Path) -> None:
    with Proxy(server) as proxy, leasekit.connect(proxy.url) as client:
        task_id = client.schedule("foreign-spool").id
        connection = client.__connection__()
        (task,) = connection.run(
            connection.backend.claim(["foreign-spool"], limit=1, wait=10, claim_id="foreign-spool")
        ).tasks
        before = Spool(tmp_path, proxy.url)
        before.keep([Settlement(id=task.id, token=task.token, outcome="success", result={"pages": 12})])
        before.close()
        proxy.foreign("POST", "/v1/results", times=4)
        connection.run(connection.keeper.outbox.use(Spool(tmp_path, proxy.url)))
        (info,) = client.wait_tasks(task_id, timeout=60)
        assert (info.status, info.result) == ("success", {"pages": 12})
        assert proxy.fired["foreign"] == 4
