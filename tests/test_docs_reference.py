"""The reference has whatever users may set, call, catch or hear of, and it has something to say of it."""

import ast
import dataclasses
import functools
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import leasekit
from leasekit import backend, config, errors, hooks, registry, task, telemetry
from leasekit.queues import TaskQueues
from leasekit.registry import open_backend
from leasekit.task import Status
from leasekit.testing import clock, contract, effects, faults, memory

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
SHOWN = [name for text in PAGES.values() for name in re.findall(r"^::: (leasekit\.[\w.]+)$", text, re.M)]
PUBLIC = [
    leasekit, backend, config, errors, hooks, registry, task, telemetry, clock, contract, effects, faults, memory,
]  # fmt: skip


def shown() -> Iterator[Any]:
    """All that the reference has an entry for: what a page names, and of a module all that is public."""
    for thing in map(pkgutil.resolve_name, SHOWN):
        if isinstance(thing, ModuleType):
            yield from (getattr(thing, name) for name in thing.__all__)
        else:
            yield thing


# The options of a task have their meanings in `NewTask`, the fields of a history's events say what they are, and a
# contract is tests.
CLASSES = sorted(
    {
        thing
        for thing in shown()
        if inspect.isclass(thing)
        and thing not in (task.TaskOptions, task.TaskDefaults, task.Selection)
        and thing.__module__.partition("leasekit.testing.")[2] not in {"contract.base", "contract.suites"}
    },
    key=lambda cls: cls.__qualname__,
)
# What every backend has.
TOLD_ELSEWHERE = {
    "capabilities",
    *dir(backend.Backend),
    *dir(backend.Scheduler),
    *dir(backend.CancelSource),
    *dir(backend.EndSource),
    *dir(backend.NameSource),
    *dir(backend.WorkerDirectory),
    *dir(backend.WorkerDrainer),
    *dir(backend.NodeDirectory),
    *dir(backend.KindDirectory),
    *dir(backend.PeriodicDirectory),
    *dir(backend.TokenDirectory),
    *dir(backend.GateDirectory),
    *dir(backend.ChainDirectory),
    *dir(backend.Rescheduler),
    *dir(backend.BulkChanger),
    *dir(backend.DeadLetters),
    *dir(backend.TicketSource),
    *dir(TaskQueues),
}


@functools.cache
def definition(cls: type) -> ast.ClassDef:
    tree = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def told(node: ast.stmt, after: ast.stmt | None) -> bool:
    """Whether a definition has a docstring: a field has the string below it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        # An overload has that of its function.
        return ast.get_docstring(node) is not None or any("overload" in ast.unparse(d) for d in node.decorator_list)
    return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)


def name_of(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return "_"


def test_a_page_names_nothing_twice() -> None:
    assert len(set(SHOWN)) == len(SHOWN)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    known = list(shown())
    missing = [name for name in module.__all__ if not any(getattr(module, name) is thing for thing in known)]
    assert missing == [], "add `::: module.name` to a page of docs/reference"


# What has none is left out of the pages.
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_public_member_of_a_class_has_a_docstring(cls: type) -> None:
    body = definition(cls).body
    without = {name_of(node) for node, after in zip(body, [*body[1:], None], strict=True) if not told(node, after)}
    assert {name for name in without if not name.startswith("_")} - TOLD_ELSEWHERE == set()


@pytest.mark.parametrize(
    "function",
    [leasekit.connect, leasekit.lease, leasekit.Client.tasks, leasekit.Worker, leasekit.Worker.handler],
    ids=lambda function: function.__qualname__,
)
def test_every_parameter_is_told_of(function: Any) -> None:
    told = re.findall(r"^    (\w+): ", (inspect.getdoc(function) or "").partition("\nArgs:\n")[2], re.M)
    assert told == [name for name in inspect.signature(function).parameters if name != "self"]


URLS = (
    "http://host", "sqlite:///file.db", "postgresql://host/tasks", "redis://host", "redis+cluster://host", "sqs://queue?region=x",
    "swf://domain/list?region=x", "sfn://arn:aws:states:x:123456789012:activity:a?region=x", "memory://",
)  # fmt: skip


def cell(value: int | None) -> str:
    if value is None:
        return "any"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"


def test_the_table_of_backends_has_what_each_declares() -> None:
    ours = {url.partition("://")[0]: open_backend(url, worker="docs") for url in URLS}  # opens nothing
    capabilities = [field.name for field in dataclasses.fields(backend.Capabilities)]
    protocols = (
        backend.TaskSink, backend.Scheduler, backend.CancelSource, backend.EndSource, backend.NameSource,
        backend.WindowListener, backend.WorkerDirectory, backend.WorkerDrainer, backend.NodeDirectory,
        backend.KindDirectory,
        backend.PeriodicDirectory, backend.TokenDirectory, backend.GateDirectory, backend.ChainDirectory,
        backend.Rescheduler, backend.BulkChanger, backend.DeadLetters, backend.Purger, backend.TicketSource,
    )  # fmt: skip
    rows = [
        ["", *ours],
        *([name, *(cell(getattr(one.capabilities, name)) for one in ours.values())] for name in capabilities),
    ]
    rows += [[cls.__name__, *(cell(isinstance(one, cls)) for one in ours.values())] for cls in protocols]
    lines = [line for line in PAGES[DOCS / "reference/backends.md"].splitlines() if line.startswith("| ")]
    assert [[text.strip(" `") for text in line.split("|")[1:-1]] for line in lines] == rows


def test_the_reference_has_what_opens_each_scheme_of_urls() -> None:
    entries = importlib.metadata.distribution("leasekit").entry_points.select(group="leasekit.backends")
    text = "\n".join(PAGES.values())
    missing = [one.name for one in entries if not re.search(rf"^::: {one.module}(\.{one.attr})?$", text, re.M)]
    assert missing == []


def test_the_page_on_installation_has_every_extra() -> None:
    extras = importlib.metadata.metadata("leasekit").get_all("Provides-Extra") or []
    table = "".join(re.findall(r"^\|.*$", (DOCS / "installation.md").read_text(encoding="utf-8"), re.M))
    assert [extra for extra in extras if f"`{extra}`" not in table] == []


def test_every_status_is_in_the_life_of_a_task() -> None:
    text = (DOCS / "life.md").read_text(encoding="utf-8")
    assert [status for status in Status if f"`{status}`" not in text] == []


def test_every_document_is_in_the_navigation_and_the_other_way_round() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r"[\w/-]+\.md", text))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


def test_the_page_of_hooks_names_each_event() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGES[DOCS / "reference/hooks.md"], re.M)
    assert sorted(named) == sorted({event.__name__ for event in hooks.Event.__subclasses__()})
