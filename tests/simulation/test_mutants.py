"""The mutants of the simulation fit the code, and some of them are killed here already."""

import re
from pathlib import Path

import pytest

from simulation.mutants.__main__ import asked_tests, tried
from simulation.mutants.mutant import Edit, Mutant, NotThere
from simulation.mutants.stress import STRESSES
from simulation.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
_RULE = re.compile(r"S([1-9]|1[01])|L[1-7]|queue")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_stands_in_the_code_exactly_once(mutant: Mutant) -> None:
    for edit in mutant.edits:
        broken = edit.applied(ROOT)
        assert broken != (ROOT / edit.file).read_text()
        compile(broken, edit.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_expected_to_break_a_rule_or_a_test_that_is_named(mutant: Mutant) -> None:
    assert mutant.under in STRESSES
    assert bool(mutant.killed_by) != bool(mutant.test)
    assert bool(mutant.why_test) == bool(mutant.test)
    if mutant.test:
        path, _, name = mutant.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
    assert all(_RULE.fullmatch(rule) for rule in mutant.killed_by)


def test_no_two_mutants_have_one_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_a_mutant_that_does_not_fit_any_more_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one, one")
    with pytest.raises(NotThere, match=r"a\.py: the text is not there any more"):
        Edit("a.py", "two", "three").applied(tmp_path)
    with pytest.raises(NotThere, match="is there 2 times"):
        Edit("a.py", "one", "three").applied(tmp_path)


def test_this_mutant_is_killed_by_a_test() -> None:
    mutant = next(one for one in MUTANTS if one.name == "throttling-is-a-strike")
    assert asked_tests(mutant, mutant.test).killed_by == [mutant.test]
    assert asked_tests(None, mutant.test).killed_by == []


@pytest.mark.parametrize("name", ["dedupe-ignored", "no-timer"])
def test_this_mutant_is_killed_by_its_rule(name: str) -> None:
    mutant = next(one for one in MUTANTS if one.name == name)
    trial = tried(mutant, name)
    assert set(trial.killed_by) & set(mutant.killed_by), trial.error
