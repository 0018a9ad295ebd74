"""What a mutant is, and how it is planted into a copy of the code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.stress import STRESSES
from harness.simulation.scenario import Scenario

__all__ = ["Mutant", "plant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One rule, broken on purpose."""

    name: str
    breaks: str  # one sentence: what is wrong then
    edits: Sequence[Edit]
    under: str  # the stress that shows it, of `STRESSES`
    killed_by: Sequence[str] = ()  # rules of the checker, any of which has to be broken
    seeds: int = 6  # histories in which it may live, at most
    test: str = ""  # of pytest, that fails by it, where no history shows it
    why_test: str = ""  # and why none does

    def scenarios(self) -> list[Scenario]:
        """The histories in which it is looked for."""
        return [Scenario(seed=seed, **STRESSES[self.under]) for seed in range(1, self.seeds + 1)]


def plant(mutant: Mutant, root: Path) -> None:
    """Break the copy of the tree that is at `root`. Raises `NotThere`."""
    for edit in mutant.edits:
        file = edit.file(root)
        file.write_text(edit.applied(file.read_text()))
