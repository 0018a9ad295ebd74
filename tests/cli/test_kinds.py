"""`leasekit kinds`: what operators type, and the file that they keep."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasekit.backend import KindDirectory
from leasekit.cli.settings_text import FORMS, parsed, shown
from leasekit.client import Client
from leasekit.task import CompleteSettings, Exponential, FixedDelays, KindInfo, KindSettings, Polynomial
from tests.cli.conftest import Run, Server, Start


def of(client: Client, kind: str) -> KindSettings | None:
    info = client.kind(kind)
    return None if info is None else info.settings


def test_kinds_are_listed_with_their_settings(run: Run, client: Client) -> None:
    assert run("kinds").stdout == ""
    client.set_kind("report", KindSettings(max_attempts=None, retention=7 * 86_400.0))
    client.set_kind("mail", KindSettings(retry=FixedDelays(waits=[10, 90])))
    first, second = (line.split("\t") for line in run("kinds").stdout.splitlines())
    assert first[:2] == ["mail", "retry=10,90"]
    assert second[:2] == ["report", "max_attempts=none retention=7d"]
    assert json.loads(run("kinds", "--json").stdout.splitlines()[1])["settings"] == {
        "max_attempts": None,
        "retention": 604800.0,
    }


def test_one_kind_is_shown_with_where_each_setting_comes_from(run: Run, client: Client) -> None:
    client.set_kind("report", KindSettings(max_attempts=3))
    lines = [line.split("\t") for line in run("kinds", "show", "report").stdout.splitlines()]
    assert [name for name, _, _ in lines] == [*FORMS]
    assert ["max_attempts", "3", "kind"] in lines
    assert ["heartbeat_timeout", "5m", "default"] in lines
    assert ["retention", "-", "service"] in lines
    assert json.loads(run("kinds", "show", "report", "--json").stdout)["settings"] == {"max_attempts": 3}
    missing = run("kinds", "show", "other", "--json")
    assert (missing.exit_code, missing.stderr) == (1, "leasekit kinds: the kind 'other' has no settings\n")


def test_a_setting_is_changed_and_the_others_stay(run: Run, client: Client) -> None:
    assert run("kinds", "set", "report", "max_attempts=3", "retention=7d").stdout.splitlines() == [
        "report: max_attempts default (25) → 3",
        "report: retention default → 7d",
    ]
    done = run("kinds", "set", "report", "max_attempts=4", "retention=default")
    assert done.stdout.splitlines() == ["report: max_attempts 3 → 4", "report: retention 7d → default"]
    assert of(client, "report") == KindSettings(max_attempts=4)
    assert "nothing changes" in run("kinds", "set", "report", "max_attempts=4").stderr


def test_settings_that_others_change_at_the_same_moment_stay(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []

    def changed_meanwhile(of: Client, kind: str, settings: KindSettings, **options: Any) -> KindInfo:
        monkeypatch.undo()
        client.set_kind(kind, KindSettings(priority=0))
        writes.append(kind)
        return of.set_kind(kind, settings, **options)

    monkeypatch.setattr(Client, "set_kind", changed_meanwhile)
    assert run("kinds", "set", "report", "concurrency=4").stdout == "report: concurrency default → 4\n"
    assert (of(client, "report"), writes) == (KindSettings(priority=0, concurrency=4), ["report"])


def test_a_task_from_the_shell_has_the_settings_of_its_kind_and_its_own_options(run: Run, client: Client) -> None:
    run("kinds", "set", "report", "priority=0", "max_attempts=1")
    run("schedule", "report", "--id", "usual")
    run("schedule", "report", "--id", "late", "--priority", "2")
    usual, late = client.get("usual"), client.get("late")
    assert usual is not None
    assert late is not None
    assert (usual.priority, late.priority) == (0, 2)


def test_a_reset_removes_all_settings(run: Run, client: Client) -> None:
    client.set_kind("report", KindSettings(max_attempts=3))
    assert run("kinds", "reset", "report", "other").stdout == "report: max_attempts 3 → default (25)\n"
    assert client.kinds() == []
    client.set_kind("report", KindSettings(max_attempts=3))
    run("kinds", "set", "report", "max_attempts=default")
    assert client.kinds() == []


def test_what_code_declares_is_shown_as_such_and_stays_removed_where_it_was_by_hand(run: Run, client: Client) -> None:
    directory = client.__connection__().backend
    assert isinstance(directory, KindDirectory)
    declared = partial(directory.set_kind, "report", KindSettings(max_attempts=3), is_declared=True)
    client.__connection__().run(declared())
    assert "max_attempts\t3\tcode" in run("kinds", "show", "report").stdout
    run("kinds", "set", "report", "max_attempts=4", "priority=1")
    lines = run("kinds", "show", "report").stdout.splitlines()
    assert {"max_attempts\t4\tkind", "priority\t1\tkind"} < {*lines}
    run("kinds", "set", "report", "max_attempts=default", "priority=default")
    client.__connection__().run(declared())
    assert of(client, "report") == KindSettings()
    run("kinds", "reset", "report")
    assert of(client, "report") is None
    client.__connection__().run(declared())
    assert of(client, "report") == KindSettings(max_attempts=3)


FILE = """
[report]
max_attempts = 4
retry = ["10s", 60, "10m"]
retention = "7d"

["kind with spaces"]
claim_timeout = "none"
priority = 0
expiry = "retry"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kinds.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_a_file_is_shown_as_what_it_would_change_and_applied_with_yes(run: Run, client: Client, file: Path) -> None:
    client.set_kind("report", KindSettings(max_attempts=3, priority=1))
    client.set_kind("other", KindSettings(priority=1))
    lines = [
        "report: priority 1 → default (2)",
        "report: max_attempts 3 → 4",
        "report: retry default (exponential) → 10,1m,10m",
        "report: retention default → 7d",
        "kind with spaces: priority default (2) → 0",
        "kind with spaces: expiry default (crash) → retry",
        "kind with spaces: claim_timeout default (none) → none",
    ]
    for flags in ([], ["--dry-run"]):
        done = run("kinds", "apply", str(file), *flags)
        assert (done.exit_code, done.stdout.splitlines()) == (0, lines)
        assert done.stderr == "leasekit kinds: 7 would change: --yes changes them\n"
    done = run("kinds", "apply", str(file), "--yes")
    assert (done.stdout.splitlines(), done.stderr) == (lines, "leasekit kinds: 7 changed\n")
    assert of(client, "report") == KindSettings(
        max_attempts=4, retry=FixedDelays(waits=[10, 60, 600]), retention=604800
    )
    assert of(client, "kind with spaces") == KindSettings(claim_timeout=None, priority=0, expiry="retry")
    assert of(client, "other") == KindSettings(priority=1)
    assert run("kinds", "apply", str(file), "--yes").stderr == "leasekit kinds: nothing changes\n"


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked_before_a_file_is_applied(
    terminal: Start, server: Server, tmp_path: Path, answer: str
) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text(f"[asked-{answer}]\npriority = 0\n", encoding="utf-8")
    applying = terminal("kinds", "apply", str(path))
    assert f"asked-{answer}: priority default (2) → 0" in applying.until("Change them?")
    applying.type(f"{answer}\n")
    assert applying.ended() == 0
    shown = server.command("kinds", "show", f"asked-{answer}").stdout
    assert ("priority\t0\tkind" in shown) is (answer == "y")


def test_kinds_that_are_not_in_the_file_are_reset_if_asked(run: Run, client: Client, file: Path) -> None:
    client.set_kind("other", KindSettings(priority=1))
    assert "other: priority 1 → default (2)" in run("kinds", "apply", str(file), "--yes", "--prune").stdout
    assert [info.kind for info in client.kinds()] == ["kind with spaces", "report"]


def test_gates_of_a_file_are_shown_and_closed_and_opened(run: Run, client: Client, file: Path) -> None:
    client.set_kind("mail", KindSettings(priority=1))
    client.pause(kind="other", reason="by hand")
    client.pause(collection="back")
    file.write_text(
        """
        [report]
        priority = 0
        gate = { mode = "pause", reason = "a bad release", until = 2999-01-01T00:00:00Z }
        [mail.gate]
        mode = "drop"
        until = "2001-01-01T00:00:00Z"
        [collections.tenant-7]
        gate = "drop"
        [collections.back]
        gate = "open"
        """,
        encoding="utf-8",
    )
    for flags in (["--dry-run"], ["--yes"]):
        lines = run("kinds", "apply", str(file), *flags).stdout.splitlines()
        assert lines[0] == "report: priority default (2) → 0"
        assert lines[1].startswith("report: gate open → pause until 2999-01-0")
        assert lines[1].endswith(" (a bad release)")
        assert lines[2:] == ["collection tenant-7: gate open → drop", "collection back: gate pause → open"]
    closed = [(gate.kind, gate.collection, gate.mode, gate.reason) for gate in client.gates()]
    assert closed == [
        ("other", None, "pause", "by hand"),
        ("report", None, "pause", "a bad release"),
        (None, "tenant-7", "drop", None),
    ]
    assert of(client, "mail") == KindSettings(priority=1)  # its table has a gate alone
    assert run("kinds", "apply", str(file), "--yes", "--prune").stderr == "leasekit kinds: nothing changes\n"


def test_all_errors_of_the_gates_of_a_file_are_told_at_once(run: Run, client: Client, file: Path) -> None:
    file.write_text(
        """
        [report]
        gate = "shut"
        [mail.gate]
        reason = "no mode"
        [fax.gate]
        mode = "pause"
        until = 2030-01-01T00:00:00
        [tea.gate]
        mode = "pause"
        duration = 60
        [collections.a]
        priority = 1
        [collections.""]
        gate = "pause"
        """,
        encoding="utf-8",
    )
    done = run("kinds", "apply", str(file), "--yes")
    assert done.exit_code == 2
    write = "write open, pause or drop, or a table of mode, reason, and until (a time with its offset)"
    assert [line.removeprefix(f"leasekit kinds: {file}: ") for line in done.stderr.splitlines()] == [
        f"[report] gate cannot be 'shut': {write}",
        f"[mail] gate cannot be {{'reason': 'no mode'}}: {write}",
        f"[fax] gate cannot be {{'mode': 'pause', 'until': datetime.datetime(2030, 1, 1, 0, 0)}}: {write}",
        f"[tea] gate cannot be {{'mode': 'pause', 'duration': 60}}: {write}",
        f"[collections.a] has a gate and nothing else: {write.replace('write', 'write gate =')}",
        "[collections.] is no name of a collection: it must have 1 to 128 printable ASCII characters",
    ]
    assert client.gates() == []
    file.write_text("collections = 1", encoding="utf-8")
    assert "'collections' is no table: write [collections.NAME]" in run("kinds", "apply", str(file)).stderr


def test_all_errors_of_a_file_are_told_at_once_and_nothing_is_changed(run: Run, client: Client, file: Path) -> None:
    file.write_text(
        FILE
        + """
[bad]
max_atempts = 3
priority = 5
retention = "soon"
retry = true
expiry = 1979-05-27
[empty]
["named:leader"]
["a/b"]
""",
        encoding="utf-8",
    )
    file.write_text("loose = 1\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    done = run("kinds", "apply", str(file), "--yes")
    assert done.exit_code == 2
    assert [line.removeprefix(f"leasekit kinds: {file}: ") for line in done.stderr.splitlines()] == [
        "'loose' is no table: write [KIND] above the settings of a kind",
        "[bad] there is no setting 'max_atempts': did you mean max_attempts?",
        "[bad] priority cannot be 5: write 0 (the most urgent) to 4",
        "[bad] retention cannot be 'soon': write a minute to 10 years, as 12h or 7d",
        f"[bad] retry cannot be True: write {FORMS['retry']}",
        "[bad] expiry cannot be datetime.date(1979, 5, 27): write crash or retry",
        "'named:leader' stands for the lease of a name, which has no settings: leave it out",
        "'a/b' is no kind: it must have 1 to 128 printable ASCII characters, and no slash",
    ]
    assert client.kinds() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frob"], "use list, show, set, reset or apply"),
        (["show"], "write: leasekit kinds show KIND"),
        (["set", "report"], "write: leasekit kinds set KIND NAME=VALUE"),
        (["list", "more"], "write: leasekit kinds list"),
        (["set", "report", "max_attempts"], "write max_attempts=VALUE"),
        (["set", "report", "max_attempts=0"], "max_attempts cannot be '0': write 1 to 1000000, or none for no limit"),
        (["set", "report", "priority=1", "priority=2"], "priority is given twice: give it once"),
        (["set", "report", "heartbeat_timeout=1"], "heartbeat_timeout cannot be '1'"),
        (["set", "report", "color=red"], "there is no setting 'color': they are priority,"),
        (["set", "report", "priority=1", "--yes"], "it goes with apply"),
        (["apply", "missing.toml"], "the file 'missing.toml' cannot be read: No such file"),
        (["apply", "x", "--yes", "--dry-run"], "it contradicts --yes"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_what_cannot_be_meant_is_wrong_usage(run: Run, arguments: list[str], says: str) -> None:
    done = run("kinds", *arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_all_errors_of_a_command_are_told_at_once(run: Run) -> None:
    done = run("kinds", "set", "report", "max_attempts=0", "priority=9")
    assert [line.split()[2] for line in done.stderr.splitlines()] == ["max_attempts", "priority"]


def test_a_file_that_is_no_toml_is_refused(run: Run, file: Path) -> None:
    file.write_text("[report", encoding="utf-8")
    done = run("kinds", "apply", str(file))
    assert (done.exit_code, "is not TOML" in done.stderr) == (2, True)


def test_a_kind_of_a_name_is_refused_by_the_service(run: Run) -> None:
    done = run("kinds", "set", "named:leader", "priority=1")
    assert (done.exit_code, "stands for the lease of a name" in done.stderr) == (1, True)


seconds = st.floats(2, 365 * 86400, allow_nan=False).map(lambda it: round(it, 3)) | st.integers(2, 10**7).map(float)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.integers(0, 4),
    "max_attempts": st.none() | st.integers(1, 1_000_000),
    "max_crashes": st.integers(0, 1_000_000),
    "max_runtime": st.none() | seconds,
    "expiry": st.sampled_from(["crash", "retry"]),
    "enqueue_timeout": seconds,
    "claim_timeout": st.none() | seconds,
    "heartbeat_timeout": seconds,
    "retry": st.just(Polynomial())
    | st.builds(Exponential, first=seconds, jitter=st.sampled_from([0.0, 0.5]))
    | st.builds(FixedDelays, waits=st.lists(seconds, min_size=1, max_size=5)),
    "dedupe_window": st.none() | seconds,
    "start_deadline": st.none() | seconds,
    "retention": seconds.filter(lambda it: it >= 60),
    "concurrency": st.integers(1, 1_000_000),
    "key_concurrency": st.integers(1, 1_000_000),
    "rate": st.floats(1e-6, 1e5)
    | st.tuples(st.integers(1, 1000), st.sampled_from([1, 60, 3600, 86_400])).map(lambda it: it[0] / it[1]),
    "burst": st.integers(1, 1_000_000),
    "key_rate": st.floats(1e-6, 1e5) | st.integers(1, 1000).map(lambda it: it / 60),
    "key_burst": st.integers(1, 1_000_000),
    "weight": st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0]),
    "aging": seconds,
    "fair": st.booleans(),
    "ordered": st.booleans(),
}


@settings(max_examples=200)
@given(st.sampled_from([*VALUES]).flatmap(lambda name: st.tuples(st.just(name), VALUES[name])))
def test_what_is_shown_of_a_setting_can_be_typed(setting: tuple[str, Any]) -> None:
    name, value = setting
    assert parsed(name, shown(name, value)) == value


def test_every_setting_can_be_typed() -> None:
    of_keys = {"fair", "ordered", "key_concurrency", "key_rate", "key_burst"}
    of_kind = {"retention", "concurrency", "rate", "burst", "weight", "aging", *of_keys}
    assert {*FORMS} == {*KindSettings.__struct_fields__} == {*CompleteSettings.__struct_fields__, *of_kind}
    assert {*FORMS} == {*VALUES}


def test_a_rate_is_given_by_the_time_in_which_it_is_a_whole_number(run: Run, client: Client) -> None:
    assert run("kinds", "set", "report", "rate=30/m").stdout == "report: rate default → 30/m\n"
    assert run("kinds", "set", "report", "rate=7/m", "burst=2").stdout.splitlines()[0] == "report: rate 30/m → 7/m"
    assert of(client, "report") == KindSettings(rate=7 / 60, burst=2)


def test_a_burst_without_a_rate_is_refused(run: Run, file: Path) -> None:
    done = run("kinds", "set", "report", "burst=2")
    assert (done.exit_code, done.stderr) == (2, "leasekit kinds: burst needs a rate: set that too\n")
    run("kinds", "set", "report", "rate=1", "burst=2")
    assert "burst needs a rate" in run("kinds", "set", "report", "rate=default").stderr
    file.write_text("[report]\nburst = 2\n[mail]\nrate = 0", encoding="utf-8")
    done = run("kinds", "apply", str(file), "--yes")
    assert done.exit_code == 2
    assert "[report] burst needs a rate" in done.stderr
    assert "[mail] rate cannot be 0" in done.stderr
