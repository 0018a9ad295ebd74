"""The mutants, by name."""

from harness.simulation.mutants.access import ACCESS
from harness.simulation.mutants.around import AROUND
from harness.simulation.mutants.beyond import BEYOND
from harness.simulation.mutants.changes import CHANGES
from harness.simulation.mutants.connections import CONNECTIONS
from harness.simulation.mutants.dead_letters import DEAD_LETTERS
from harness.simulation.mutants.drains import DRAINS
from harness.simulation.mutants.firings import FIRINGS
from harness.simulation.mutants.flows import FLOWS
from harness.simulation.mutants.gates import GATES
from harness.simulation.mutants.holder import HOLDER
from harness.simulation.mutants.limits import LIMITS
from harness.simulation.mutants.nodes import NODES
from harness.simulation.mutants.queues import QUEUES
from harness.simulation.mutants.routing import ROUTING
from harness.simulation.mutants.service import SERVICE
from harness.simulation.mutants.shares import SHARES
from harness.simulation.mutants.turns import TURNS
from harness.simulation.mutants.waits import WAITS

TABLES = (
    HOLDER,
    SERVICE,
    NODES,
    GATES,
    DRAINS,
    SHARES,
    LIMITS,
    QUEUES,
    DEAD_LETTERS,
    CHANGES,
    FIRINGS,
    ROUTING,
    FLOWS,
    WAITS,
    ACCESS,
    CONNECTIONS,
    TURNS,
    AROUND,
    BEYOND,
)
MUTANTS = {name: mutant for table in TABLES for name, mutant in table.items()}
