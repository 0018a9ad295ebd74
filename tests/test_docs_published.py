"""The page on published systems: each capability names what shows it, and was run on PostgreSQL and on SQLite.

How the page looks, and that its links lead somewhere, is tested with the other pages.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from leasekit.testing import contract
from tests.server import test_embedded

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/published-systems.md"

# What has to do with no store of leasekit's own, by the begin of the row: it is tested without one.
OF_WORKERS = (
    "A controller on each host", "Executors are processes", "A consumer takes as much work", "As many tasks in one",
    "A client fetches only", "A result that could not be reported", "Submitting looks like", "A second dispatch",
)  # fmt: skip
OF_REDIS_AND_SQS = ("All structures are in Redis", "Every client moves", "A message stays invisible")
MEASURED = ("How long a task takes",)
HEARTBEATS = "Heartbeats for Amazon SWF"


class Row(NamedTuple):
    """A capability of a published system."""

    system: str
    does: str
    where: str
    shown_by: str

    @property
    def files(self) -> list[Path]:
        links = re.findall(r"\]\((\.\./[^)#]+)", self.shown_by)
        return [(PAGE.parent / link).resolve() for link in links]


def rows() -> Iterator[Row]:
    system = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ")
        if line.startswith("| ") and not line.startswith(("| what it does |", "| --- |")):
            yield Row(system, *(cell.strip() for cell in line.strip("|").split(" | ")))


ROWS = list(rows())


def text(path: Path) -> str:
    files = path.rglob("*.py") if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def stores(path: Path) -> set[str]:
    """The stores of a server over which a file's tests run: those of a fixture, or those that it names."""
    written = text(path)
    if "testing/contract/" in str(path) or re.search(r"\bbench: Bench\b|\bmake_store\b", written):
        return {"postgres", "sqlite"}
    return {store for store in ("postgres", "sqlite") if re.search(rf"\b{store}|{store.title()}", written)}


def test_the_page_has_all_five_systems() -> None:
    assert len({row.system for row in ROWS}) == 5
    assert len({row.does for row in ROWS}) == len(ROWS) > 40
    for begin in (*OF_WORKERS, *OF_REDIS_AND_SQS, *MEASURED):
        assert [row for row in ROWS if row.does.startswith(begin)], f"no row begins with {begin!r}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.does[:40])
def test_each_capability_is_described_located_and_shown_by_a_test(row: Row) -> None:
    assert row.does.endswith(".")
    assert row.where
    assert row.files
    for path in row.files:
        written = text(path)
        is_measured = row.does.startswith(MEASURED)
        is_run = re.search(r"def test_|@scenario\(|Contract\):", written) or path.parent.name == "examples"
        assert is_run or is_measured, f"{path.name} has no test"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.does[:40])
def test_what_a_store_has_to_do_with_was_run_on_postgresql_and_on_sqlite(row: Row) -> None:
    ran = {store for path in row.files for store in stores(path)}
    is_elsewhere = row.does.startswith((*OF_WORKERS, *OF_REDIS_AND_SQS, *MEASURED)) or row.system == HEARTBEATS
    assert ran >= {"postgres", "sqlite"} or is_elsewhere


def test_the_whole_contract_runs_on_postgresql_and_on_sqlite() -> None:
    for suite in (test_embedded.TestOnPostgres, test_embedded.TestOnSqlite):
        assert issubclass(suite, contract.DeadLettersContract)
