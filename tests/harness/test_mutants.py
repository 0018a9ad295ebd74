"""The mutants of the simulation fit the code, and some of them are killed here already."""

import ast
import functools
import re
from pathlib import Path

import pytest

from harness.simulation.mutants.__main__ import run_tests, tried
from harness.simulation.mutants.edit import Edit, NotThere
from harness.simulation.mutants.mutant import Mutant
from harness.simulation.mutants.stress import STRESSES
from harness.simulation.mutants.table import MUTANTS, TABLES

ROOT = Path(__file__).parents[2]
_RULE = re.compile(r"S([1-9]|1[01])|L[1-7]|A([1-9]|1[0-5])|queue")


class Renamed(ast.NodeTransformer):
    """Gives other names to the local variables of functions; what a caller may name keeps its name."""

    def __init__(self) -> None:
        self._local: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if self._local:  # inside of another function: all of its names are known
            return self.generic_visit(node)
        inside = list(ast.walk(node))
        bound = {name.id for name in inside if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        fixed = {arg.arg for arg in inside if isinstance(arg, ast.arg)}
        fixed |= {name for outer in inside if isinstance(outer, ast.Nonlocal | ast.Global) for name in outer.names}
        self._local = bound - fixed
        self.generic_visit(node)
        self._local = set()
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.visit_FunctionDef(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(f"other_{node.id}", node.ctx) if node.id in self._local else node


@functools.cache
def unparsed(text: str) -> str:
    return ast.unparse(ast.parse(text)) + "\n"


@functools.cache
def renamed(text: str) -> str:
    return ast.unparse(Renamed().visit(ast.parse(text)))


EDITS: dict[str, list[Edit]] = {}
"""The edits of each module: to parse a module takes longer than to look for an edit in it."""
for _mutant in MUTANTS.values():
    for _edit in _mutant.edits:
        EDITS.setdefault(_edit.where.partition(":")[0], []).append(_edit)


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_what_a_mutant_replaces_stands_in_the_code_exactly_once(edits: list[Edit]) -> None:
    text = edits[0].file(ROOT).read_text()
    for edit in edits:
        broken = edit.applied(text)
        if edit.is_lua:
            continue
        assert broken != unparsed(text)
        compile(broken, edit.where, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fits_whatever_local_names_comments_and_formatting_are(mutant: Mutant) -> None:
    for edit in (edit for edit in mutant.edits if not edit.is_lua):
        text = edit.file(ROOT).read_text()
        # Not one assertion, whose two sides would be shown: they are whole modules.
        is_same = edit.applied(renamed(text)) == renamed(edit.applied(text)) + "\n"
        assert is_same


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_expected_to_break_a_rule_or_a_test_that_is_named(mutant: Mutant) -> None:
    assert bool(mutant.by) != bool(mutant.test)
    assert bool(mutant.why_test) == bool(mutant.test)
    if mutant.test:
        path, *of_contract, name = mutant.test.split("::")
        files = (ROOT / "leasekit/testing/contract").glob("*.py") if of_contract else [ROOT / path]
        assert any(f"def {name.partition('[')[0]}(" in file.read_text() for file in files)
    if mutant.by:
        assert mutant.by.under in STRESSES
        assert mutant.by.rules
        assert all(_RULE.fullmatch(rule) for rule in mutant.by.rules)


def test_no_two_mutants_have_one_name() -> None:
    assert len(MUTANTS) == sum(map(len, TABLES))


@pytest.mark.parametrize(
    ("code", "old", "new", "broken"),
    [
        ("return a + b", "x + y", "y", "return b"),
        ("return g(a, h(b), k=1)", "g(x, ...)", "x", "return a"),
        ("return a and b and a", "x and ...", "x", "return a"),
        ("return (a,\n    # why\n    b)", "return x, y", "return y, x", "return (b, a)"),
        ("g(a)\n    g(b)", "g(a)\ng(b)", "g(b)\ng(a)", "g(b)\n    g(a)"),
        ("if a:\n        g(b)\n    return a", "if x:\n    ...", "pass", "pass\n    return a"),
        ("g(a)", "g(...)", "pass", "pass"),
    ],
)
def test_an_edit_replaces(code: str, old: str, new: str, broken: str) -> None:
    module = "def g(*x): ...\nclass C:\n  def f(self, a, b):\n    "
    edited = Edit("m:C.f", old, new).applied(module + code)
    assert ast.dump(ast.parse(edited)) == ast.dump(ast.parse(module + broken))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("x - y", "x", "this is not there"),
        ("x + x", "x", "this is not there"),
        ("g(x)", "x", "this is there 2 times"),
        ("h(x)", "x", "this is not there"),
        ("x + y", "x + z", "the replacement uses z, which is not there"),
    ],
)
def test_an_edit_that_does_not_fit_any_more_says_so(old: str, new: str, why: str) -> None:
    with pytest.raises(NotThere, match=f"^m:f: {why}"):
        Edit("m:f", old, new).applied("def g(*x): ...\ndef f(a, b):\n  g(a), g(b)\n  return a + b")


def test_an_edit_of_a_script_replaces_text_that_is_there_once() -> None:
    edit = Edit("m/lua/f.lua", "a", "b")
    assert edit.applied("x = a") == "x = b"
    with pytest.raises(NotThere, match="is there 2 times"):
        edit.applied("x = a + a")


def test_an_edit_of_a_function_or_a_module_that_has_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotThere, match=r"m:C\.f: f is there 0 times"):
        Edit("m:C.f", "a", "b").applied("class C: ...")
    with pytest.raises(NotThere, match="no such module"):
        Edit("m.n:f", "a", "b").file(tmp_path)


@pytest.mark.slow
def test_this_mutant_is_killed_by_a_test() -> None:
    mutant = MUTANTS["throttling-is-a-strike"]
    assert run_tests(mutant, mutant.test).killed_by == [mutant.test]
    assert run_tests(None, mutant.test).killed_by == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dedupe-ignored", "no-timer"])
def test_this_mutant_is_killed_by_its_rule(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.by is not None
    trial = tried(mutant, name)
    assert set(trial.killed_by) & set(mutant.by.rules), trial.error
