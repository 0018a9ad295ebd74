"""Mutants: rules that are broken on purpose in a copy of the code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.stress import STRESSES
from harness.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Histories:
    """The histories in which a mutant has to show."""

    under: str  # the stress, by its name in `STRESSES`
    rules: Sequence[str]  # rules of the checker: the mutant is dead once one of them is broken
    seeds: int = 6  # the number of histories in which the mutant is looked for, at the most

    def scenarios(self) -> list[Scenario]:
        return [Scenario(seed=seed, **STRESSES[self.under]) for seed in range(1, self.seeds + 1)]


class Mutant:
    """A rule that is broken on purpose: the histories `by` have to show it or, where none does, `test` has to fail."""

    def __init__(
        self, breaks: str, *edits: Edit, by: Histories | None = None, test: str = "", why_test: str = ""
    ) -> None:
        self.breaks = breaks  # what is wrong then, in one sentence
        self.edits = edits
        self.by = by
        self.test = test  # the test, by its name for pytest
        self.why_test = why_test  # why no history shows this mutant


def tested(why_test: str, text: str) -> dict[str, Mutant]:
    """Return mutants that tests kill, each by one edit. Each paragraph of `text` is one of them.

    NAME: what breaks
    MODULE:FUNCTION, or a script
    - old
    + new
    the test
    """
    mutants: dict[str, Mutant] = {}
    for paragraph in text.strip().split("\n\n"):
        title, where, *lines, test = paragraph.splitlines()
        name, _, breaks = title.partition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        mutants[name] = Mutant(breaks, Edit(where, old, new), test=test, why_test=why_test)
    return mutants


def plant(mutant: Mutant, root: Path) -> None:
    """Break the copy of the tree that is at `root`. Raises `NotThere`."""
    for edit in mutant.edits:
        file = edit.file(root)
        file.write_text(edit.applied(file.read_text()))
