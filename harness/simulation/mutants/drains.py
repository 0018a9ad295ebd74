"""Mutants of drains: what a worker that drains is granted, and who hears of it."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_BY_HISTORIES: Mapping[str, Mutant] = {
    "drained-workers-claim": Mutant(
        "A claim that arrives after the drain of its worker is granted tasks.",
        Edit("server.roles.drains:holds", "not all(kind.startswith(NAME_PREFIXES) for kind in claim.kinds)", "False"),
        by=Histories("drains", ["A15"]),
    ),
    "changed-drains-not-read": Mutant(
        "A node goes on with the drains that it has read first.",
        Edit(
            "server.store.kind_defaults:KindDefaults.read",
            "{row.worker: row for row in tx.drains()}",
            "self.drains",
        ),
        by=Histories("drains", ["A15"]),
    ),
    "drain-not-counted": Mutant(
        "A drain is written without a change that makes nodes read it.",
        Edit("server.store.memory.rules:MemoryRules.set_drain", "self._count_change()", "pass"),
        by=Histories("drains", ["A15"]),
    ),
}

_BY_A_TEST = tested(
    "in the histories each process has a name of its own, and an idle worker asks again within a minute",
    """
drain-without-a-word: A claim that waits is not answered when its worker is drained.
server.long_poll:LongPolls.drain
- self._try_again(poll)
+ pass
tests/server/roles/test_drains.py::test_a_claim_that_waits_is_answered_at_once

drained-claims-keep-their-wake: A task that has woken the claim of a worker that drains wakes no other.
server.roles.claims:claim
- if waiting:
-     emptied = [item for item in present if _took_all(item, answers.get(id(item)))]
-     _note_what_is_left(turn, waiting, emptied, full, tried=len(requests))
+ if present:
+     emptied = [item for item in present if _took_all(item, answers.get(id(item)))]
+     _note_what_is_left(turn, present, emptied, full, tried=len(requests))
tests/server/roles/test_drains.py::test_a_task_that_wakes_a_claim_of_a_draining_worker_goes_to_another

drained-for-ever: A process that started after the drain of its name is drained too.
server.roles.drains:holds
- (claim.since is not None and claim.since > mark.at)
+ False
tests/server/roles/test_drains.py::\
test_a_process_that_starts_later_under_the_same_name_is_not_drained_and_ends_the_drain

drains-outlive-their-workers: The drain of a worker that has gone is kept.
server.fleet:Fleet.gone
- mark.worker not in roster.names
+ False
tests/server/roles/test_drains.py::test_the_drain_of_a_worker_that_has_gone_is_over

drains-end-under-a-long-task: The drain of a worker that holds a task ends when it has not claimed for long.
server.fleet:Fleet.gone
- mark.worker not in roster.names
+ True
tests/server/roles/test_drains.py::test_the_drain_of_a_worker_that_holds_a_task_goes_on

drained-locks-refused: A worker that drains gets no name, which its last task may wait for.
server.roles.drains:holds
- not all(kind.startswith(NAME_PREFIXES) for kind in claim.kinds)
+ True
tests/server/roles/test_drains.py::test_names_are_granted_so_that_what_runs_can_end
""",
)

DRAINS: Mapping[str, Mutant] = {**_BY_HISTORIES, **_BY_A_TEST}
