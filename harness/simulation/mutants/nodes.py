"""Mutants of a store that several nodes share: locks, conflicts, the database's clock, counts."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_IN_TURN = tested(
    "in the simulation, transactions of several servers overlap only where one of them stands still",
    """
row-kept-by-a-node: A node judges a task by the row that it read in an earlier transaction.
server.store.postgres.tx:PostgresTx.unlocked_triggers
- return found, left
+ return (self._block.__dict__.setdefault('kept', {}).update({**found, **self._block.__dict__['kept']})
+     or self._block.__dict__['kept'], left)
tests/server/store/test_postgres_nodes.py::test_a_node_that_has_renewed_a_lease_sees_that_another_has_settled_it

row-judged-without-a-lock: A row is judged while another node is about to change it.
server.store.sql.tasks:TaskTx.triggers
- BY_ID_LOCKED
+ BY_ID
tests/server/store/test_postgres_locks.py::test_a_cancel_judges_the_row_as_another_node_leaves_it

beats-wait-for-a-lock: One row that somebody keeps locked delays the heartbeats of all leases.
server.store.postgres.tx:PostgresTx.unlocked_triggers
- tasks.BY_ID_UNLOCKED
+ tasks.BY_ID_LOCKED
tests/server/store/test_postgres_locks.py::test_a_locked_lease_is_renewed_later_and_the_others_at_once

conflict-ignored: A row that another node has added meanwhile counts as added by this one.
server.store.postgres.session:PostgresSession.check
- if cursor.rowcount != expected:
-     ...
+ pass
tests/server/store/test_postgres_nodes.py::test_one_id_or_key_from_fifty_clients_over_three_nodes_makes_one_task

contention-not-repeated: A transaction that another node has undone fails.
server.commit:GroupCommit._transact
- range(_TRIES)
+ range(1)
tests/server/store/test_postgres_nodes.py::test_one_id_or_key_from_fifty_clients_over_three_nodes_makes_one_task

counts-not-added-up: The counts of a node are those of its last transaction.
server.store.postgres.tx:PostgresTx.finish
- (
-     "INSERT INTO leasekit.task_count AS old SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::bigint[])"
-     " ON CONFLICT (node, kind, status) DO UPDATE SET tasks = old.tasks + excluded.tasks"
- )
+ (
+     "INSERT INTO leasekit.task_count AS old SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::bigint[])"
+     " ON CONFLICT (node, kind, status) DO UPDATE SET tasks = excluded.tasks"
+ )
tests/server/store/test_postgres_nodes.py::test_fifty_claimers_over_three_nodes_never_share_a_task

ends-told-to-no-node: A request that waits at one node does not hear of an end at another.
server.neighbours:Neighbours.tell
- wanted.pop(task_id, None) is not None
+ False
tests/server/test_neighbours.py::test_a_request_hears_of_an_end_at_another_node

limited-kind-started-by-two-nodes: Two nodes count the leases of a kind at once, and each takes the last place.
server.store.postgres.tx:PostgresTx.begin_starts
- return ...
+ return kinds
tests/server/store/test_postgres_nodes.py::test_a_node_that_finds_another_starting_tasks_of_a_limited_kind_does_not_wait_for_it

free-place-of-a-key-missed-by-nodes: A node takes a key out of its lane by a count that is older than the end of a run.
server.store.postgres.tx:PostgresTx._agree_on_places
- self._keyed.stay(...)
+ pass
tests/server/store/test_postgres_key_limits.py::test_a_place_that_another_node_frees_while_a_claim_finds_the_key_full_is_seen

key-taken-out-unseen-by-nodes: The end of a run does not see that another node has just taken its key out of a lane.
server.store.postgres.tx:PostgresTx._agree_on_places
- super().free_keys(self._freed)
+ pass
tests/server/store/test_postgres_key_limits.py::test_a_key_that_another_node_takes_out_while_its_run_ends_comes_back

free-place-not-told-to-nodes: A node is not told that a place is free, and finds out by a look.
server.neighbours:Neighbours._gathered
- newly.freed
+ 0
tests/server/store/test_postgres_nodes.py::test_a_claim_of_one_node_hears_of_a_place_that_is_free_on_another

claim-repeat-at-another-node-grants-anew: A claim that waits at two nodes is granted tasks at both.
server.commit:GroupCommit._begin_turn
- self._is_repeated or ...
+ self._is_repeated
tests/server/store/test_postgres_nodes.py::test_a_claim_that_waits_at_two_nodes_is_granted_once
""",
)

_CLOCKS = tested(
    "the clocks of simulated machines show almost the same time, and no node joins within a second of a step; the"
    " checker allows each start of a server to extend leases once",
    """
restarted-by-a-node-that-joins: A node that joins others gives all leases their whole ttl again.
server.clock:DatabaseClock._judge_start
- instant - step - others_seen > _OUTAGE
+ True
tests/server/store/test_postgres_nodes.py::test_a_node_that_joins_or_leaves_extends_no_lease

leases-end-by-the-clock-of-a-node: Each node counts leases by the clock of its own machine.
server.clock:DatabaseClock.begin
- reading.wall - reading.correction - step
+ self.instant()
tests/server/test_database_clock.py::test_a_node_that_joins_has_the_time_of_the_others_whatever_its_own_clock_shows

step-not-seen-by-a-node-that-joins: A node that joins before others have seen a step ends leases early by as much.
server.clock:DatabaseClock._judge_start
- abs(instant - last.instant) > _BACK
+ False
tests/server/test_database_clock.py::test_a_node_that_joins_has_the_time_of_the_others_whatever_its_own_clock_shows
""",
)

NODES: Mapping[str, Mutant] = {
    **_IN_TURN,
    **_CLOCKS,
    "step-of-the-database-not-corrected": Mutant(
        "A step of the database's clock ahead shortens leases by as much.",
        Edit("server.clock:DatabaseClock._judge", "gain > ...", "gain > 1e9"),
        by=Histories("shared", ["S2", "S6"], seeds=2),
    ),
}
