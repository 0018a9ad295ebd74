"""Who may import whom, as a table: what is not in it is refused."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("leasekit", "adapters") for path in (ROOT / top).rglob("*.py"))

VALUES = {"task", "errors", "config"}
SEAM = {"backend", "wire", "hooks", "registry", "ids"}
HANDLES = {"client", "claiming", "lease", "named", "idle", "worker", "telemetry"}
INSIDE = {"_core", "_driver", "_arguments"}
PUBLIC = {"__init__"} | VALUES | SEAM | HANDLES


class Layer(NamedTuple):
    """What one layer may import: parts of leasekit, and libraries (None: any)."""

    parts: set[str]
    libraries: set[str] | None


LAYERS = {
    "task": Layer(VALUES, {"msgspec"}),
    "errors": Layer(VALUES, {"msgspec"}),
    "config": Layer(VALUES, {"msgspec"}),
    "_core": Layer(VALUES | {"_core"}, {"msgspec"}),
    "backend": Layer({"task", "errors"}, {"msgspec"}),
    "wire": Layer({"task", "errors"}, {"msgspec"}),
    "hooks": Layer({"task", "errors"}, {"msgspec"}),
    "registry": Layer({"task", "errors", "backend"}, set()),
    "ids": Layer(set(), set()),
    "_arguments": Layer(VALUES, set()),
    "_driver": Layer(VALUES | INSIDE | {"backend", "hooks", "wire"}, {"anyio", "msgspec", "tenacity"}),
    "claiming": Layer(VALUES | INSIDE, set()),
    "client": Layer(VALUES | INSIDE | SEAM | HANDLES, {"anyio", "msgspec", "tenacity"}),
    "lease": Layer(VALUES | INSIDE | SEAM | HANDLES, {"anyio", "msgspec", "tenacity"}),
    "named": Layer(VALUES | INSIDE | {"lease"}, set()),
    "idle": Layer(INSIDE, set()),
    "worker": Layer(VALUES | INSIDE | SEAM | HANDLES, {"anyio", "msgspec", "tenacity"}),
    "telemetry": Layer(VALUES | SEAM, {"msgspec", "opentelemetry"}),
    "__init__": Layer(PUBLIC, set()),
    "__main__": Layer({"cli"}, set()),
    "adapters": Layer(PUBLIC, None),
    "leasekit_pytest": Layer(PUBLIC | {"testing"}, {"pytest"}),
    "server": Layer(PUBLIC | {"server"}, None),
    "testing": Layer(PUBLIC | {"testing"}, {"anyio", "msgspec", "pytest"}),
    "cli": Layer(PUBLIC | {"cli", "server", "testing"}, None),
}

# `_core` has no clock, chance, thread, socket or logger; `now` is an argument.
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
        return part in may.parts and (part == layer or not is_private)
    if top in sys.stdlib_module_names:
        return layer != "_core" or top not in IMPURE
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
        ("testing", "leasekit.server.states.NEXT"),
        ("task", "leasekit.Task"),
    ],
)
def test_the_table_refuses(layer: str, dotted: str) -> None:
    assert not is_allowed(layer, dotted)


def test_the_core_stays_small() -> None:
    lines = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "leasekit/_core").rglob("*.py")
    }
    assert sum(lines.values()) < 606, lines


def test_importing_leasekit_loads_no_adapter_no_server_and_nothing_that_only_they_need() -> None:
    heavy = {"httpx", "leasekit_http", "leasekit.server", "leasekit.cli", "litestar", "rich", "sqlalchemy", "typer"}
    shown = subprocess.run(
        [sys.executable, "-c", "import sys, leasekit; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    loaded = heavy & set(shown.stdout.split())
    assert not loaded
