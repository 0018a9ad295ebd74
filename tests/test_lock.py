"""The lock: it satisfies pyproject.toml, pins by hash, and names no address."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
LOCKS = ["dev", "docs", "lowest", "run"]


def text(lock: str) -> str:
    return (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8")


def pins(lock: str) -> dict[str, str]:
    """name → version."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text(lock), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def of_extra(extra: str) -> Iterator[Requirement]:
    """What `pip install leasekit[extra]` asks for, beside what every install does."""
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "leasekit":
            for other in requirement.extras:
                yield from of_extra(other)
        else:
            yield requirement


def of_group(group: str) -> Iterator[Requirement]:
    for line in PYPROJECT["dependency-groups"][group]:
        yield from [Requirement(line)] if isinstance(line, str) else of_group(line["include-group"])


def required(extra: str, group: str) -> Iterator[Requirement]:
    yield from map(Requirement, [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"]])
    yield from of_extra(extra)
    yield from of_group(group)


@pytest.mark.parametrize(
    ("lock", "extra", "group"), [("dev", "all", "dev"), ("run", "server", "build"), ("lowest", "all", "tests")]
)
def test_the_lock_satisfies_the_project(lock: str, extra: str, group: str) -> None:
    pinned, wanted = pins(lock), required(extra, group)
    wanting = [str(one) for one in wanted if pinned.get(canonicalize_name(one.name), "") not in one.specifier]
    assert not wanting, "run `make lock`"


def test_the_lowest_lock_has_the_lowest_version_of_each_dependency() -> None:
    pinned, lowest = pins("lowest"), [*map(Requirement, PROJECT["dependencies"]), *of_extra("all")]
    higher = [str(one) for one in lowest if Version(pinned[canonicalize_name(one.name)]) not in at_the_bound(one)]
    assert not higher, "raise the bound to the version in requirements/lowest.txt, or `make lock LOCK_FLAGS=--upgrade`"


def at_the_bound(requirement: Requirement) -> SpecifierSet:
    """`x>=1.2` → `==1.2.*`: 1.2 itself, or 1.2.1 where 1.2 is not on the index."""
    (bound,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return SpecifierSet(f"=={bound}.*")


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


def test_a_celery_worker_on_redis_has_all_that_kombu_imports() -> None:
    """kombu[redis] pins the version of packaging, and kombu itself does not require it."""
    assert "packaging" in {one.name for one in of_extra("celery")}
