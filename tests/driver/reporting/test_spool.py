"""The spool: what it keeps survives the process, once; what was answered does not."""

import contextlib
import fcntl
import logging
import os
import random
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from leasekit._driver.reporting.service_key import key_of
from leasekit._driver.reporting.spool import Spool
from leasekit.task import NewTask, Settlement

URL = "http://user:secret@here:8077"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def spool(home: Path) -> Iterator[Spool]:
    spool = Spool(home, URL)
    yield spool
    spool.close()


def settlement(task_id: str, **said: object) -> Settlement:
    return msgspec.convert({"id": task_id, "token": f"token-{task_id}", "outcome": "success"} | said, Settlement)


def ids(settlements: list[Settlement]) -> list[str]:
    return [settlement.id for settlement in settlements]


def dies(home: Path, *kept: Settlement, then: Callable[[Spool], object] = lambda spool: None) -> None:
    """A process that keeps these, and is killed."""
    child = os.fork()
    if child == 0:
        try:
            spool = Spool(home, URL)
            spool.keep(kept)
            then(spool)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def open_files(home: Path) -> int:
    """How many files there this process has open, also those that are gone."""
    fds = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(str(fd.readlink()).startswith(str(home)) for fd in fds)


def test_nothing_is_written_before_there_is_something_to_keep(home: Path, spool: Spool) -> None:
    assert spool.adopt() == []
    spool.close()
    assert not home.exists()


def test_what_is_kept_is_its_owners_alone(home: Path, spool: Spool) -> None:
    spool.keep([settlement("a")])
    [path] = home.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert "secret" not in path.name


def test_what_a_dead_process_kept_is_adopted_once_and_to_the_byte(home: Path, spool: Spool) -> None:
    result = b'{"long":' + b"1" * 30 + b',"float":1.0,"text":"\\u00e9"}'
    kept = Settlement(
        id="a",
        token="t",
        outcome="success",
        result=msgspec.Raw(result),
        progress=msgspec.Raw(b"[1]"),
        then=[NewTask(kind="next", payload=msgspec.Raw(b'{"n":1e0}'))],
    )
    dies(home, kept)
    [adopted] = spool.adopt()
    assert msgspec.json.encode(adopted.result) == result
    assert msgspec.json.encode(adopted.progress) == b"[1]"
    assert (adopted.then[0].kind, msgspec.json.encode(adopted.then[0].payload)) == ("next", b'{"n":1e0}')
    assert (adopted.id, adopted.token, adopted.outcome) == ("a", "t", "success")
    other = Spool(home, URL)
    assert other.adopt() == []  # it is ours now
    spool.close()
    assert ids(other.adopt()) == ["a"]  # and it was never answered
    other.close()


def test_a_result_of_a_mebibyte_is_kept(home: Path, spool: Spool) -> None:
    dies(home, settlement("a", result="x" * (1024 * 1024 - 2)))
    assert len(bytes(spool.adopt()[0].result)) == 1024 * 1024


def test_what_was_answered_is_not_reported_again(home: Path, spool: Spool) -> None:
    kept = [settlement(name) for name in "abc"]
    dies(home, *kept, then=lambda spool: spool.answered([kept[1]]))
    assert ids(spool.adopt()) == ["a", "c"]


def test_when_all_is_answered_nothing_is_left(home: Path) -> None:
    spool = Spool(home, URL)
    spool.keep([settlement("a"), settlement("b")])
    spool.answered([settlement("a"), settlement("b")])
    assert [path.stat().st_size for path in home.iterdir()] == [0]
    spool.close()
    assert list(home.iterdir()) == []


def test_a_living_process_keeps_what_is_its_own(home: Path, spool: Spool) -> None:
    spool.keep([settlement("a")])
    other = Spool(home, URL)
    assert other.adopt() == []
    spool.keep([settlement("b")])
    spool.close()
    assert ids(other.adopt()) == ["a", "b"]
    other.close()


def test_a_forked_child_that_lives_on_does_not_keep_it_for_itself(home: Path, spool: Spool) -> None:
    other = Spool(home, URL)
    other.keep([settlement("a")])
    lives, may_end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(may_end[1])
        os.write(lives[1], b"x")
        os.read(may_end[0], 1)
        os._exit(0)
    try:
        os.read(lives[0], 1)
        other.close()
        assert ids(spool.adopt()) == ["a"]
    finally:
        for fd in (*lives, *may_end):
            os.close(fd)
        os.waitpid(child, 0)


def test_two_that_start_at_once_adopt_each_result_once(home: Path) -> None:
    dies(home, *[settlement(f"{n}") for n in range(50)])
    dies(home, *[settlement(f"{n}") for n in range(50, 100)])
    spools = [Spool(home, URL) for _ in range(4)]
    found: list[list[str]] = [[] for _ in spools]
    barrier = threading.Barrier(len(spools))

    def adopt(n: int) -> None:
        barrier.wait()
        found[n] = ids(spools[n].adopt())

    threads = [threading.Thread(target=adopt, args=(n,)) for n in range(len(spools))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((task_id for one in found for task_id in one), key=int) == [f"{n}" for n in range(100)]
    for spool in spools:
        spool.close()


@pytest.mark.parametrize(
    "damage",
    [b'{"kept": {"id": "b", "tok', b"\0" * 500, b"[" * 5000 + b"\n", b'{"kept": 1}\n', b"\xff\xfe\n", b"\n"],
    ids=["torn", "zeros", "nested", "of another shape", "no text", "empty"],
)
def test_lines_that_cannot_be_read_are_passed_over_with_one_word(
    home: Path, spool: Spool, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    dies(home, settlement("a"), settlement("b"))
    [path] = home.iterdir()
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + (damage if damage.endswith(b"\n") else b"") + second + damage)
    with caplog.at_level(logging.WARNING):
        assert ids(spool.adopt()) == ["a", "b"]
        spool.answered([settlement("a")])
        spool.answered([settlement("b")])
    assert [path.name in record.getMessage() for record in caplog.records] == [True]
    assert path.name not in names(home)


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        b'{"kept":{"id":"b","token":"t","outcome":"success","mood":"of a later version"}}\n',
        b'{"kept":{"id":"b","token":"t","outcome":"abandoned"}}\n',
        b'{"done":{"id":"b","token":"t","outcome":"success"}}\n',
        b'{"version":2}\n',
        b'{"kept": {"id": "b", "tok',
    ],
    ids=["field", "outcome", "envelope", "header", "torn"],
)
def test_a_file_that_cannot_be_read_to_its_end_is_kept_aside_and_the_rest_reported(
    home: Path, spool: Spool, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    dies(home, settlement("a"))
    [path] = home.iterdir()
    path.write_bytes(whole := path.read_bytes() + line)
    assert ids(spool.adopt()) == ["a"]
    assert names(home) == [path.name]  # as long as something in it is to be reported
    spool.answered([settlement("a")])
    [aside] = [found for found in home.iterdir() if found.name.startswith(path.name)]
    assert aside.name.endswith(".unread")
    assert aside.read_bytes() == whole
    assert [aside.name in record.getMessage() for record in caplog.records] == [True]
    assert "token-a" not in caplog.text
    assert Spool(home, URL).adopt() == []  # and is not looked at again
    aside.rename(path)
    assert ids(Spool(home, URL).adopt()) == ["a"]  # unless somebody wants it


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def a_file_without_end(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [a_pipe, a_socket, Path.mkdir, a_file_without_end, a_loop])
def test_what_is_no_spool_but_has_the_name_of_one_holds_nobody_up(
    home: Path, spool: Spool, make: Callable[[Path], object]
) -> None:
    dies(home, settlement("a"))
    strange = home / f"{key_of(URL)}.1-00000000.jsonl"  # the first that is looked at
    make(strange)
    adopted: list[list[Settlement]] = []
    thread = threading.Thread(target=lambda: adopted.append(spool.adopt()), daemon=True)
    thread.start()
    thread.join(60)
    assert [ids(found) for found in adopted] == [["a"]]
    assert any(name.startswith(strange.name) for name in names(home))


def test_a_write_that_was_cut_short_does_not_spoil_the_next(
    home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Spool(home, URL)
    other.keep([settlement("a")])
    write = os.write

    def cut(fd: int, data: memoryview) -> int:
        if len(data) > 20:
            return write(fd, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        with pytest.raises(OSError, match="No space"):
            other.keep([settlement("b")])
    other.keep([settlement("c")])
    other.close()
    assert ids(spool.adopt()) == ["a", "c"]


def test_a_long_file_of_answered_results_is_written_anew(home: Path, spool: Spool) -> None:
    other = Spool(home, URL)
    other.keep([settlement("stays")])
    for n in range(40):
        long = settlement(f"{n}", result="x" * 50_000)
        other.keep([long])
        other.answered([long])
    [path] = home.iterdir()
    assert path.stat().st_size < 1_500_000
    other.close()
    assert ids(spool.adopt()) == ["stays"]


def test_a_long_file_that_a_full_disk_does_not_let_be_written_anew_stays_as_it_is(
    home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Spool(home, URL)
    other.keep([settlement("stays")])
    long = [settlement(f"{n}", result="x" * 50_000) for n in range(40)]
    other.keep(long)
    before, write = open_files(home), os.write

    def full(fd: int, data: memoryview) -> int:
        if b'"kept"' in bytes(data):
            raise OSError(28, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            other.answered(long)
    assert len(list(home.iterdir())) == 1
    assert open_files(home) == before
    other.answered(long)
    other.close()
    assert ids(spool.adopt()) == ["stays"]


def test_what_an_almost_full_disk_took_is_kept_and_not_written_again(
    home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Spool(home, URL)
    fits, does_not = settlement("fits"), settlement("does-not", result="x" * 50_000)
    write = os.write

    def almost_full(fd: int, data: memoryview) -> int:
        if len(data) > 50_000:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                other.keep([fits, does_not])
    assert (other.has(fits), other.has(does_not)) == (True, False)
    [path] = home.iterdir()
    assert len(path.read_text().splitlines()) == 1
    other.close()
    assert ids(spool.adopt()) == ["fits"]


def test_what_dead_processes_kept_is_adopted_from_a_full_disk_and_noted_as_answered_where_it_can_be(
    home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(home, settlement("a"))
    dies(home, settlement("b"), settlement("c"))

    def full(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert sorted(ids(spool.adopt())) == ["a", "b", "c"]
        with pytest.raises(OSError, match="No space"):
            spool.answered([settlement("a"), settlement("b")])
    assert spool.unanswered() == {key("b"), key("c")}  # b is reported twice, which does no harm
    spool.answered([settlement("c")])
    assert names(home) == []


def key(task_id: str) -> tuple[str, str]:
    return task_id, f"token-{task_id}"


# What all files hold --------------------------------------------------------------------------------------------


def test_what_is_not_answered_is_seen_whichever_process_has_it(home: Path, spool: Spool) -> None:
    assert spool.unanswered() == set()
    dies(home, settlement("a"), settlement("b"), then=lambda spool: spool.answered([settlement("b")]))
    lives = Spool(home, URL)
    lives.keep([settlement("c")])
    assert spool.unanswered() == {key("a"), key("c")}
    lives.adopt()
    assert spool.unanswered() == {key("a"), key("c")}
    lives.answered([settlement("a")])
    assert spool.unanswered() == {key("c")}
    lives.close()


def test_a_result_stays_in_the_file_of_the_process_that_kept_it(home: Path, spool: Spool) -> None:
    """Were it moved, a look at all files could come to the one too early and to the other too late."""
    dies(home, settlement("a"), settlement("b"))
    [path] = home.iterdir()
    spool.adopt()
    spool.answered([settlement("b")])
    spool.close()
    other = Spool(home, URL)
    assert ids(other.adopt()) == ["a"]
    assert names(home) == [path.name]
    other.close()


def test_what_is_answered_of_a_file_that_ends_in_the_middle_of_a_line_is_noted(home: Path, spool: Spool) -> None:
    dies(home, settlement("a"), settlement("b"))
    [path] = home.iterdir()
    path.write_bytes(path.read_bytes() + b'{"kept": {"id": "c", "tok')
    spool.adopt()
    spool.answered([settlement("a")])
    assert spool.unanswered() == {key("b")}


def test_what_cannot_be_read_is_not_passed_over(home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    dies(home, settlement("a"))

    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(OSError, match="Too many"):
        spool.unanswered()


def test_more_files_than_a_process_should_have_open_are_left_to_the_next(
    home: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leasekit._driver.reporting.spool._MOST_ADOPTED", 2)
    for name in "abc":
        dies(home, settlement(name))
    assert len(spool.adopt()) == 2
    assert "left to the next process" in caplog.text
    other = Spool(home, URL)
    assert len(other.adopt()) == 1
    other.close()


@pytest.mark.parametrize("seed", range(30))
def test_whoever_keeps_adopts_and_dies_in_whatever_order_what_is_not_answered_is_seen_and_is_one_processs(
    home: Path, seed: int
) -> None:
    """A model: processes that keep, adopt, answer, close or are killed; after each step all that is open is seen."""
    rng = random.Random(seed)
    living: list[tuple[Spool, dict[str, Settlement]]] = []
    reports: set[str] = set()  # what is not answered
    made = 0
    for _ in range(120):
        match rng.choice(["start", "keep", "adopt", "answer", "close", "kill", "kill"]):
            case "start" if len(living) < 4:
                living.append((Spool(home, URL), {}))
            case "keep" if living:
                spool, has = rng.choice(living)
                fresh = {f"{made + n}": settlement(f"{made + n}") for n in range(rng.randint(1, 3))}
                made += len(fresh)
                spool.keep(list(fresh.values()))
                has |= fresh
                reports |= fresh.keys()
            case "adopt" if living:
                spool, has = rng.choice(living)
                adopted = {one.id: one for one in spool.adopt()}
                assert not any(adopted.keys() & theirs.keys() for _, theirs in living), "two have it"
                has |= adopted
            case "answer" if living:
                spool, has = rng.choice(living)
                answered = [has.pop(task_id) for task_id in rng.sample(sorted(has), rng.randint(0, len(has)))]
                spool.answered(answered)
                reports -= {one.id for one in answered}
            case "close" if living:
                living.pop(rng.randrange(len(living)))[0].close()
            case "kill" if living:
                living.pop(rng.randrange(len(living)))[0].forget()  # as the kernel does it: files closed, and no more
            case _:
                continue
        assert Spool(home, URL).unanswered() == {key(task_id) for task_id in reports}
    for spool, _ in living:
        spool.forget()
    last = Spool(home, URL)
    everything = last.adopt()
    assert sorted(ids(everything)) == sorted(reports)
    last.answered(everything)
    last.close()
    assert not home.exists() or names(home) == []


def test_where_nothing_can_be_locked_nothing_is_left_of_the_try(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks"):
        Spool(home, URL).keep([settlement("a")])
    assert list(home.iterdir()) == []
    assert open_files(home) == 0


def test_files_of_other_services_are_left_alone(home: Path, spool: Spool) -> None:
    dies(home, settlement("a"))
    other = Spool(home, "http://elsewhere:8077")
    assert other.adopt() == []
    assert ids(spool.adopt()) == ["a"]


def test_a_link_to_somewhere_else_is_not_followed(home: Path, tmp_path: Path, spool: Spool) -> None:
    dies(home, settlement("a"))
    [path] = home.iterdir()
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    assert spool.adopt() == []
    assert target.exists()


def test_who_asks_is_no_part_of_the_service() -> None:
    assert key_of("http://a:b@here:1/x") == key_of("http://here:1/x") == key_of("http://c@here:1/x")
    assert key_of("http://here:1/x@y") != key_of("http://here:1/y")
    assert key_of("redis://h/0?x=1") != key_of("redis://h/0?x=2")


@pytest.mark.parametrize(
    "spellings",
    [
        ["http://here:1", "http://here:1/", "HTTP://Here:1", "http://a:b@here:1"],
        ["http://here", "http://here:80", "http://here/"],
        ["https://here", "https://here:443"],
        ["http://a:1,b:2/p", "http://b:2,a:1/p", "http://B:2,a:1,b:2/p/"],
        ["redis://h", "redis://h:6379/0", "redis://u:p@H/0?retention=1d", "redis://h/?retention=2d"],
        ["redis://h/0?prefix=x", "redis://h?retention=1d&prefix=x"],
        ["redis+cluster://h,i:7/?tls=true&prefix=x", "redis+cluster://i:7,h:6379?prefix=x&tls=true"],
        ["rediss://h/0", "rediss://h/0?ssl_ca_certs=ca.pem"],
        ["http://[::1]", "http://[::1]:80"],
        ["sqs://jobs?region=r&ttl=60", "sqs://jobs?wait=20&region=r"],
    ],
)
def test_spellings_of_one_service_have_one_key(spellings: list[str]) -> None:
    assert len(set(map(key_of, spellings))) == 1


def test_services_that_differ_have_keys_of_their_own() -> None:
    urls = [
        "http://here:1", "https://here:1", "http://here:2", "http://there:1", "http://here:1/x", "http://here:1/X",
        "redis://h/0", "redis://h/1", "rediss://h/0", "redis://h/0?prefix=x", "redis+cluster://h", "sqs://jobs",
        "sqs://Jobs", "sqs://jobs?region=r", "sqs://jobs?endpoint=http://here", "memory://a", "memory://A",
        "sqlite:///a.db", "sqlite:////a.db", "no url",
    ]  # fmt: skip
    assert len(set(map(key_of, urls))) == len(urls)
