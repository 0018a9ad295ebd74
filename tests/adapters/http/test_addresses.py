"""Several addresses of one service: what one leaves unanswered, another is asked."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext

import anyio
import pytest

import leasekit
from harness.proxy.foreign import ForeignAnswer
from leasekit.errors import ConfigError, Refused, Throttled, Unavailable
from leasekit.task import Beat, NewTask, Settlement
from leasekit_http import HttpBackend, connect
from leasekit_http.addresses import addresses
from leasekit_http.transport import _Stores
from tests.adapters.http.conftest import Meet, Stranger

SERVE = "from leasekit.server.http.process import serve; serve('127.0.0.1', 0, 'memory:')"
NEVER = 60.0  # seconds; waited out by none of these tests
STRANGER = [Beat(id="nobody", token="t")]

# What is an address


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://a", ["http://a"]),
        ("http://a:1,b:2", ["http://a:1", "http://b:2"]),
        ("https://a,b,c:3/p/", ["https://a/p", "https://b/p", "https://c:3/p"]),
        ("http://[::1]:1,[::2]:2", ["http://[::1]:1", "http://[::2]:2"]),
        ("http://a:1,a:1", ["http://a:1"]),
        ("http://a/p,q", ["http://a/p,q"]),
    ],
)
def test_addresses_are_separated_by_commas_and_share_the_rest(url: str, found: list[str]) -> None:
    assert addresses(url) == found


@pytest.mark.parametrize(
    "url",
    [
        *("http://a,", "http://,a", "http://a,,b", "http://a:1,:2", "http://a:1,b:c", "http://a,b?c=d", "http://a,b#c"),
        "http://a:1,http://b:2",
    ],
)
def test_one_bad_address_among_good_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        addresses(url)


@pytest.mark.parametrize(
    ("path", "why"),
    [("", "must have its path"), (f"/run/{'é' * 60}", r"has 125 bytes, \d+ at most: shorten it")],
)
def test_a_path_that_no_socket_can_have_is_refused(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        connect(f"http+unix://{path}", worker="w")


@pytest.mark.parametrize("url", ["http://u:hunter2@a,b", "http://a,u:hunter2@b", "http://u:hunter2,hunter2@a"])
def test_a_password_among_addresses_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="password") as refused:
        addresses(url)
    assert "hunter2" not in str(refused.value)


# Which is asked


@contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition("//")[2].strip()
            assert address, "the server did not start"
            yield process, address
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(scope="module")
def alive() -> Iterator[str]:
    """The address of a server that answers."""
    with serving() as (_, address):
        yield address


@pytest.fixture(scope="module")
def hanging() -> Iterator[str]:
    """The address of one that takes connections, and answers nothing."""
    with serving() as (process, address):
        process.send_signal(signal.SIGSTOP)
        yield address


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """An address that refuses connections, as that of a killed server does. No other process takes it meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@asynccontextmanager
async def connected(*hosts: str, timeout: float = NEVER) -> AsyncIterator[HttpBackend]:
    backend = HttpBackend(*addresses(f"http://{','.join(hosts)}"), worker="w", timeout=timeout)
    yield backend
    await backend.aclose()


async def whole_life(backend: HttpBackend, kind: str) -> None:
    await backend.schedule([NewTask(kind=kind, id=kind)])
    (task,) = (await backend.claim([kind], limit=1, wait=0, claim_id=kind)).tasks
    assert [verdict.verdict for verdict in await backend.beat([Beat(id=task.id, token=task.token)])] == ["renewed"]
    await backend.settle([Settlement(id=task.id, token=task.token, outcome="success")])


@pytest.mark.anyio
async def test_a_dead_first_address_costs_nothing_but_a_try(dead: str, alive: str) -> None:
    async with connected(dead, alive) as backend:
        await whole_life(backend, "dead-first")


@pytest.mark.anyio
async def test_a_hanging_first_address_costs_its_time_once(hanging: str, alive: str) -> None:
    async with connected(hanging, alive, timeout=1.0) as backend:
        await whole_life(backend, "hanging-first")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.schedule([NewTask(kind="first-call")]),
        lambda b: b.claim(["none"], limit=1, wait=0, claim_id="c"),
        lambda b: b.settle([Settlement(id="nobody", token="t", outcome="success")]),
        lambda b: b.cancel(["nobody"]),
        lambda b: b.get("nobody"),
        lambda b: b.list_tasks(),
        lambda b: b.stats(),
        lambda b: b.workers(),
    ],
    ids=["schedule", "claim", "settle", "cancel", "get", "list", "stats", "workers"],
)
async def test_every_call_but_a_beat_goes_on_to_the_next_address(
    dead: str, alive: str, call: Callable[[HttpBackend], Awaitable[object]]
) -> None:
    async with connected(dead, alive) as backend:
        await call(backend)


@pytest.mark.anyio
async def test_a_beat_is_one_try_and_the_next_goes_to_the_other_address(dead: str, alive: str) -> None:
    async with connected(dead, alive) as backend:
        with pytest.raises(Unavailable):
            await backend.beat(STRANGER)
        assert [verdict.verdict for verdict in await backend.beat(STRANGER)] == ["gone"]


@pytest.mark.anyio
async def test_a_beat_that_is_given_up_on_is_a_failed_one(hanging: str, alive: str) -> None:
    async with connected(hanging, alive) as backend:
        with anyio.move_on_after(0.5) as given_up:  # as the keeper does after its call_timeout
            await backend.beat(STRANGER)
        assert given_up.cancelled_caught
        assert [verdict.verdict for verdict in await backend.beat(STRANGER)] == ["gone"]


@pytest.mark.anyio
async def test_beats_that_fail_together_pass_over_one_address_not_two(dead: str, alive: str) -> None:
    async with connected(dead, alive) as backend:
        failed = await asyncio.gather(*(backend.beat(STRANGER) for _ in range(4)), return_exceptions=True)
        assert any(isinstance(one, Unavailable) for one in failed)
        assert [verdict.verdict for verdict in await backend.beat(STRANGER)] == ["gone"]


@pytest.mark.anyio
async def test_no_address_that_answers_is_unavailable(dead: str, unused_port: int) -> None:
    async with connected(dead, f"127.0.0.1:{unused_port}") as backend:
        with pytest.raises(Unavailable):
            await backend.stats()


@pytest.mark.anyio
@pytest.mark.parametrize("status", ["500 No", "503 No", "408 No"])
async def test_the_last_that_answered_is_asked_first(meet: Meet, alive: str, status: str) -> None:
    asked: list[bytes] = []

    async def behave(stranger: Stranger) -> None:
        asked.append(stranger.request)
        await stranger.answer(b"", status=status)

    async with meet(behave) as sick, connected(sick.url.removeprefix("http://"), alive) as backend:
        for _ in range(3):
            await backend.stats()
    assert len(asked) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "error"), [(422, Refused), (429, Throttled)])
async def test_a_refusal_is_an_answer(meet: Meet, alive: str, status: int, error: type[Exception]) -> None:
    document = b'{"type":"urn:leasekit:problem:refused","status":%d,"title":"","detail":""}' % status
    refusal = ForeignAnswer(status, "application/problem+json", document)
    async with (
        meet(lambda stranger: stranger.send(refusal.raw)) as strict,
        connected(strict.url.removeprefix("http://"), alive) as backend,
    ):
        for _ in range(2):
            with pytest.raises(error):
                await backend.stats()


@pytest.mark.anyio
async def test_a_claim_that_is_given_up_while_it_may_wait_says_nothing_against_its_address(
    meet: Meet, alive: str
) -> None:
    asked: list[bytes] = []
    over = asyncio.Event()

    async def behave(stranger: Stranger) -> None:
        asked.append(stranger.request.split(b" ")[1])
        if asked[-1] == b"/v1/claims":
            await over.wait()
        await stranger.answer(b'{"kinds":{}}')

    async with meet(behave) as first, connected(first.url.removeprefix("http://"), alive) as backend:
        claim = asyncio.create_task(backend.claim(["none"], limit=1, wait=30, claim_id="c"))
        with anyio.fail_after(30):
            while not asked:  # noqa: ASYNC110  a fact of the other side
                await asyncio.sleep(0.001)
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
        await backend.stats()
        over.set()
    assert asked == [b"/v1/claims", b"/v1/stats"]


@pytest.mark.anyio
async def test_a_server_of_another_store_counts_as_one_that_does_not_answer(
    alive: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as (first, address):
        async with connected(address, alive) as backend:
            await backend.schedule([NewTask(kind="k", id="of-the-first-store")])
            first.send_signal(signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(Unavailable):  # not *gone*
                    await backend.beat(STRANGER)
                with pytest.raises(Unavailable):
                    await backend.claim(["k"], limit=1, wait=0, claim_id="c")
    says = f"http://{alive} serves another store than http://{address}:"
    assert [record.levelname for record in caplog.records if says in record.getMessage()] == ["ERROR"]


def test_addresses_that_all_moved_to_another_store_are_used_again() -> None:
    stores = _Stores()
    for url, store, is_used in [
        ("a", "1", True),
        ("b", None, True),  # as from a proxy whose server is away
        ("b", "1", True),
        ("b", "2", False),
        ("a", "1", True),
        ("a", "2", True),
        ("b", "2", True),
    ]:
        with nullcontext() if is_used else pytest.raises(Unavailable):
            stores.check(url, store)


def test_a_client_takes_several_addresses(dead: str, alive: str) -> None:
    with leasekit.connect(f"http://{dead},{alive}") as client:
        client.schedule("several")
        task = next(iter(client.tasks("several")))
        with leasekit.lease(task):
            pass
        info = client.get(task.id)
    assert info is not None
    assert info.status == "success"


def test_both_doors_refuse_a_bad_list_of_addresses() -> None:
    with pytest.raises(ConfigError):
        connect("http://a,", worker="w")
