"""Snapshots of a PostgreSQL database, whose tables may be those of the version before."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from leasekit.errors import Refused
from leasekit.server.store import (
    AuditRow,
    Deadline,
    DrainRow,
    Filter,
    GateRow,
    KindRow,
    Lane,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    Tagged,
    TokenRow,
    Trigger,
    damage,
)
from leasekit.server.store.postgres.session import PostgresSession
from leasekit.server.store.schema import run
from leasekit.server.store.sql import lanes
from leasekit.server.store.sql.tx import SqlView

_HAS_KINDS = "SELECT pg_catalog.to_regclass('leasekit.kind') IS NOT NULL"
_LAST_RUNS = f"""
SELECT last.* FROM unnest(%s::bigint[]) AS task(seq), LATERAL (
    SELECT {", ".join(column.name for column in run.c)} FROM leasekit.run WHERE run.seq = task.seq
    ORDER BY fence DESC LIMIT %s
) AS last ORDER BY seq, fence"""  # noqa: S608
NO_TAGS = "the tables of the database have no room for tags of tasks: run `leasekit migrate`"


class PostgresView(SqlView):
    """A consistent snapshot of the database. `View` describes the methods."""

    _of_kinds: bool | None = None  # whether there are tables of kinds; None: not known yet

    def counts(self) -> dict[str, dict[str, int]]:
        query = "SELECT kind, status, sum(tasks)::bigint FROM leasekit.task_count GROUP BY 1, 2 HAVING sum(tasks) > 0"
        return damage.statuses(self.execute(query))

    def execute(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        assert isinstance(self._session, PostgresSession)  # noqa: S101 - there is no other
        return self._session.query(query, values)

    def kinds(self, *, after: int = 0) -> list[KindRow]:
        # Tables of version 1 have none.
        return super().kinds(after=after) if self._has_kinds() else []

    def gates(self) -> list[GateRow]:
        return super().gates() if self._has_kinds() else []

    def drains(self) -> list[DrainRow]:
        return super().drains() if self._has_kinds() else []

    def last_runs(self, seqs: Collection[int], *, limit: int) -> dict[int, list[Run]]:
        found = defaultdict[int, list[Run]](list)
        for one in damage.runs(self.execute(_LAST_RUNS, list(seqs), limit)):  # one statement: each takes a round trip
            found[one.seq].append(one)
        return found

    def parked_tasks(self, seqs: Collection[int]) -> dict[int, float]:
        return super().parked_tasks(seqs) if self._has_kinds() else {}

    def keys(self, seqs: Collection[int]) -> dict[int, str]:
        return super().keys(seqs) if self._has_kinds() else {}

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        return super().lanes(kinds) if self._has_kinds() else self._lanes(lanes.LANES, kinds)

    def routes(self, kinds: Collection[str]) -> list[str]:
        return super().routes(kinds) if self._has_kinds() else []

    def routes_of(self, seqs: Collection[int]) -> dict[int, str]:
        return super().routes_of(seqs) if self._has_kinds() else {}

    def periodic(self, name: str) -> PeriodicRow | None:
        return super().periodic(name) if self._has_kinds() else None

    def periodics(self, *, after: str, limit: int) -> list[PeriodicRow]:
        return super().periodics(after=after, limit=limit) if self._has_kinds() else []

    def minutes(self, *, since: int, kind: str | None = None) -> list[MinuteRow]:
        return super().minutes(since=since, kind=kind) if self._has_kinds() else []

    def tokens(self) -> list[TokenRow]:
        return super().tokens() if self._has_kinds() else []

    def session(self, digest: bytes) -> SessionRow | None:
        return super().session(digest) if self._has_kinds() else None

    def audit(self, *, before: str, limit: int) -> list[AuditRow]:
        return super().audit(before=before, limit=limit) if self._has_kinds() else []

    def full_keys(self, kinds: Collection[str], *, now: float, limit: int) -> list[tuple[Lane, str]]:
        return super().full_keys(kinds, now=now, limit=limit) if self._has_kinds() else []

    def waits_of(self, ids: Collection[str], *, limit: int | None = None) -> list[tuple[str, str]]:
        return super().waits_of(ids, limit=limit) if self._has_kinds() else []

    def page(
        self, wanted: Filter, *, after: int, limit: int, until: int | None = None, among: Sequence[int] | None = None
    ) -> list[Trigger]:
        if wanted.root is not None:
            self._need_chains()
        return super().page(wanted, after=after, limit=limit, until=until, among=among)

    def chained(self, root: str, *, after: int, newest: bool, limit: int) -> list[int]:
        self._need_chains()
        return super().chained(root, after=after, newest=newest, limit=limit)

    def _need_chains(self) -> None:
        if not self._has_kinds():
            raise Refused("the tables of the database have no room for chains: run `leasekit migrate`")

    def tagged(self, tags: Sequence[str], *, after: int, newest: bool, limit: int) -> Tagged:
        if not self._has_kinds():
            raise Refused(NO_TAGS)
        return super().tagged(tags, after=after, newest=newest, limit=limit)

    def tags(self, seqs: Collection[int]) -> dict[int, list[str]]:
        return super().tags(seqs) if self._has_kinds() else {}

    def chains_of(self, seqs: Collection[int]) -> dict[int, tuple[str, str]]:
        return super().chains_of(seqs) if self._has_kinds() else {}

    def deadlines(self, seqs: Collection[int]) -> dict[int, Deadline]:
        return super().deadlines(seqs) if self._has_kinds() else {}

    def _has_kinds(self) -> bool:
        """Return whether the schema has the tables of kinds; without them, `leasekit migrate` is still to be run."""
        if self._of_kinds is None:
            self._of_kinds = self.execute(_HAS_KINDS) == [(True,)]
        return self._of_kinds

    def free_space(self) -> int:
        raise Refused("PostgreSQL gives space back itself (autovacuum): there is nothing to do")
