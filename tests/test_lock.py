"""The lock: it satisfies pyproject.toml, pins by hash, and names no address."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
LOCKS = ["dev", "docs", "run"]


def text(lock: str) -> str:
    return (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")


def pins(lock: str) -> dict[str, str]:
    """name → version."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text(lock), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def required(group: str) -> Iterator[Requirement]:
    """What `pip install leasekit[server]` and a dependency group ask for."""
    extras = PROJECT["optional-dependencies"]
    server = [*extras["server"], *extras["http"], *extras["cli"]]
    own = [line for line in PYPROJECT["dependency-groups"][group] if isinstance(line, str)]
    for line in [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"], *server, *own]:
        if not line.startswith("leasekit["):
            yield Requirement(line)


@pytest.mark.parametrize(("lock", "group"), [("dev", "dev"), ("run", "build")])
def test_the_lock_satisfies_the_project(lock: str, group: str) -> None:
    pinned = pins(lock)
    wanting = [str(one) for one in required(group) if pinned.get(canonicalize_name(one.name), "") not in one.specifier]
    assert not wanting, "run `make lock`"


def test_the_lock_of_the_documents_satisfies_its_group() -> None:
    pinned = pins("docs")
    wanted = map(Requirement, PYPROJECT["dependency-groups"]["docs"])
    assert all(pinned.get(canonicalize_name(one.name), "") in one.specifier for one in wanted), "run `make lock`"


def test_the_locks_of_developers_and_documents_agree() -> None:
    dev, docs = pins("dev"), pins("docs")
    assert {name: dev[name] for name in dev.keys() & docs.keys()}.items() <= docs.items()


def test_what_runs_for_users_is_what_developers_test() -> None:
    assert pins("run").items() <= pins("dev").items()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_a_hash(lock: str) -> None:
    entries = re.split(r"^(?=[\w.-]+==)", text(lock), flags=re.MULTILINE)[1:]
    assert [entry.partition(" ")[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_says_nothing_of_where_it_was_made(lock: str) -> None:
    assert "://" not in text(lock)
    assert [
        line for line in text(lock).splitlines() if re.match(r"\s*(-i|--index|--extra-index|--find-links)\b", line)
    ] == []
    assert [path for path in re.findall(r"# +(?:via )?(?:-[rc] )?(\S*/\S*)", text(lock)) if path.startswith("/")] == []
