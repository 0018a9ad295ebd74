"""Transactions and snapshots of an SQL database: batches of rows in, batches of rows out.

Each part has the statements of its subject, and the methods that run them.
"""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import func, select, tuple_

from leasekit.server.store import Trigger, damage
from leasekit.server.store.schema import claim, dedupe, is_waiting, progress, run, task, trigger, version
from leasekit.server.store.sql import later
from leasekit.server.store.sql.keyed import DROP_KEYED
from leasekit.server.store.sql.lanes import LaneView
from leasekit.server.store.sql.later import LaterTx, LaterView
from leasekit.server.store.sql.leases import LeaseTx, LeaseView
from leasekit.server.store.sql.listing import ListingView
from leasekit.server.store.sql.rules import RuleTx, RuleView
from leasekit.server.store.sql.shares import ShareTx, ShareView
from leasekit.server.store.sql.statements import Statement, is_one_of
from leasekit.server.store.sql.tags import DROP_TAGS, TagTx, TagView
from leasekit.server.store.sql.tasks import TaskTx, TaskView

LATEST = Statement(
    sa.union_all(
        select(func.coalesce(func.max(claim.c.granted_at), 0.0)),
        select(task.c.created_at).where(task.c.seq == select(func.max(task.c.seq)).scalar_subquery()),
        select(func.coalesce(func.max(run.c.at), 0.0))
        .join_from(trigger, run, run.c.seq == trigger.c.seq)
        .where(is_waiting()),
    )
)


_OF_TASKS = select(task.c.kind, task.c.dedupe_key, task.c.id).where(is_one_of(task.c.seq, "seqs"))

REMOVE = tuple(  # in this order: the other rows of a task refer to that of `task`
    Statement(statement)
    for statement in (
        sa.delete(dedupe).where(tuple_(dedupe.c.kind, dedupe.c.key, dedupe.c.id).in_(_OF_TASKS)),
        *(sa.delete(table).where(is_one_of(table.c.seq, "seqs")) for table in (run, progress, trigger, task)),
    )
)


TOUCH = Statement(sa.update(version).values(version_num=version.c.version_num))


class SqlView(TaskView, TagView, ListingView, LeaseView, LaneView, ShareView, RuleView, LaterView):
    """A consistent snapshot of an SQL database. `View` describes the methods."""


class SqlTx(TaskTx, TagTx, LeaseTx, ShareTx, RuleTx, LaterTx, SqlView):
    """A transaction of the writer on an SQL database. `Tx` describes the methods."""

    def remove(self, seqs: Collection[int]) -> None:
        if self.has_chains():
            self._session.run(later.DROP_CHAINS, seqs=seqs)
            self._session.run(later.DROP_CANCELLED_CHAINS, seqs=seqs)
        for statement in (*REMOVE, DROP_KEYED, DROP_TAGS) if self._has_keys else REMOVE:
            self._session.run(statement, seqs=seqs)

    def latest_time(self) -> float:
        return max([row[0] for row in self._session.rows(LATEST) if damage.is_number(row[0])], default=0.0)

    def probe_write(self) -> None:
        self._session.run(TOUCH)

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        tasks, damaged = damage.triggers(rows)
        if damaged:
            self.save(damaged)
            if self.has_waits():
                self.set_wakes({row.id: "" for row in damaged})
            damage.log(damaged)
        return self._keyed.read(tasks)
