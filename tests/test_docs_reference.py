"""The reference has an entry for whatever users may set, call, catch or hear of; what is generated is up to date."""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import leasekit
from leasekit import backend, errors, hooks
from leasekit.cli import app
from leasekit.task import Exponential, NewTask, Status, TaskOptions, Waits

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("_generate")
    finally:
        sys.path.remove(str(DOCS))


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one as high."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    assert found is not None, f"{page} says nothing of {heading}"
    return found[2]


def rows(text: str) -> dict[str, str]:
    """Name in the first cell → the last cell."""
    return {
        cells[0].strip("`* "): cells[-1]
        for line in text.splitlines()
        if line.startswith("| `") and (cells := [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    }


def said(page: str, heading: str, names: Iterable[str]) -> None:
    shown = rows(section(page, heading))
    assert [name for name in names if not shown.get(name)] == [], f"{page}, {heading}: run `make docs`"


def test_what_is_generated_is_up_to_date(generate: ModuleType) -> None:
    files: dict[Path, str] = generate.generated()
    stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"


def test_nothing_in_the_reference_is_left_over_from_what_is_no_more(generate: ModuleType) -> None:
    files: dict[Path, str] = generate.generated()
    there = {*(DOCS / "reference").glob("*"), *(DOCS / "pictures").glob("*")}
    assert there - files.keys() == set()


def test_every_setting_of_beats_has_its_entry() -> None:
    said("reference/settings.md", "Beats", [field.name for field in dataclasses.fields(leasekit.Beats)])


def test_every_option_of_a_task_has_its_entry() -> None:
    said("reference/settings.md", "A task", {*NewTask.__struct_fields__, *TaskOptions.__annotations__})


@pytest.mark.parametrize("policy", [Exponential, Waits])
def test_every_setting_of_a_retry_policy_has_its_entry(policy: type[msgspec.Struct]) -> None:
    said("reference/settings.md", policy.__name__, policy.__struct_fields__)


@pytest.mark.parametrize(
    ("heading", "function"),
    [
        ("connect", leasekit.connect),
        ("lease", leasekit.lease),
        ("Client.tasks", leasekit.Client.tasks),
        ("Worker", leasekit.Worker),
        ("Worker.handler", leasekit.Worker.handler),
        ("Worker.run", leasekit.Worker.run),
    ],
)
def test_every_parameter_has_its_entry(heading: str, function: Any) -> None:
    said("reference/settings.md", heading, inspect.signature(function).parameters.keys() - {"self"})


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_option_of_a_command_has_its_entry(name: str) -> None:
    text = section("reference/commands.md", f"leasekit {name}")
    options = [option for one in app.load(name).params for option in one.opts if option.startswith("--")]
    assert [option for option in options if f"`{option}`" not in text and option != "--help"] == []


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_its_entry(name: str) -> None:
    assert section("reference/errors.md", name).strip()


@pytest.mark.parametrize(
    "event", [one for one in vars(hooks).values() if inspect.isclass(one) and issubclass(one, hooks.Event)]
)
def test_every_event_and_what_is_in_it_has_its_entry(event: Any) -> None:
    own = inspect.get_annotations(event).keys()
    assert own
    said("reference/hooks.md", event.__name__, own)


def test_every_trait_has_its_entry() -> None:
    said("reference/backends.md", "Traits", [field.name for field in dataclasses.fields(backend.Traits)])


@pytest.mark.parametrize("name", [name for name in backend.__all__ if name != "Traits"])
def test_every_method_of_the_seam_has_its_entry(name: str) -> None:
    text = (DOCS / "reference/backends.md").read_text(encoding="utf-8")
    protocol: type = getattr(backend, name)
    methods = [method for method in vars(protocol) if not method.startswith("_") and method != "traits"]
    assert [method for method in methods if f"### {name}.{method}\n" not in text] == []


@pytest.mark.parametrize("name", leasekit.__all__)
def test_every_public_name_is_told_of(name: str) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"^#+ {name}\n|`{name}\b", pages, re.M)


def test_every_status_is_in_the_life_of_a_task() -> None:
    text = (DOCS / "life.md").read_text(encoding="utf-8")
    assert [status for status in Status if f"`{status}`" not in text] == []


def test_every_document_is_in_the_navigation_and_the_other_way_round() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", text))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
