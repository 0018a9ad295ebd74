"""The kinds as the overview lists them: what waits, runs and fails of each."""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from leasekit._lifecycle.states import LEASED, WAITING
from leasekit.named import PREFIXES
from leasekit.server.console import plots
from leasekit.server.console.plots import Plot, Recent
from leasekit.server.engine import Engine
from leasekit.server.roles.backlog import Backlog, count_waiting
from leasekit.task import GateInfo, Status

_MOST = 200  # kinds that are listed, those with the most tasks that have not ended first
_NAMES = re.compile(r"\A((?:named:)|(?:once:(?:[^:]*:)?)).*", re.DOTALL)
_FAILED = (Status.DEAD, Status.FATAL_FAILURE)


class KindRow(Struct, frozen=True, kw_only=True):
    """A kind, or all names of one sort together."""

    kind: str
    counts: Mapping[str, int]
    backlog: Backlog = Backlog()
    gate: GateInfo | None = None
    is_of_names: bool = False
    """Whether this stands for all leases of names of one sort."""
    plot: Plot
    """The last hour."""
    recent: Recent

    @property
    def waiting(self) -> int:
        return sum(self.counts.get(status, 0) for status in WAITING)

    @property
    def running(self) -> int:
        return sum(self.counts.get(status, 0) for status in LEASED)

    @property
    def failed(self) -> int:
        return sum(self.counts.get(status, 0) for status in _FAILED)

    @property
    def succeeded(self) -> int:
        return self.counts.get(Status.SUCCESS, 0)


async def kind_rows(engine: Engine, *, only: str | None = None) -> list[KindRow]:
    """Return the kinds, sorted by name; the busiest, if there are very many. `only` selects one, known or not."""
    counts = await engine.queries.counts()
    folded = {only: counts.get(only, {})} if only is not None else _busiest(_folded(counts))
    waiting = {
        kind: count
        for kind, count in count_waiting(folded).items()
        if not kind.startswith(PREFIXES)  # a free name waits for nobody
    }
    backlogs, closed, history = await asyncio.gather(
        engine.queries.backlogs(waiting), engine.queries.gates(), engine.queries.history(kind=only)
    )
    gates = {gate.kind: gate for gate in closed if gate.kind is not None}
    now = int(engine.clock.peek() // 60)
    return [
        KindRow(
            kind=kind,
            counts=folded[kind],
            backlog=backlogs.get(kind, Backlog()),
            gate=gates.get(kind),
            is_of_names=kind.startswith(PREFIXES),
            plot=plots.hour(history.get(kind, {}), now),
            recent=plots.recent(history.get(kind, {}), now),
        )
        for kind in sorted(folded)
    ]


def _folded(counts: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """Return the counts with one kind in place of many that stand for names: `named:*`, `once:celery:*`."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, of in counts.items():
        sums[_NAMES.sub(r"\1*", kind)].update(of)
    return dict(sums)


def _busiest(counts: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    def live(kind: str) -> tuple[int, int]:
        of = counts[kind]
        return sum(number for status, number in of.items() if not Status(status).ended), sum(of.values())

    return {kind: counts[kind] for kind in sorted(counts, key=live, reverse=True)[:_MOST]}


class Totals(Struct, frozen=True):
    """The sums of several kinds."""

    waiting: int
    due: int
    running: int
    failed: int
    succeeded: int
    oldest: float
    """Seconds for which the oldest task has been due; 0: no task is."""


def totals(rows: Sequence[KindRow]) -> Totals:
    """Add kinds up. The tasks of names that are free do not count as waiting: they have no work to do."""
    tasks = [row for row in rows if not row.is_of_names]
    return Totals(
        sum(row.waiting for row in tasks),
        sum(row.backlog.due for row in tasks),
        sum(row.running for row in rows),
        sum(row.failed for row in rows),
        sum(row.succeeded for row in rows),
        max((row.backlog.age for row in tasks), default=0.0),
    )
