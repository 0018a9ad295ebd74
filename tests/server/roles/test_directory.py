"""The directory of workers: its bound, which access tokens share, and what is said of workers that are forgotten."""

import pytest

from leasekit.server.roles import directory
from leasekit.server.roles.directory import SEEN_FOR, Directory
from leasekit.wire import WorkerWindow


def heard(here: Directory, *names: str, caller: str, at: float = 0.0, kinds: int = 1, length: int = 20) -> None:
    for name in names:
        here.hear(name, at, caller=caller)
        here.claims(name, [f"{name}-{kind}".ljust(length, "k") for kind in range(kinds)], caller=caller)


def names_of(here: Directory) -> set[str]:
    return set(here.roster({}).names)


def test_a_full_directory_forgets_workers_of_the_token_with_most_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "_MOST", 100_000)
    left: list[str] = []
    here = Directory(left.append)
    heard(here, *(f"b{n}" for n in range(10)), caller="b")
    heard(here, *(f"a{n}" for n in range(1000)), caller="a")
    known = names_of(here)
    assert {f"b{n}" for n in range(10)} < known
    kept = len(known) - 10
    assert 25 < kept < 40
    assert known == {*(f"b{n}" for n in range(10)), *(f"a{n}" for n in range(1000 - kept, 1000))}
    assert left == [f"a{n}" for n in range(1000 - kept)]
    here.hear(f"a{1000 - kept}", 1.0, caller="a")
    heard(here, "more", caller="a")
    assert {f"a{1000 - kept}", "more"} < names_of(here)  # one that has called since is not the oldest
    assert f"a{1001 - kept}" not in names_of(here)


def test_the_kinds_and_labels_of_a_worker_count_and_what_is_forgotten_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directory, "_MOST", 1_000_000)
    here = Directory()
    heard(here, *map(str, range(100)), caller="a", kinds=100, length=128)
    assert 30 < len(here) < 50
    for _ in range(3):  # the same kinds count once
        heard(here, *names_of(here), caller="a", kinds=100, length=128)
    assert 30 < len(here) < 50
    here.claims("99", (), {f"label{n}": "v" * 5000 for n in range(16)}, caller="a")
    few = len(here)
    heard(here, "99", caller="a")
    heard(here, *map(str, range(1000, 1010)), caller="a")
    assert few < 45
    here.forget(before=1.0)
    assert (len(here), here._bytes.total, here._of) == (0, 0, {})


def test_a_fleet_of_five_thousand_workers_with_fifty_kinds_fits() -> None:
    here = Directory()
    heard(here, *(f"worker-{n}" for n in range(5000)), caller="a", kinds=50, length=100)
    assert len(here) == 5000


def test_a_worker_counts_for_the_token_of_its_last_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_MOST", 100_000)
    here = Directory()
    heard(here, "b1", "b2", caller="b")
    heard(here, "b1", caller="a", kinds=900, length=40)  # which knows the name of the other
    assert names_of(here) == {"b2"}
    heard(here, "b1", caller="b")
    assert here.roster({}).tokens("b1") == {"", "b"}


def test_a_name_that_comes_back_was_also_used_by_somebody_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Directory()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "_MOST", 0)
        heard(here, "w", caller="a")
    assert len(here) == 0
    heard(here, "w", "other", caller="b", at=SEEN_FOR - 1)
    assert here.roster({}).tokens("w") == {"", "b"}
    assert here.roster({}).tokens("other") == {"b"}
    here.forget(before=3 * SEEN_FOR)
    heard(here, "w", caller="b", at=3 * SEEN_FOR)
    assert here.roster({}).tokens("w") == {"b"}


def test_a_node_that_has_forgotten_workers_tells_the_others_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Directory()
    heard(here, "a", caller="a")
    assert here.roster({}, [here.written(0.0) or b""]).is_whole
    with monkeypatch.context() as patch:
        patch.setattr(directory, "_MOST", 0)
        heard(here, "a", caller="a")
    assert not here.roster({}, [here.written(100.0) or b""]).is_whole


def test_what_a_node_writes_leaves_out_workers_of_the_token_with_most() -> None:
    here, there = Directory(), Directory()
    heard(here, "first", caller="a")
    heard(here, *(f"b{n}" for n in range(10)), caller="b")
    heard(here, *(f"a{n}" for n in range(10_000)), caller="a")
    roster = there.roster({}, [here.written(0.0) or b""])
    assert {"a9999", *(f"b{n}" for n in range(10))} < roster.names
    assert "first" not in roster.names


def test_a_page_of_workers_ends_where_it_has_very_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PAGE", 10_000)
    here = Directory()
    heard(here, *(f"w{n}" for n in range(9)), caller="a", kinds=50, length=100)
    names: list[str] = []
    has_more, pages = True, 0
    while has_more:
        found, has_more = here.roster({}).page(after=names[-1] if names else "", limit=1000)
        names += [worker.name for worker in found]
        pages += 1
    assert (names, pages) == ([f"w{n}" for n in range(9)], 3)


def test_the_window_of_a_worker_that_was_not_heard_is_not_kept() -> None:
    here = Directory()
    here.note_window("w", WorkerWindow(size=1))
    assert len(here) == 0
