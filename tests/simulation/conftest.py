"""The simulation is no part of the package: it is imported from the tree."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last: leasekit itself is the installed one
