"""Leases of names: one holder at a time, or one run to the end, whichever service keeps the name."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import leasekit
from leasekit import (
    AlreadyDone,
    Cancelled,
    Client,
    ConfigError,
    Fatal,
    LeasekitError,
    LeaseLost,
    NotGranted,
    NotHeld,
    Refused,
    Unavailable,
)
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.backend import Capabilities
from leasekit.testing import faults
from leasekit.testing.faults import Call, Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from tests.waiting import eventually


@pytest.fixture
def client() -> Iterator[Client]:
    with leasekit.connect("memory://") as client:
        yield client


@pytest.fixture(params=["memory", "sqlite", "http"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    store = f"sqlite:///{tmp_path}/tasks.db"
    with ExitStack() as open_until_then:
        match request.param:
            case "http":
                command = [sys.executable, "-m", "leasekit", "serve", "--port", "0", "--store", store]
                server = open_until_then.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                open_until_then.callback(server.terminate)
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
            case "sqlite":
                url = store
            case _:
                url = "memory://"
        yield open_until_then.enter_context(leasekit.connect(url))


def test_every_service_that_accepts_work_keeps_names(service: Client) -> None:
    fences = []
    for name in ("a b", "reports/nightly", "größe", "50%", "a:b", "a b"):
        with (
            leasekit.lease(service.named(name, wait=0)) as held,
            pytest.raises(NotGranted),
            leasekit.lease(service.named(name, wait=0)),
        ):
            pytest.fail("two held it")
        fences.append(held.fence)
    assert fences[-1] > fences[0]


def test_every_service_that_accepts_work_runs_once(service: Client) -> None:
    with leasekit.lease(service.once("message/1")):
        pass
    with pytest.raises(AlreadyDone), leasekit.lease(service.once("message/1")):
        pytest.fail("it ran twice")


def test_what_says_that_it_failed_may_be_run_again_at_once_on_every_service(service: Client) -> None:
    with service.once("m") as held:
        held.fail("oops")
    with service.once("m") as held:
        held.fail("oops", retry=60)
    with pytest.raises(NotGranted), service.once("m"):
        pytest.fail("it was granted before its time")


def test_a_once_may_fail_as_often_as_it_does(client: Client) -> None:
    for _ in range(30):
        with client.once("message 7", wait=0) as held:
            held.fail("oops")
    with client.once("message 7", wait=0) as held:
        assert held.attempt == 31


def test_a_service_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasekit._driver.retrying._ANSWER", 0.1)
    faulty = Faulty(MemoryBackend(MemoryService(), worker="w"))
    with Client(faulty) as client:
        faulty.always("schedule", faults.hang)
        with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"), client.once("x"):
            pytest.fail("it was granted")
        faulty.clear()


@pytest.mark.parametrize("call", ["schedule", "claim"])
@pytest.mark.parametrize("wait", [0, 0.5])
def test_a_service_that_is_away_is_waited_for_no_longer_than_the_name(call: str, wait: float) -> None:
    faulty = Faulty(MemoryBackend(MemoryService(), worker="w"))
    with Client(faulty) as client:
        faulty.always(call, faults.refuse)
        began_at = time.monotonic()
        with pytest.raises(Unavailable), client.named("x", wait=wait):
            pytest.fail("it was granted")
        assert wait <= time.monotonic() - began_at < 20  # and not the 30 s of other calls


def test_a_name_that_was_not_granted_says_so(client: Client) -> None:
    with client.named("x"):
        refused = leasekit.lease(client.named("x", wait=0))
        with pytest.raises(NotGranted), refused:
            pytest.fail("two held it")
        assert repr(refused) == "<NamedLease of 'x': not granted>"


def test_a_name_has_one_holder_at_a_time(client: Client) -> None:
    with (
        leasekit.lease(client.named("reports/nightly")),
        pytest.raises(NotGranted, match="reports/nightly"),
        leasekit.lease(client.named("reports/nightly", wait=0)),
    ):
        pytest.fail("two held it")


def test_a_name_is_entered_as_such(client: Client) -> None:
    with client.named("x") as held, pytest.raises(NotGranted), client.named("x", wait=0):
        pytest.fail("two held it")
    assert held.fence > 0
    with client.once("y") as once:
        once.complete("done")
    with pytest.raises(AlreadyDone), client.once("y"):
        pytest.fail("it ran twice")


@pytest.mark.anyio
async def test_a_name_is_entered_as_such_from_an_event_loop(client: Client) -> None:
    async with client.named("x") as first:
        assert not first.lost
        with pytest.raises(NotGranted):
            async with client.named("x", wait=0):
                pytest.fail("two held it")
    async with client.named("x", wait=0) as held:
        pass
    assert held.fence == first.fence + 1


@pytest.mark.anyio
async def test_a_name_that_is_entered_twice_says_so(client: Client) -> None:
    named = client.named("x")
    with named as held:
        with pytest.raises(NotHeld, match=r"Named\('x'\) is entered already"), named:
            pytest.fail("entered twice")
        with pytest.raises(NotHeld, match="is entered already"):
            async with named:
                pytest.fail("entered twice")
        held.check()
    with named:  # one block after the other
        pass


def test_threads_that_enter_a_name_at_once_do_not_end_the_block_of_another(client: Client) -> None:
    named = client.named("x")
    held_in: list[str] = []
    in_block, refused = threading.Event(), threading.Event()

    def enter() -> None:
        in_block.wait(30)
        with pytest.raises(NotHeld), named:
            held_in.append("second")
        refused.set()

    other = threading.Thread(target=enter)
    other.start()
    with named as held:
        in_block.set()
        assert refused.wait(30)
        connection = client.__connection__()
        connection.run(_turn())  # whatever the end of the other block has asked of the driver is done
        held.check()
        assert connection.keeper.get(held.task) is not None
    other.join(30)
    assert held_in == []


async def _turn() -> None:
    """Nothing, in the driver's loop."""


def test_a_name_that_was_not_granted_may_be_entered_again(client: Client) -> None:
    named = client.named("x", wait=0)
    with client.named("x") as first, pytest.raises(NotGranted), named:
        pytest.fail("two held it")
    with named as held:
        assert held.fence == first.fence + 1


def test_a_name_has_no_public_door_besides(client: Client) -> None:
    assert [name for name in dir(client.named("x")) if not name.startswith("_")] == ["name"]


def test_other_names_are_other_leases(client: Client) -> None:
    with leasekit.lease(client.named("a", wait=0)), leasekit.lease(client.named("b", wait=0)):
        pass


def test_whoever_waits_is_granted_it_when_it_is_given_back(client: Client) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        waits.set()
        with leasekit.lease(client.named("n", wait=30)):
            order.append("second")

    thread = threading.Thread(target=second)
    with leasekit.lease(client.named("n")):
        thread.start()
        waits.wait(60)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_the_fence_grows_with_every_holder(client: Client) -> None:
    fences = []
    for _ in range(3):
        with leasekit.lease(client.named("n", wait=0)) as held:
            fences.append(held.fence)
    assert fences == sorted(set(fences))


def test_a_body_that_fails_gives_it_back_and_its_error_goes_on(client: Client) -> None:
    for error in (ValueError("oops"), Fatal("worse")):
        with pytest.raises(type(error)), leasekit.lease(client.named("n", wait=0)):
            raise error
    with leasekit.lease(client.named("n", wait=0)) as held:
        assert held.attempt == 1


def test_the_next_holder_finds_what_the_last_one_left(client: Client) -> None:
    with leasekit.lease(client.named("n")) as held:
        held.progress({"page": 7})
    with leasekit.lease(client.named("n")) as held:
        assert held.checkpoint == {"page": 7}


def test_one_object_serves_for_many_leases(client: Client) -> None:
    name = client.named("n", wait=0)
    for _ in range(2):
        with leasekit.lease(name):
            pass


def test_a_name_has_no_result(client: Client) -> None:
    with leasekit.lease(client.named("n")) as held:
        with pytest.raises(LeasekitError, match="a name, not a task"):
            held.complete()
        with pytest.raises(LeasekitError, match="a name, not a task"):
            held.fail("x")
        with pytest.raises(LeasekitError, match="a name, not a task"):
            held.then("k")


def test_it_may_be_kept_from_others_for_a_while(client: Client) -> None:
    with leasekit.lease(client.named("n")) as held:
        held.release(after=3600)
    with pytest.raises(NotGranted), leasekit.lease(client.named("n", wait=0)):
        pytest.fail("it was granted before its time")


@pytest.mark.anyio
async def test_the_async_door_acquires_it_too(client: Client) -> None:
    async with leasekit.lease(client.named("n", wait=0)) as held:
        assert held.fence > 0
        with pytest.raises(NotGranted):
            async with leasekit.lease(client.named("n", wait=0)):
                pytest.fail("two held it")
    async with leasekit.lease(client.named("n", wait=0)):
        pass


def test_whoever_is_interrupted_when_it_is_granted_gives_it_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client.__connection__()
    run = connection.run

    def interrupted(work: Any) -> Any:
        granted = run(work)
        if granted is True or isinstance(granted, HeldLease):
            raise KeyboardInterrupt
        return granted

    held = leasekit.lease(client.named("a"))
    with monkeypatch.context() as patched:
        patched.setattr(connection, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held.__enter__()
    with leasekit.lease(client.named("a", wait=30)):
        pass


def test_a_holder_that_died_loses_it_to_the_next() -> None:
    service = MemoryService()
    with Client(MemoryBackend(service, worker="a")) as dead, Client(MemoryBackend(service, worker="b")) as living:
        held = leasekit.lease(dead.named("n", ttl=2)).__enter__()
        connection = dead.__connection__()
        connection.driver.call_soon(connection.keeper.drop, held._run.held)  # it beats no more
        with leasekit.lease(living.named("n", wait=30)) as next_one:
            assert next_one.fence > held.fence
        with pytest.raises(LeaseLost):
            held.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["", "x" * 200, "ü" * 50])
def test_what_cannot_be_a_name_is_refused(client: Client, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        client.named(name)


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf")])
def test_no_time_to_wait_is_refused(client: Client, wait: float) -> None:
    with pytest.raises(ValueError, match="wait must be a number of seconds"):
        client.named("n", wait=wait)


def check_until_told(held: leasekit.Lease) -> None:
    while True:
        held.check()
        time.sleep(0.01)


def test_a_name_that_is_revoked_is_given_back_and_granted_again_on_every_service(service: Client) -> None:
    with service.named("a/b") as held:
        held.progress(1)
        assert service.revoke("a/b").verdict == "cancel_requested"
        with pytest.raises(NotGranted), service.named("a/b", wait=0):
            pytest.fail("two held it")
        with pytest.raises(Cancelled):
            check_until_told(held)
    assert service.revoke("a/b").verdict == "cancelled"
    assert service.cancel("named:a%2Fb")[0].verdict == "cancelled"
    with service.named("a/b", wait=0) as again:
        assert again.fence == held.fence + 1
        assert again.checkpoint == 1
    assert service.revoke("unknown").verdict == "gone"


def test_a_name_whose_holder_died_after_it_was_revoked_is_granted_again() -> None:
    memory = MemoryService()
    with Client(MemoryBackend(memory, worker="a")) as client:
        with suppress(LeaseLost), client.named("n") as held:
            client.revoke("n")
            assert memory.steal("named:n") is not None  # its lease has expired, and another worker holds it
            held.progress(1)
            check_until_told(held)
        info = client.get("named:n")
        assert info is not None
        assert not info.status.ended


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind_of_name in ("_Name", "_OnceName"):
        monkeypatch.setattr(f"leasekit.named.{kind_of_name}.poll", 0.05)


@pytest.mark.usefixtures("short_polls")
def test_whoever_waits_for_ever_hears_that_a_once_was_cancelled() -> None:
    heard: list[NotGranted] = []
    faulty = Faulty(MemoryBackend(MemoryService(), worker="a"))
    with Client(faulty) as client:

        def second() -> None:
            with pytest.raises(NotGranted) as refused, client.once("n", wait=None):
                pytest.fail("it was granted")
            heard.append(refused.value)

        thread = threading.Thread(target=second)
        with suppress(RuntimeError), client.once("n"):
            thread.start()
            eventually(lambda: faulty.calls["claim"] > 1)
            client.cancel("once:n")
            raise RuntimeError
        thread.join(30)
    assert [refused.ended for refused in heard] == ["cancelled"]


@pytest.mark.usefixtures("short_polls")
@pytest.mark.parametrize("ahead", [0, 3600, -3600])
def test_a_name_that_the_service_has_lost_is_granted_to_who_waits_once_its_ttl_is_over(ahead: int) -> None:
    """A failover to a replica that has not heard of it, say: its holder may believe in its lease till then.

    The service's clock is `ahead` of that of the client, which must not matter.
    """
    before, after = MemoryService(), MemoryService(now=lambda: time.time() + ahead)
    backend = MemoryBackend(before, worker="b")
    faulty = Faulty(backend)
    with Client(MemoryBackend(before, worker="a")) as holder, Client(faulty) as waiting:
        granted = threading.Event()

        def second() -> None:
            with waiting.named("n", ttl=2):
                granted.set()

        thread = threading.Thread(target=second)
        with holder.named("n", ttl=2):
            thread.start()
            eventually(lambda: faulty.calls["claim"])
            lost_at = time.time()
            backend.service = after
            assert granted.wait(30)
            assert time.time() > lost_at + 2
        thread.join(30)


def test_a_wait_that_ends_after_the_service_has_lost_the_name_does_not_make_it_due() -> None:
    before, after = MemoryService(), MemoryService()
    backend = MemoryBackend(before, worker="b")
    faulty = Faulty(backend)
    with Client(MemoryBackend(before, worker="a")) as holder, Client(faulty) as waiting:

        def wait(seconds: float) -> None:
            with pytest.raises(NotGranted), waiting.named("n", ttl=60, wait=seconds):
                pytest.fail("it was granted")

        with holder.named("n", ttl=60):
            thread = threading.Thread(target=wait, args=[0.5])
            thread.start()
            eventually(lambda: faulty.calls["claim"])
            backend.service = after
            thread.join(30)
            assert "named:n" in {info.id for info in waiting.list_tasks().tasks}
            wait(0)


def test_a_lease_of_a_name_that_could_not_be_acquired_may_be_entered_again() -> None:
    faulty = Faulty(MemoryBackend(MemoryService(), worker="a"))
    with Client(faulty) as client:
        held = leasekit.lease(client.named("n"))
        faulty.script("claim", refused)
        with pytest.raises(Refused), held:
            pytest.fail("it was granted")
        with held:
            assert held.fence > 0


async def _refuse(call: Call) -> Any:
    raise Refused("no")


refused = Fault("refused", _refuse)


# Once


def test_what_ended_well_is_not_run_again(client: Client) -> None:
    with leasekit.lease(client.once("message-1")) as held:
        held.complete(7)
    with pytest.raises(AlreadyDone, match="message-1"), leasekit.lease(client.once("message-1")):
        pytest.fail("it ran twice")


def test_what_runs_elsewhere_does_not_run_here(client: Client) -> None:
    with (
        leasekit.lease(client.once("m")),
        pytest.raises(NotGranted),
        leasekit.lease(client.once("m")),
    ):
        pytest.fail("it ran twice")


def test_what_failed_may_be_run_again_at_once(client: Client) -> None:
    with pytest.raises(ValueError, match="oops"), leasekit.lease(client.once("m")):
        raise ValueError("oops")
    with leasekit.lease(client.once("m")):
        pass


def test_what_failed_for_good_is_done(client: Client) -> None:
    with pytest.raises(Fatal), leasekit.lease(client.once("m")):
        raise Fatal("never")
    with pytest.raises(AlreadyDone, match="fatal"), leasekit.lease(client.once("m")):
        pytest.fail("it ran again")


@pytest.mark.usefixtures("short_polls")
def test_whoever_waits_hears_that_it_was_done_meanwhile(client: Client) -> None:
    heard: list[str] = []
    waits = threading.Event()

    def second() -> None:
        waits.set()
        try:
            with leasekit.lease(client.once("m", wait=30)):
                heard.append("ran")
        except AlreadyDone:
            heard.append("done")
        except NotGranted:
            heard.append("elsewhere")

    thread = threading.Thread(target=second)
    with leasekit.lease(client.once("m")):
        thread.start()
        waits.wait(60)
    thread.join(30)
    assert heard == ["done"]


@pytest.mark.usefixtures("short_polls")
def test_whoever_waits_for_ever_hears_that_it_was_done() -> None:
    heard: list[AlreadyDone] = []
    faulty = Faulty(MemoryBackend(MemoryService(), worker="a"))
    with Client(faulty) as client:

        def second() -> None:
            with pytest.raises(AlreadyDone) as done, client.once("m", wait=None):
                pytest.fail("it ran twice")
            heard.append(done.value)

        thread = threading.Thread(target=second)
        with client.once("m"):
            thread.start()
            eventually(lambda: faulty.calls["claim"] > 1)
        thread.join(30)
    assert heard


@pytest.mark.anyio
async def test_the_async_door_runs_it_once_too(client: Client) -> None:
    async with leasekit.lease(client.once("m")):
        with pytest.raises(NotGranted):
            async with leasekit.lease(client.once("m")):
                pytest.fail("it ran twice")
    with pytest.raises(AlreadyDone):
        async with leasekit.lease(client.once("m")):
            pytest.fail("it ran twice")


def test_a_service_that_accepts_no_work_has_no_names() -> None:
    class HandsOut:
        capabilities = Capabilities()

        async def aclose(self) -> None: ...

    with (
        leasekit.connect(HandsOut()) as client,  # type: ignore[arg-type]
        pytest.raises(ConfigError, match="cannot hold leases of names, because it accepts no tasks"),
        leasekit.lease(client.named("n")),
    ):
        pytest.fail("it was granted")
