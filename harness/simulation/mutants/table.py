"""The mutants, by name."""

from harness.simulation.mutants.beyond import BEYOND
from harness.simulation.mutants.gates import GATES
from harness.simulation.mutants.holder import HOLDER
from harness.simulation.mutants.limits import LIMITS
from harness.simulation.mutants.nodes import NODES
from harness.simulation.mutants.service import SERVICE
from harness.simulation.mutants.shares import SHARES

MUTANTS = {**HOLDER, **SERVICE, **NODES, **GATES, **SHARES, **LIMITS, **BEYOND}
