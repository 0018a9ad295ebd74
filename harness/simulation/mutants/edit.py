"""Edits of the syntax tree that break the code; formatting, comments and local names do not matter.

    Edit("config:Heartbeats.trust", "return ...", "return self.ttl")

`where` is a module of leasekit, or of an adapter, and a function in it. `old` is an expression or statements, as they
could be written there:

- a local name stands for any local name, the same one wherever it occurs; in `new` that name takes its place;
- `...` stands for any expression; at the end of arguments, operands or elements, for all the remaining ones; as the
  last statement, for the rest of a block.

`old` has to match exactly once. Names of modules, functions, attributes and keywords have to be the code's.

In a Lua script, `where` is its path below `adapters`, and `old` and `new` are text.
"""

import ast
import builtins
import functools
import symtable
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BUILTINS = frozenset(dir(builtins))


class NotThere(Exception):
    """The code to replace is missing or ambiguous, or the replacement does not fit."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement in one function."""

    where: str  # module:qualified name of a function, or the path of a script
    old: str
    new: str

    @property
    def is_lua(self) -> bool:
        return self.where.endswith(".lua")

    def file(self, root: Path) -> Path:
        if self.is_lua:
            return root / "adapters" / self.where
        inner = self.where.partition(":")[0].replace(".", "/")
        for path in (
            root / folder / f"{inner}{end}" for folder in ("leasekit", "adapters") for end in (".py", "/__init__.py")
        ):
            if path.is_file():
                return path
        raise NotThere(f"{self.where}: there is no such module")

    def applied(self, text: str) -> str:
        """Apply the edit to the source `text`. Raises `NotThere`."""
        if self.is_lua:
            self._check(text.count(self.old))
            return text.replace(self.old, self.new)
        tree = ast.parse(text)
        known = _of_module(text) | _BUILTINS | {"self", "cls"}
        old, new = _parsed(self.old, self.new)
        fits: list[tuple[dict[str, str], Callable[[list[Any]], None]]] = []
        for nodes, replace in _places(self._function(tree), len(old)):
            pattern = _Pattern(known)
            if pattern.fits_all(old, nodes):
                fits.append((pattern.names, replace))
        self._check(len(fits))
        ((names, replace),) = fits
        replace([_Renamed(names).visit(node) for node in new])
        broken = ast.unparse(tree) + "\n"
        if unknown := _undefined(broken) - _undefined(text):
            raise NotThere(f"{self.where}: the replacement uses {', '.join(sorted(unknown))}, which is not there")
        return broken

    def _check(self, fits: int) -> None:
        if fits != 1:
            times = f"is there {fits} times" if fits else "is not there"
            raise NotThere(f"{self.where}: this {times}:\n{self.old}")

    def _function(self, tree: ast.Module) -> ast.AST:
        node: ast.AST = tree
        for name in self.where.partition(":")[2].split("."):
            named = [scope for scope in _scopes(node) if scope.name == name]
            if len(named) != 1:
                raise NotThere(f"{self.where}: {name} is there {len(named)} times")
            (node,) = named
        return node


class _Pattern:
    """Match a pattern with code, and note which local name of the code each name of the pattern stands for."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self.names: dict[str, str] = {}

    def fits_all(self, pattern: Sequence[Any], nodes: Sequence[Any]) -> bool:
        if pattern and _is_any(pattern[-1]):
            pattern, nodes = pattern[:-1], nodes[: len(pattern) - 1]
        return len(pattern) == len(nodes) and all(map(self._fits, pattern, nodes))

    def _fits(self, pattern: Any, node: Any) -> bool:
        if _is_any(pattern):
            return isinstance(node, ast.expr)
        if type(pattern) is not type(node):
            return False
        match pattern:
            case ast.Name():
                return self._is_name(pattern.id, node.id)
            case ast.arg():
                return self._is_name(pattern.arg, node.arg)
            case ast.Call(args=[*_, last], keywords=[]) if _is_any(last):
                return self._fits(pattern.func, node.func) and self.fits_all(pattern.args, node.args)
            case list():
                return self.fits_all(pattern, node)
            case ast.AST():
                fields = (name for name in pattern._fields if name != "ctx")
                return all(self._fits(getattr(pattern, name), getattr(node, name)) for name in fields)
            case _:
                return bool(pattern == node)

    def _is_name(self, pattern: str, name: str) -> bool:
        if pattern in self._known or name in self._known:
            return pattern == name
        if pattern not in self.names and name not in self.names.values():
            self.names[pattern] = name
        return self.names.get(pattern) == name


class _Renamed(ast.NodeTransformer):
    """Put the code's local names into a replacement."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._names.get(node.arg, node.arg))


def _parsed(old: str, new: str) -> tuple[list[Any], list[Any]]:
    """Parse both as expressions where possible, else both as statements."""
    both = ast.parse(old).body, ast.parse(new).body
    match both:
        case ([ast.Expr(value=old_value)], [ast.Expr(value=new_value)]):
            return [old_value], [new_value]
        case _:
            return both


def _is_any(pattern: Any) -> bool:
    match pattern:
        case ast.Constant(value=value) | ast.Expr(value=ast.Constant(value=value)):
            return value is ...
        case _:
            return False


def _places(function: ast.AST, size: int) -> Iterator[tuple[list[Any], Callable[[list[Any]], None]]]:
    """Every run of `size` neighbouring nodes in a function, each with a function that replaces the run."""
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for at in range(len(value) - size + 1):
                    here = slice(at, at + size)
                    yield value[here], partial(value.__setitem__, here)
            elif isinstance(value, ast.expr) and size == 1:
                yield [value], partial(_set, parent, field)


def _set(parent: ast.AST, field: str, new: list[Any]) -> None:
    (node,) = new
    setattr(parent, field, node)


def _scopes(node: ast.AST) -> Iterator[_Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Scope):
            yield child
        else:
            yield from _scopes(child)


@functools.cache
def _of_module(text: str) -> frozenset[str]:
    symbols = symtable.symtable(text, "", "exec").get_symbols()
    return frozenset(symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported())


@functools.cache
def _undefined(text: str) -> set[str]:
    """The names that functions use, and that neither the module nor Python defines."""

    def used(table: symtable.SymbolTable) -> Iterator[str]:
        yield from (
            symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()
        )
        for inner in table.get_children():
            yield from used(inner)

    return set(used(symtable.symtable(text, "", "exec"))) - _of_module(text) - _BUILTINS
