"""What is public: `__all__` says so, completely, in order, and with a docstring."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import leasekit
from leasekit import backend, codecs, errors, hooks, worker

ROOT = Path(__file__).parents[1]


ALIASES = {"LossReason", "RetryPolicy", "Outcome", "VerdictWord"}  # types: the string below them is their docstring


def is_public(path: Path) -> bool:
    return not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(ROOT).parts)


PUBLIC = sorted(path for top in ("leasekit", "adapters") for path in (ROOT / top).rglob("*.py") if is_public(path))


def in_order(names: list[str]) -> list[str]:
    """CONSTANTS, then Classes, then functions; each in alphabetical order."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
            case _:
                pass
    return None


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_names_every_public_definition_in_order(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = exported(tree)
    if names is None:
        return
    # What a decorator has registered somewhere (a route, a command) is reached from there.
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list)
    }
    assert {name for name in defined if not name.startswith("_")} <= set(names)
    assert names == in_order(names)


def test_every_name_of_the_package_exists_once_and_in_order() -> None:
    assert [name for name in leasekit.__all__ if not hasattr(leasekit, name)] == []
    assert leasekit.__all__ == in_order(list(set(leasekit.__all__)))


@pytest.mark.parametrize("name", [name for name in leasekit.__all__ if name not in ALIASES])
def test_every_name_of_the_package_is_documented(name: str) -> None:
    thing = getattr(leasekit, name)
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    # A dataclass without a docstring is given its signature for one.
    assert own
    assert not own.startswith(f"{name}(")


def test_the_package_only_imports_and_exports() -> None:
    docstring, *body = ast.parse((ROOT / "leasekit/__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(docstring, ast.Expr)
    *imports, last = body
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(last, ast.Assign)
    imported = [alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(leasekit.__all__)


def test_the_tree_of_errors_in_the_docs_is_that_of_the_classes() -> None:
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in inspect.cleandoc(errors.__doc__ or "").replace("\n    ", "\n").splitlines():
        if found := re.match(r"([│├└─ ]*)([A-Z]\w+)(?:   |$)", line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            if depth:
                parents[found[2]] = path[depth - 1]
    classes = {name: thing for name, thing in vars(errors).items() if inspect.isclass(thing) and name in errors.__all__}
    own = {name: cls.__bases__[0].__name__ for name, cls in classes.items() if issubclass(cls, Exception)}
    assert parents == {name: base for name, base in own.items() if base in own}


FACE = {
    "leasekit": leasekit,
    "leasekit.backend": backend,
    "leasekit.codecs": codecs,
    "leasekit.hooks": hooks,
    "leasekit.worker": worker,
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in FACE for name in FACE[module].__all__])
def test_what_is_public_is_in_a_typing_test(module: str, name: str) -> None:
    typed = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/typing").glob("test_*.py"))
    assert re.search(rf"\b{name}\b", typed), f"{module}.{name} is in no typing test"
