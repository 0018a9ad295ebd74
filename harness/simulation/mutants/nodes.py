"""Mutants of a store that several nodes share: locks, conflicts, the database's clock, counts."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant

_NODES = "tests/server/store/test_postgres_nodes.py::"
_LOCKS = "tests/server/store/test_postgres_locks.py::"
_CLOCK = "tests/server/test_database_clock.py::"
_IN_TURN = "in the simulation, transactions of several servers overlap only where one of them stands still"
_COUNT = (
    "INSERT INTO leasekit.task_count AS old SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::bigint[])"
    " ON CONFLICT (node, kind, status) DO UPDATE SET tasks = {}excluded.tasks"
)

NODES: Mapping[str, Mutant] = {
    "row-kept-by-a-node": Mutant(
        "A node judges a task by the row that it read in an earlier transaction.",
        Edit(
            "server.store.postgres.tx:PostgresTx.unlocked_triggers",
            "return found, left",
            "return (self._block.__dict__.setdefault('kept', {}).update({**found, **self._block.__dict__['kept']})"
            " or self._block.__dict__['kept'], left)",
        ),
        test=f"{_NODES}test_a_node_that_has_renewed_a_lease_sees_that_another_has_settled_it",
        why_test=_IN_TURN,
    ),
    "row-judged-without-a-lock": Mutant(
        "A row is judged while another node is about to change it.",
        Edit("server.store.tx:SqlTx.triggers", "sql.BY_ID_LOCKED", "sql.BY_ID"),
        test=f"{_LOCKS}test_a_cancel_judges_the_row_as_another_node_leaves_it",
        why_test=_IN_TURN,
    ),
    "beats-wait-for-a-lock": Mutant(
        "One row that somebody keeps locked delays the heartbeats of all leases.",
        Edit("server.store.postgres.tx:PostgresTx.unlocked_triggers", "sql.BY_ID_UNLOCKED", "sql.BY_ID_LOCKED"),
        test=f"{_LOCKS}test_a_locked_lease_is_renewed_later_and_the_others_at_once",
        why_test=_IN_TURN,
    ),
    "restarted-by-a-node-that-joins": Mutant(
        "A node that joins others gives all leases their whole ttl again.",
        Edit("server.clock:DatabaseClock._judge_start", "instant - step - others_seen > _OUTAGE", "True"),
        test=f"{_NODES}test_a_node_that_joins_or_leaves_extends_no_lease",
        why_test="the checker allows each start of a server to extend leases once",
    ),
    "conflict-ignored": Mutant(
        "A row that another node has added meanwhile counts as added by this one.",
        Edit("server.store.postgres.session:PostgresSession.check", "if cursor.rowcount != expected:\n    ...", "pass"),
        test=f"{_NODES}test_one_id_or_key_from_fifty_clients_over_three_nodes_makes_one_task",
        why_test=_IN_TURN,
    ),
    "contention-not-repeated": Mutant(
        "A transaction that another node has undone fails.",
        Edit("server.commit:GroupCommit._transact", "range(_TRIES)", "range(1)"),
        test=f"{_NODES}test_one_id_or_key_from_fifty_clients_over_three_nodes_makes_one_task",
        why_test=_IN_TURN,
    ),
    "leases-end-by-the-clock-of-a-node": Mutant(
        "Each node counts leases by the clock of its own machine.",
        Edit("server.clock:DatabaseClock.begin", "reading.wall - reading.correction - step", "self.instant()"),
        test=f"{_CLOCK}test_a_node_that_joins_has_the_time_of_the_others_whatever_its_own_clock_shows",
        why_test="the clocks of simulated machines show almost the same time",
    ),
    "step-of-the-database-not-corrected": Mutant(
        "A step of the database's clock ahead shortens leases by as much.",
        Edit("server.clock:DatabaseClock._judge", "gain > ...", "gain > 1e9"),
        by=Histories("shared", ["S2", "S6"], seeds=2),
    ),
    "step-not-seen-by-a-node-that-joins": Mutant(
        "A node that joins before others have seen a step of the database's clock ends leases early by as much.",
        Edit("server.clock:DatabaseClock._judge_start", "abs(instant - last.instant) > _BACK", "False"),
        test=f"{_CLOCK}test_a_node_that_joins_has_the_time_of_the_others_whatever_its_own_clock_shows",
        why_test="a node has to join within a second of a step",
    ),
    "counts-not-added-up": Mutant(
        "The counts of a node are those of its last transaction.",
        Edit(
            "server.store.postgres.tx:PostgresTx.finish",
            repr(_COUNT.format("old.tasks + ")),
            repr(_COUNT.format("")),
        ),
        test=f"{_NODES}test_fifty_claimers_over_three_nodes_never_share_a_task",
        why_test=_IN_TURN,
    ),
    "claim-repeat-at-another-node-grants-anew": Mutant(
        "A claim that waits at two nodes is granted tasks at both.",
        Edit("server.commit:GroupCommit._begin_turn", "self._is_repeated or ...", "self._is_repeated"),
        test=f"{_NODES}test_a_claim_that_waits_at_two_nodes_is_granted_once",
        why_test=_IN_TURN,
    ),
}
