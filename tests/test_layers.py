"""Who may import whom, as a table: what is not in it is refused."""

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from leasekit.wire import decoder_of

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("leasekit", "adapters") for path in (ROOT / top).rglob("*.py"))

VALUES = {"task", "errors", "config", "periodic", "tokens", "flow_info", "codecs"}
SEAM = {"backend", "wire", "hooks", "queues", "registry", "ids"}
HANDLES = {"postgres", "sqlite", "client", "flows", "task_iterator", "lease", "named", "idle", "worker", "telemetry"}
INSIDE = {
    "_core", "_driver", "_arguments", "_batches", "_binding", "_blocks", "_change_calls", "_descriptors", "_flow_calls",
    "_leased_run", "_lineage", "_log", "_operating", "_periodic_calls", "_session", "_token_calls",
}  # fmt: skip
# What `memory://` is made of.
SERVICE = {"server.access", "server.embedded", "server.roles", "server.store", "server.unit_of_work"}
PUBLIC = {"__init__"} | VALUES | SEAM | HANDLES


class Layer(NamedTuple):
    """What one layer may import: parts of leasekit, and libraries (None: any)."""

    parts: set[str]
    libraries: set[str] | None


LAYERS = {
    "task": Layer(VALUES, {"msgspec"}),
    "errors": Layer(VALUES, {"msgspec"}),
    "periodic": Layer(VALUES, {"msgspec"}),
    "tokens": Layer(VALUES, {"msgspec"}),
    "config": Layer(VALUES, {"msgspec"}),
    "codecs": Layer({"errors"}, {"msgspec"}),
    "_core": Layer(VALUES | {"_core"}, {"msgspec"}),
    "_flows": Layer({"errors", "_flows"}, {"msgspec"}),
    "flow_info": Layer({"task", "_flows"}, {"msgspec"}),
    "_lifecycle": Layer({"task", "errors", "codecs", "wire", "_lifecycle"}, {"msgspec"}),
    "_operator_protocols": Layer({"task", "periodic", "tokens"}, set()),
    "backend": Layer({"task", "errors", "periodic", "tokens", "_lifecycle", "_operator_protocols"}, {"msgspec"}),
    "wire": Layer({"task", "errors", "periodic", "tokens"}, {"msgspec"}),
    "hooks": Layer({"task", "errors"}, {"msgspec"}),
    "registry": Layer({"task", "errors", "backend", "queues"}, set()),
    "queues": Layer({"task"}, set()),
    "ids": Layer(set(), set()),
    "_arguments": Layer(VALUES, {"msgspec"}),
    "_lineage": Layer({"task"}, set()),
    "_descriptors": Layer(set(), set()),
    "_log": Layer(set(), set()),
    "_forwarding": Layer({"task"}, set()),
    "_transactions": Layer(VALUES | INSIDE | {"_lifecycle", "hooks", "wire"}, {"msgspec", "psycopg", "sqlalchemy"}),
    "console": Layer({"server"}, set()),
    "postgres": Layer({"_transactions", "codecs", "task"}, set()),
    "sqlite": Layer(VALUES | {"_transactions", "client"}, {"msgspec"}),
    "_batches": Layer(VALUES | INSIDE | {"ids", "wire"}, {"msgspec"}),
    "_binding": Layer({"task", "_driver"}, set()),
    "_blocks": Layer(VALUES | INSIDE, {"anyio"}),
    "_leased_run": Layer(VALUES | INSIDE | {"hooks"}, {"anyio", "msgspec"}),
    "_session": Layer(VALUES | INSIDE | {"backend", "hooks", "queues", "registry"}, set()),
    "_dead_letters": Layer(VALUES | INSIDE | {"backend", "hooks"}, set()),
    "_periodic_calls": Layer(VALUES | INSIDE | {"backend"}, set()),
    "_token_calls": Layer(VALUES | INSIDE | {"backend", "ids"}, set()),
    "_change_calls": Layer(VALUES | INSIDE | {"backend"}, set()),
    "_operating": Layer(VALUES | INSIDE | {"_dead_letters", "_periodic_calls", "backend", "hooks"}, set()),
    "_flow_calls": Layer(VALUES | INSIDE | {"_flows"}, set()),
    "_flow_run": Layer(VALUES | INSIDE | {"_flows", "ids", "lease"}, {"msgspec"}),
    "flows": Layer(VALUES | INSIDE | HANDLES | {"_flow_run", "_flows", "_worker"}, {"msgspec"}),
    "_driver": Layer(VALUES | INSIDE | {"_lifecycle", "backend", "hooks", "queues", "wire"}, {"anyio", "msgspec"}),
    "task_iterator": Layer(VALUES | INSIDE | {"lease"}, set()),
    "client": Layer(VALUES | INSIDE | SEAM | HANDLES, {"anyio", "msgspec"}),
    "lease": Layer(VALUES | INSIDE | SEAM | HANDLES, {"anyio", "msgspec"}),
    "named": Layer(VALUES | INSIDE | {"backend", "lease"}, set()),
    "idle": Layer(INSIDE | {"config"}, set()),
    "_worker": Layer(VALUES | INSIDE | SEAM | HANDLES | {"_worker"}, {"anyio", "msgspec"}),
    "worker": Layer({"_worker"}, set()),
    "_instruments": Layer({"hooks"}, {"opentelemetry"}),
    "telemetry": Layer(VALUES | SEAM | {"_instruments"}, {"msgspec", "opentelemetry"}),
    "__init__": Layer(PUBLIC, set()),
    "__main__": Layer({"cli"}, set()),
    "adapters": Layer(PUBLIC, None),
    "leasekit_pytest": Layer(PUBLIC | {"testing"}, {"pytest"}),
    "server": Layer(PUBLIC | {"_forwarding", "_lifecycle", "_log", "server"}, None),
    "testing": Layer(PUBLIC | SERVICE | {"_forwarding", "testing"}, {"anyio", "msgspec", "pytest"}),
    "cli": Layer(PUBLIC | {"_worker", "cli", "server", "testing"}, None),
}

# What decides has no clock, chance, thread, socket or logger; `now` is an argument.
SANS_IO = {"_core", "_flows", "_lifecycle"}
IMPURE = {
    "asyncio", "datetime", "logging", "multiprocessing", "os", "queue", "random", "sched", "secrets", "select",
    "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time", "uuid",
}  # fmt: skip


def imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a file imports when it runs; what only type checkers see loads nothing."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                for other in orelse:
                    yield from imports(ast.Module([other], []))
            case ast.Import(names=names):
                yield from ((child.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from ((child.lineno, f"{module}.{alias.name}") for alias in names)
            case _:
                yield from imports(child)


def part_of(dotted: str) -> str:
    """`leasekit.<part>.…` → part, where there is such a module; else it is a name of the package itself."""
    name = dotted.removeprefix("leasekit").lstrip(".").partition(".")[0]
    is_module = (ROOT / "leasekit" / f"{name}.py").is_file() or (ROOT / "leasekit" / name / "__init__.py").is_file()
    return name if name and is_module else "__init__"


def is_allowed(layer: str, dotted: str) -> bool:
    """Whether the table lets this layer import this name."""
    may, top = LAYERS[layer], dotted.partition(".")[0]
    if top == "leasekit":
        part = part_of(dotted)
        _, _, inner = dotted.removeprefix("leasekit.").partition(".")
        is_private = any(word.startswith("_") for word in inner.split("."))
        is_named = any(dotted.startswith(f"leasekit.{path}.") for path in may.parts if "." in path)
        return (part in may.parts or is_named) and (part == layer or not is_private)
    if top == "harness":
        return False
    if top in sys.stdlib_module_names:
        return layer not in SANS_IO or top not in IMPURE
    return may.libraries is None or top in may.libraries


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_what_its_layer_may(path: Path) -> None:
    top, name, *_ = path.relative_to(ROOT).parts
    layer = "adapters" if top == "adapters" and name not in LAYERS else name.removesuffix(".py")
    assert layer in LAYERS, f"{path.relative_to(ROOT)}:1: the layer {layer!r} is not in the table"
    offences = [
        f"{path.relative_to(ROOT)}:{line}: {layer} may not import {dotted}"
        for line, dotted in imports(ast.parse(path.read_text(encoding="utf-8")))
        if not is_allowed(layer, dotted)
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    ("layer", "dotted"),
    [
        ("_core", "time"),
        ("_core", "anyio"),
        ("_core", "leasekit._driver.clock.Clock"),
        ("client", "leasekit.server.engine.Engine"),
        ("client", "httpx"),
        ("adapters", "leasekit._core.term.Term"),
        ("adapters", "leasekit._core"),
        ("adapters", "leasekit.client._Keeper"),
        ("adapters", "leasekit.server"),
        ("server", "leasekit._driver"),
        ("testing", "harness.history.Log"),
        ("adapters", "harness.proxy.Proxy"),
        ("_lifecycle", "random"),
        ("_lifecycle", "leasekit.server.store.Trigger"),
        ("adapters", "leasekit._lifecycle.validation.checked"),
        ("testing", "leasekit._lifecycle.states.NEXT"),
        ("testing", "leasekit.server.http.process.serve"),
        ("task", "leasekit.Task"),
    ],
)
def test_the_table_refuses(layer: str, dotted: str) -> None:
    assert not is_allowed(layer, dotted)


# Circles ----------------------------------------------------------------------------------------------------------


def module(path: Path) -> str:
    """The dotted name under which a file is imported."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[names[0] == "adapters" :]).removesuffix(".__init__")


def imported(code: str, modules: Container[str]) -> set[str]:
    """Which of these modules some code imports, wherever it does: in a function, or for type checkers alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name in modules}
            case ast.ImportFrom(module=str(package), names=names):
                inner = {name for alias in names if (name := f"{package}.{alias.name}") in modules}
                found |= inner or ({package} if package in modules else set())
            case _:
                pass
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    files = {module(path): path for path in [*FILES, *(ROOT / "harness").rglob("*.py")]}
    graph = {name: imported(path.read_text(encoding="utf-8"), files) for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))


@pytest.mark.parametrize(
    "code",
    [
        "import a.b",
        "from a import b",
        "from a.b import c",
        "def f():\n    from a.b import c",
        "if TYPE_CHECKING:\n    from a.b import C",
    ],
)
def test_an_import_is_seen_wherever_it_stands(code: str) -> None:
    assert imported(code, {"a", "a.b"}) == {"a.b"}


# What is loaded ---------------------------------------------------------------------------------------------------


def test_the_core_stays_small() -> None:
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "leasekit/_core").rglob("*.py")
    }
    assert sum(lines.values()) < 500, lines


def loaded(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_leasekit_loads_no_adapter_no_server_and_nothing_that_only_they_need() -> None:
    heavy = {"httpx", "leasekit_http", "leasekit.server", "leasekit.cli", "starlette", "rich", "sqlalchemy", "typer"}
    assert not (heavy | {"importlib.metadata"}) & loaded("leasekit")


@pytest.mark.parametrize("module", ["leasekit.testing.memory", "leasekit.server.engine", "leasekit.server.store.urls"])
def test_what_memory_is_made_of_needs_only_what_leasekit_itself_needs(module: str) -> None:
    assert not {"alembic", "httpx", "starlette", "sqlalchemy", "uvicorn"} & loaded(module)


def test_a_server_of_tasks_in_memory_loads_no_database_and_one_in_a_file_only_what_it_needs() -> None:
    assert not {"alembic", "sqlalchemy"} & loaded("leasekit.server.http.process")
    assert not {"alembic", "sqlalchemy.dialects.postgresql"} & loaded("leasekit.server.store.sqlite.store")


def test_values_of_users_are_decoded_by_one_rule() -> None:
    """`wire.decode_value` has a bound on the work for each number; `msgspec.json.decode` without a type has none."""
    own = ("leasekit/wire.py", "leasekit/cli/", "leasekit/server/conformance/")  # what comes from their own caller
    found = [
        f"{name}:{node.lineno}"
        for path in FILES
        if not (name := path.relative_to(ROOT).as_posix()).startswith(own)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and not node.keywords
        if (ast.unparse(node.func), len(node.args)) in {("msgspec.json.decode", 1), ("msgspec.json.Decoder", 0)}
    ]
    assert not found
    assert decoder_of(object).float_hook is float
