"""`leasekit token` and `leasekit audit`, over a store of their own."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from leasekit.tokens import is_secret
from tests.cli.conftest import Run


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/tasks.db"


def test_a_token_is_made_listed_rotated_and_revoked_and_each_is_in_the_log(
    run: Run, store: str, tmp_path: Path
) -> None:
    made = run("token", "create", "workers", "--store", store, "-s", "work", "-k", "mail.*", "--expires", "90d")
    secret = made.stdout.strip()
    assert is_secret(secret)
    assert secret not in made.stderr
    out = tmp_path / "workers.token"
    assert run("token", "rotate", "workers", "--store", store, "--out", str(out)).stdout == ""
    assert is_secret(out.read_text().strip())
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert run("token", "list", "--store", store).stdout.split("\t")[:4] == ["workers", "valid", "work", "mail.*"]
    shown = json.loads(run("token", "show", "workers", "--store", store, "--json").stdout)
    assert run("token", "revoke", "workers", "--store", store).stdout.split("\t")[1] == "revoked"
    assert run("token", "show", shown["id"], "--store", store).exit_code == 0
    assert run("token", "show", "workers", "--store", store).exit_code == 1
    acts = [line.split("\t")[1:4] for line in run("audit", "--backend", store).stdout.splitlines()]
    assert acts == [["local", f"token.{what}", "workers"] for what in ("revoke", "rotate", "create")]
    assert all(
        secret not in path.read_bytes().decode("latin-1") for path in tmp_path.glob("tasks.db*") if path.is_file()
    )


def test_a_secret_takes_the_place_of_no_device_pipe_or_link(run: Run, store: str, tmp_path: Path) -> None:
    def made(name: str, out: Path) -> str:
        return run("token", "create", name, "--store", store, "-s", "read", "--out", str(out)).stderr

    pipe, file, link = tmp_path / "pipe", tmp_path / "file", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    made("piped", pipe)
    assert is_secret(os.read(reader, 1000).decode().strip())
    os.close(reader)
    assert pipe.is_fifo()
    file.write_text("of somebody")
    link.symlink_to(file)
    assert "cannot be written to" in (said := made("linked", link))
    assert "(a link is there): nothing was changed, so give another --out" in said
    assert file.read_text() == "of somebody"
    assert link.is_symlink()
    assert "cannot be written to" in made("folder", tmp_path)
    assert "cannot be written to" in made("nothing", Path())
    assert "cannot be written to" in made("under", file / "out")
    assert "cannot be written to" in made("missing", tmp_path / "missing" / "file")
    assert run("token", "list", "--store", store).stdout.split("\t")[0] == "piped"
    assert sorted(path.name for path in tmp_path.iterdir() if "tasks.db" not in path.name) == ["file", "link", "pipe"]


def test_nothing_is_changed_if_the_disk_is_full_or_a_name_too_long(
    run: Run, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("token", "create", "t", "--store", store, "-s", "read").stdout

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    long = run("token", "rotate", "t", "--store", store, "--out", str(tmp_path / ("n" * 300)))
    monkeypatch.setattr(os, "fsync", full)
    on_full = run("token", "rotate", "t", "--store", store, "--out", str(tmp_path / "out"))
    for done, why in ((long, "File name too long"), (on_full, "No space left on device")):
        assert f"({why}): nothing was changed, so give another --out" in done.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    out = tmp_path / ("n" * 250)
    run("token", "rotate", "t", "--store", store, "--out", str(out))
    assert is_secret(out.read_text().removesuffix("\n"))
    assert out.read_text() != first


@pytest.mark.parametrize(
    "arguments",
    [("create", "a"), ("create", "a", "-s", "all"), ("list", "a"), ("show",), ("revoke", "a", "-s", "read")],
)
def test_wrong_usage_is_said(run: Run, store: str, arguments: tuple[str, ...]) -> None:
    assert run("token", *arguments, "--store", store).exit_code == 2
