"""The ledger: what a process held can be read when it is gone, whatever it was doing at that moment."""

import os
import resource
import signal
from collections.abc import Callable, Iterator

import msgspec
import pytest
from msgspec import UNSET

from leasekit._driver.reporting.ledger import Holder, Ledger, Left, Past, PendingClaim, SharedMemory
from leasekit.task import Settlement
from tests.sampling import slow_after

HOLDER = Holder(worker="w", url="http://here", guarded=True, spool="/there")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory()
    yield memory
    memory.close()


@pytest.fixture
def ledger(memory: SharedMemory) -> Ledger:
    ledger = Ledger(memory.fd)
    ledger.open(HOLDER)
    return ledger


def test_what_was_never_opened_has_no_holder(memory: SharedMemory) -> None:
    Ledger(memory.fd)
    assert memory.read() == Past(None, [], [], [])


def test_it_says_who_holds_what_and_what_of_it_has_begun(memory: SharedMemory, ledger: Ledger) -> None:
    entry = ledger.add("a", "token-a")
    ledger.add("b", "token-b")
    ledger.begins(entry)
    assert memory.read() == Past(HOLDER, [Left("a", "token-a", begun=True), Left("b", "token-b", begun=False)], [], [])


def test_what_is_over_is_not_in_it_and_leaves_its_room_to_others(memory: SharedMemory, ledger: Ledger) -> None:
    first = ledger.add("a", "t")
    ledger.begins(first)
    ledger.add("b", "t")
    ledger.remove(first)
    assert [left.task_id for left in memory.read().leases] == ["b"]
    assert ledger.add("c", "t") == first
    assert memory.read().leases == [Left("c", "t", begun=False), Left("b", "t", begun=False)]


def test_it_says_what_was_asked_for_until_the_answer_is_noted(memory: SharedMemory, ledger: Ledger) -> None:
    entry = ledger.record_claim("claim-1", ["a", "b"])
    assert memory.read().claims == [PendingClaim("claim-1", ["a", "b"])]
    ledger.remove(entry)
    assert memory.read().is_empty


def test_it_says_whether_the_service_has_ever_answered(memory: SharedMemory, ledger: Ledger) -> None:
    assert not memory.read().answered
    ledger.note_answer()
    assert memory.read().answered


def test_it_has_the_latest_progress_of_a_lease(memory: SharedMemory, ledger: Ledger) -> None:
    ledger.begins(ledger.add("a", "t"))
    ledger.add("b", "t")
    entry = 0
    for page in range(50):
        entry = ledger.progress(entry, "a", "t", msgspec.Raw(b'{"page":%d}' % page), number=page + 1)
    assert [left.progress for left in memory.read().leases] == [msgspec.Raw(b'{"page":49}'), UNSET]
    ledger.remove(entry)
    assert memory.read().leases[0].progress is UNSET


def test_of_two_progresses_that_a_kill_has_left_the_newer_counts(memory: SharedMemory, ledger: Ledger) -> None:
    ledger.add("a", "t")
    first = ledger.progress(0, "a", "t", msgspec.Raw(b"1"), number=1)
    ledger.remove(first)
    ledger.progress(0, "b", "t", msgspec.Raw(b"0"), number=1)  # takes the room of the first
    ledger.progress(0, "a", "t", msgspec.Raw(b"2"), number=2)
    ledger.remove(first)
    ledger.progress(0, "a", "t", msgspec.Raw(b"3"), number=3)  # stands before the second
    [left] = memory.read().leases
    assert (left.progress, left.progress_seq) == (msgspec.Raw(b"3"), 3)


def test_progress_has_its_bounds_and_leases_are_noted_beyond_them(memory: SharedMemory, ledger: Ledger) -> None:
    big = msgspec.Raw(b'"' + b"x" * 60_000 + b'"')
    noted = [ledger.progress(0, f"task-{n}", "t", big, number=1) for n in range(1200)]
    assert noted[0]
    assert noted[-1] == 0
    assert os.fstat(memory.fd).st_size <= 129 * 1024 * 1024
    assert ledger.add("one more", "t")
    # Where there is no room for the newer, the older stays.
    assert ledger.progress(noted[0], "task-0", "t", msgspec.Raw(b'"' + b"y" * 40_000 + b'"'), number=2) == noted[0]


def test_it_grows_and_takes_tokens_of_any_length(memory: SharedMemory, ledger: Ledger) -> None:
    before = os.fstat(memory.fd).st_size
    entries = [ledger.add(f"task-{n}", "t" * (n % 1500)) for n in range(3000)]
    assert os.fstat(memory.fd).st_size > before
    for entry in entries[::2]:
        ledger.begins(entry)
    assert memory.read().leases == [Left(f"task-{n}", "t" * (n % 1500), begun=n % 2 == 0) for n in range(3000)]


def test_it_says_whose_body_ran_in_another_process(memory: SharedMemory, ledger: Ledger) -> None:
    ledger.begins(ledger.add("a", "t"), elsewhere=True)
    assert memory.read().leases == [Left("a", "t", begun=True, unguarded=True)]
    ledger.mark_released()
    assert memory.read().leases == [Left("a", "t", begun=False)]


def test_it_says_whose_body_had_ended(memory: SharedMemory, ledger: Ledger) -> None:
    entries = [ledger.add(f"{n}", "t") for n in range(3)]
    ledger.begins(entries[0])
    ledger.ends(entries[0])
    ledger.begins(entries[1])
    ledger.mark_released()  # also of the one that has ended
    ledger.ends(entries[1])
    ledger.ends(entries[2])
    assert memory.read().leases == [Left(f"{n}", "t", begun=False) for n in range(3)]
    ledger.begins(entries[2])
    ledger.ends(entries[2])
    assert memory.read().leases[2] == Left("2", "t", begun=True, unguarded=True)
    ledger.remove(entries[2])
    ledger.ends(entries[2])
    assert len(memory.read().leases) == 2


def test_bodies_that_are_forgiven_are_as_if_they_had_never_begun(memory: SharedMemory, ledger: Ledger) -> None:
    for n in range(3):
        ledger.begins(ledger.add(f"{n}", "t"))
    ledger.mark_released()
    ledger.add("3", "t")
    ledger.mark_released()
    leases = memory.read().leases
    assert [left.begun for left in leases] == [False] * 4
    assert [left.released for left in leases] == [True] * 3 + [False]


def test_a_last_word_takes_the_place_of_the_lease(memory: SharedMemory, ledger: Ledger) -> None:
    entry = ledger.add("a", "t")
    ledger.begins(entry)
    word = Settlement(id="a", token="t", outcome="release", progress=msgspec.Raw(b'{"page":[1,2]}'))
    ledger.remove(ledger.record_settlement(entry, word))
    entry = ledger.add("a", "t")
    ledger.record_settlement(entry, word)
    _, leases, said, *_ = memory.read()
    assert leases == []
    assert said == [Settlement(id="a", token="t", outcome="release", progress={"page": [1, 2]})]


def test_signals_are_counted_for_the_worker_to_see(memory: SharedMemory, ledger: Ledger) -> None:
    memory.count_signal()
    memory.count_signal()
    assert ledger.signals == 2


def test_a_url_that_is_longer_than_the_ledger_is_refused(memory: SharedMemory, ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="too long"):
        ledger.open(Holder(worker="w", url="x" * 20_000))


def test_other_memory_is_no_ledger() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 100_000)
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger(fd)
    os.close(fd)


def in_child(work: Callable[[], None]) -> None:
    """Run it in a child that is killed at the end of it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_it_outlives_a_process_that_was_killed(memory: SharedMemory) -> None:
    def work() -> None:
        ledger = Ledger(memory.fd)
        ledger.open(HOLDER)
        entries = [ledger.add(f"{n}", "token") for n in range(1000)]
        for entry in entries[:500]:
            ledger.begins(entry)
        for entry in entries[:100]:
            ledger.remove(entry)

    in_child(work)
    past = memory.read()
    assert past.holder == HOLDER
    assert past.leases == [Left(f"{n}", "token", begun=n < 500) for n in range(100, 1000)]


def test_where_there_is_no_memory_for_more_the_rest_is_not_noted_and_nothing_is_spoiled(memory: SharedMemory) -> None:
    def work() -> None:
        ledger = Ledger(memory.fd)
        ledger.open(HOLDER)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        entries = [ledger.add(f"{n}", "token") for n in range(3000)]
        for entry in entries:
            ledger.begins(entry)
        word = Settlement(id="0", token="token", outcome="release", progress="x" * 90_000)
        assert ledger.record_settlement(entries[0], word) == entries[0]
        for entry in entries[1:]:
            ledger.remove(entry)
        ledger.remove(ledger.record_claim("claim", ["k"]))
        ledger.begins(ledger.add("last", "token"))

    in_child(work)
    assert memory.read() == Past(HOLDER, [Left("0", "token", begun=True), Left("last", "token", begun=True)], [], [])


@pytest.mark.parametrize("after", slow_after(9, sorted(range(0, 400, 7), key=lambda after: after % 49)))
def test_who_is_killed_in_the_middle_of_a_line_leaves_all_others_true(memory: SharedMemory, after: int) -> None:
    def work() -> None:
        import sys

        ledger = Ledger(memory.fd)
        ledger.open(HOLDER)
        for n in range(4):
            ledger.begins(ledger.add(f"sure-{n}", "token"))
        left = after

        def step(frame: object, event: str, arg: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step

        sys.settrace(step)  # type: ignore[arg-type]
        for n in range(40):
            entry = ledger.add(f"other-{n}", "t" * n)
            ledger.begins(entry)
            if n % 3:
                ledger.remove(entry)

    in_child(work)
    past = memory.read()
    assert [left for left in past.leases if left.task_id.startswith("sure")] == [
        Left(f"sure-{n}", "token", begun=True) for n in range(4)
    ]
    for left in past.leases[4:]:
        assert left.token == "t" * int(left.task_id.removeprefix("other-"))


def test_it_says_when_the_kernels_timer_would_have_killed_the_process(memory: SharedMemory, ledger: Ledger) -> None:
    ledger.arm(7.5)
    assert memory.read().armed_at == 7.5
    ledger.arm(None)
    assert memory.read().armed_at is None
