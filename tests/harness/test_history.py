"""The log of what happened: what is written is what is read."""

from pathlib import Path

import pytest

from harness.history import Effect, FaultsOver, Granted, Log, Started, decode, encode, merge, read


def test_what_is_added_is_stamped_with_the_time_and_the_writer(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl", who="worker-1", now=lambda: 7.5) as log:
        log.add(Started, task="a", fence=1)
    assert read(tmp_path / "log.jsonl") == [Started(at=7.5, who="worker-1", task="a", fence=1)]


def test_an_event_is_one_line_of_json_that_leaves_out_what_says_nothing() -> None:
    line = encode(Effect(at=1.0, who="w", task="a", fence=2))
    assert line == b'{"event":"Effect","at":1.0,"who":"w","task":"a","fence":2}'
    assert decode(line) == Effect(at=1.0, who="w", task="a", fence=2)


def test_what_somebody_else_did_can_be_written_too(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl", who="harness", now=lambda: 1.0) as log:
        log.add(FaultsOver, at=3.0, who="world")
    assert read(tmp_path / "log.jsonl") == [FaultsOver(at=3.0, who="world")]


def test_no_more_of_a_token_is_written_than_its_beginning(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl", who="w") as log:
        log.add(Granted, task="a", fence=1, token="0123456789", attempt=1, ttl=300.0, asked_at=0.0)
    assert b"012345" in (tmp_path / "log.jsonl").read_bytes()
    assert b"0123456" not in (tmp_path / "log.jsonl").read_bytes()


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    times = iter([3.0, 1.0, 2.0])
    for name in ("a", "b", "c"):
        with Log(tmp_path / name, who=name, now=lambda: next(times)) as log:
            log.add(FaultsOver)
    assert [event.who for event in read(*(tmp_path / name for name in "abc"))] == ["b", "c", "a"]


def test_events_of_one_moment_keep_the_order_in_which_they_were_written() -> None:
    first, second = FaultsOver(at=1.0, who="a"), FaultsOver(at=1.0, who="b")
    assert merge([[first, second]]) == [first, second]


def test_a_line_that_a_kill_cut_off_is_skipped(tmp_path: Path) -> None:
    with Log(tmp_path / "log.jsonl", who="w", now=lambda: 1.0) as log:
        log.add(FaultsOver)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"event":"Effect","at":1.0,"wh')
    assert read(tmp_path / "log.jsonl") == [FaultsOver(at=1.0, who="w")]


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"event":"FaultsOver","at":1.0,"who":"w"}\n{}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: this is no event"):
        read(tmp_path / "log.jsonl")


def test_two_writers_may_share_a_file(tmp_path: Path) -> None:
    with Log(tmp_path / "log", who="a", now=lambda: 1.0) as one, Log(tmp_path / "log", who="b", now=lambda: 1.0) as two:
        one.add(FaultsOver)
        two.add(FaultsOver)
        one.add(FaultsOver)
    assert [event.who for event in read(tmp_path / "log")] == ["a", "b", "a"]
