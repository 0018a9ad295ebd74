"""All mutants."""

from simulation.mutants.holder import HOLDER
from simulation.mutants.service import SERVICE

__all__ = ["MUTANTS"]

MUTANTS = (*HOLDER, *SERVICE)
