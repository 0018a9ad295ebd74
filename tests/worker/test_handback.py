"""What a dead worker held is handed back where nobody else can have it, and nothing of it ends its supervisor."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leasekit import Client
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.reporting.ledger import Holder, Ledger, Left, Past, PendingClaim, SharedMemory
from leasekit._driver.reporting.spool import Spool
from leasekit._worker import handback, supervisor_link
from leasekit.errors import Unavailable
from leasekit.task import Beat, Settlement, Status, Task
from leasekit.testing import faults
from leasekit.testing._faulty_backend import Call
from leasekit.testing.faults import Fault, Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService


class Dead:
    """A worker that died with one lease of this service."""

    def __init__(self, service: MemoryService) -> None:
        self.service = service
        self.refuses_stale = True
        self.client = Client(MemoryBackend(service, worker="dead"))
        self.faults: list[Fault] = []  # of the first claims of its supervisor …
        self.settle_faults: list[Fault] = []  # … and of its first reports
        self.task_id = self.client.schedule("k").id
        (self.task,) = self.claim("c")

    def claim(self, claim_id: str) -> list[Task]:
        connection = self.client.__connection__()
        return connection.run(connection.backend.claim(["k"], limit=1, wait=0, claim_id=claim_id)).tasks

    def hand_back(
        self, *, begun: bool, unguarded: bool = False, released: bool = False, timer_in: float | None = 30.0
    ) -> str:
        """The task's status after that. The kernel's timer would have killed the worker `timer_in` seconds from now."""
        left = Left(self.task.id, self.task.token, begun=begun, unguarded=unguarded, released=released)
        armed_at = None if timer_in is None else BOOT_CLOCK.now() + timer_in
        past = Past(Holder(worker="dead", url="memory://", guarded=True), [left], [], [], armed_at)
        handback.hand_back(past, "killed", waiting=waiting)
        info = self.client.get(self.task_id)
        assert info is not None
        return info.status

    def supervisors(self, url: str, *, worker: str, options: Mapping[str, Any]) -> Client:
        backend = Faulty(MemoryBackend(self.service, worker=worker))
        backend.capabilities = replace(backend.capabilities, refuses_stale=self.refuses_stale)
        backend.script("claim", *self.faults)
        backend.script("settle", *self.settle_faults)
        return Client(backend)


def waiting(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@pytest.fixture
def dead(service: MemoryService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dead]:
    dead = Dead(service)
    monkeypatch.setattr(handback, "Client", dead.supervisors)
    yield dead
    dead.client.close()


@pytest.mark.parametrize(("begun", "unguarded"), [(True, False), (True, True), (False, False)])
def test_all_that_is_left_is_handed_back(dead: Dead, begun: bool, unguarded: bool) -> None:
    assert dead.hand_back(begun=begun, unguarded=unguarded) in (Status.ENQUEUED, Status.NEW)


@pytest.mark.parametrize(
    ("begun", "unguarded", "status"),
    [(True, False, Status.ENQUEUED), (True, True, Status.CLAIMED), (False, False, Status.CLAIMED)],
)
def test_a_service_that_takes_what_is_stale_hears_only_what_a_timer_vouches_for(
    dead: Dead, begun: bool, unguarded: bool, status: str
) -> None:
    """Not of one that has ended, or ran in an executor: its worker may have been stopped for long after that lease."""
    dead.refuses_stale = False
    assert dead.hand_back(begun=begun, unguarded=unguarded) == status


def test_a_service_that_takes_what_is_stale_hears_of_a_body_that_a_signal_has_ended(dead: Dead) -> None:
    dead.refuses_stale = False
    assert dead.hand_back(begun=False, released=True) == Status.ENQUEUED


@pytest.mark.parametrize("timer_in", [-0.001, None])
def test_a_service_that_takes_what_is_stale_hears_nothing_of_a_death_that_is_seen_after_the_timer(
    dead: Dead, timer_in: float | None
) -> None:
    """The supervisor was stopped meanwhile, or no handler ran: another worker may hold the task by now."""
    dead.refuses_stale = False
    assert dead.hand_back(begun=True, timer_in=timer_in) == Status.CLAIMED


def test_a_service_that_takes_what_is_stale_hears_nothing_after_the_timer_though_it_was_away_before(dead: Dead) -> None:
    """However short a margin the worker had: its lease ends then, and another worker may have the task."""
    ends_at = BOOT_CLOCK.now() + 0.5

    async def act(call: Call) -> Any:
        if BOOT_CLOCK.now() < ends_at:
            raise Unavailable("away")
        return await call.send()

    dead.settle_faults = [Fault("away", act)] * 100
    assert dead.hand_back(begun=True, timer_in=0.5) in (Status.ENQUEUED, Status.NEW)
    (dead.task,) = dead.claim("d")
    dead.refuses_stale, ends_at = False, BOOT_CLOCK.now() + 1.0  # after the timer, which is set some time from now
    assert dead.hand_back(begun=True, timer_in=0.5) == Status.CLAIMED


def test_what_was_granted_to_a_claim_that_nobody_heard_the_answer_of_is_given_back(dead: Dead) -> None:
    past = Past(Holder(worker="dead", url="memory://"), [], [], [PendingClaim("c", ["k"])])
    handback.hand_back(past, "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == (Status.ENQUEUED, 0)


def test_a_claim_that_arrives_after_it_was_handed_back_is_granted_nothing(dead: Dead) -> None:
    """As a request does that a proxy has kept: nobody would hear of the lease, and it would run out."""
    past = Past(Holder(worker="dead", url="memory://"), [], [], [PendingClaim("late", ["k"])])
    handback.hand_back(past, "killed", waiting=waiting)
    task_id = dead.client.schedule("k").id
    assert dead.claim("late") == []
    assert [task.id for task in dead.claim("another")] == [task_id]


@pytest.mark.parametrize("fault", [faults.refuse, faults.lose_answer])
def test_a_claim_is_ended_by_the_next_try_where_the_first_fails(dead: Dead, fault: Fault) -> None:
    dead.faults = [fault]
    past = Past(Holder(worker="dead", url="memory://"), [], [], [PendingClaim("c", ["k"])])
    handback.hand_back(past, "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == (Status.ENQUEUED, 0)
    assert dead.claim("c") == []


def test_a_claim_that_cannot_be_ended_leaves_the_others_not_un_ended(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(call: Call) -> Any:
        if call.options["claim_id"] == "hangs":
            await call.sleep(30)
        return await call.send()

    monkeypatch.setattr(handback, "_FOR_CLAIMS", 0.5)
    dead.faults = [Fault("hangs", act)] * 2
    past = Past(
        Holder(worker="dead", url="memory://"),
        [],
        [],
        [PendingClaim("hangs", ["k"]), PendingClaim("c", ["k"])],
        answered=True,
    )
    handback.hand_back(past, "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == (Status.ENQUEUED, 0)
    assert "may wait until their leases expire: no answer\n" in caplog.text


def test_what_a_server_says_is_handed_back_though_another_of_the_claims_servers_is_away(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(call: Call) -> Any:
        if "away" in call.items:
            raise Unavailable("a shard is away")
        return await call.send()

    monkeypatch.setattr(handback, "_FOR_CLAIMS", 0.5)
    dead.faults = [Fault("a shard is away", act)] * 100
    past = Past(Holder(worker="dead", url="memory://"), [], [], [PendingClaim("c", ["k", "away"])], answered=True)
    handback.hand_back(past, "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == (Status.ENQUEUED, 0)
    assert "may wait until their leases expire" in caplog.text


def test_a_service_that_never_answered_has_granted_nothing_to_speak_of(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handback, "_FOR_CLAIMS", 0.1)
    dead.faults = [faults.refuse] * 100
    past = Past(Holder(worker="dead", url="memory://"), [], [], [PendingClaim("c", ["k"])])
    handback.hand_back(past, "killed", waiting=waiting)
    assert "leases expire" not in caplog.text


def test_what_was_noted_of_it_is_handed_back_once(dead: Dead) -> None:
    left = Left(dead.task.id, dead.task.token, begun=True)
    past = Past(Holder(worker="dead", url="memory://"), [left], [], [PendingClaim("c", ["k"])])
    handback.hand_back(past, "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == (Status.ENQUEUED, 1)


@pytest.mark.parametrize("takes_it_up", [False, True])
def test_a_result_in_the_spool_is_no_crash_whichever_process_has_it(
    dead: Dead, tmp_path: Path, *, takes_it_up: bool
) -> None:
    """A neighbour that shares the spool has taken it up, and its service is away as it sees it."""
    spool = Spool(tmp_path, "memory://")
    spool.keep([Settlement(id=dead.task.id, token=dead.task.token, outcome="success")])
    spool.close()
    neighbour = Spool(tmp_path, "memory://")
    if takes_it_up:
        neighbour.adopt()
    holder = Holder(worker="dead", url="memory://", guarded=True, spool=str(tmp_path))
    left = Left(dead.task.id, dead.task.token, begun=True)
    handback.hand_back(Past(holder, [left], [], [PendingClaim("c", ["k"])]), "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.status, info.crashes) == ((Status.CLAIMED if takes_it_up else Status.SUCCESS), 0)
    neighbour.close()


def test_progress_that_was_noted_before_a_beat_brought_newer_does_not_replace_that(dead: Dead) -> None:
    """The body reports, the driver notes it, the body reports again, a beat takes that along, the worker dies."""
    newer = Beat(id=dead.task.id, token=dead.task.token, progress="newer", progress_seq=2)
    dead.client.__connection__().run(dead.client.__connection__().backend.beat([newer]))
    left = Left(dead.task.id, dead.task.token, begun=True, progress="noted", progress_seq=1)
    handback.hand_back(Past(Holder(worker="dead", url="memory://"), [left], [], []), "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert (info.crashes, info.progress) == (1, "newer")


def test_nothing_is_handed_back_where_nobody_can_say_what_is_in_the_spool(
    dead: Dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(spool: Spool) -> set[tuple[str, str]]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Spool, "unanswered", unreadable)
    holder = Holder(worker="dead", url="memory://", guarded=True, spool=str(tmp_path))
    left = Left(dead.task.id, dead.task.token, begun=True)
    handback.hand_back(Past(holder, [left], [], []), "killed", waiting=waiting)
    info = dead.client.get(dead.task_id)
    assert info is not None
    assert info.status == Status.CLAIMED
    assert "expire by themselves: OSError: [Errno 5]" in caplog.text


def test_whatever_is_raised_is_said_and_no_more(
    dead: Dead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(url: str, **options: Any) -> Client:
        raise RuntimeError("the adapter is broken")

    monkeypatch.setattr(handback, "Client", broken)
    dead.hand_back(begun=True)
    assert "expire by themselves: RuntimeError: the adapter is broken" in caplog.text


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemory]:
    """As the child of a supervisor is."""
    memory = SharedMemory()
    monkeypatch.setattr(supervisor_link, "_ledger", Ledger(memory.fd))
    monkeypatch.setattr(supervisor_link, "_noted", None)
    yield memory
    memory.close()


def test_a_second_worker_at_the_same_time_does_not_take_the_place_of_the_first(
    attached: SharedMemory, make_client: Callable[[], Client]
) -> None:
    first, second = make_client(), make_client()
    supervisor_link.note(first, spool=None)
    supervisor_link.note(second, spool=None)
    holder = attached.read().holder
    assert holder is not None
    assert holder.worker == first.worker
    first.close()
    supervisor_link.note(second, spool=None)
    holder = attached.read().holder
    assert holder is not None
    assert holder.worker == second.worker


@pytest.fixture
def make_client(service: MemoryService) -> Iterator[Callable[[], Client]]:
    made: list[Client] = []

    def make() -> Client:
        made.append(Client(MemoryBackend(service, worker="w")))
        return made[-1]

    yield make
    for client in made:
        client.close()
