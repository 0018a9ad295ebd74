"""Mutants of fair shares: how often a key is started, and what becomes of its queue."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Mutant

_NO_KEYS = "the checker judges no order among keys"

SHARES: Mapping[str, Mutant] = {
    "starts-not-counted": Mutant(
        "What is taken from a key is not counted.",
        Edit("server.fair_lane:FairLane.close", "self._turn.tx.charge(...)", "pass"),
        test="tests/server/roles/test_shares.py::test_a_restart_in_mid_backlog_changes_nothing",
        why_test=_NO_KEYS,
    ),
    "newcomers-have-credit": Mutant(
        "A key that was away is served alone until it has caught up.",
        Edit("server.fair_lane:FairLane._joined", "min(...)", "share.taken"),
        test="tests/server/roles/test_shares.py::test_a_key_that_was_away_has_no_credit",
        why_test=_NO_KEYS,
    ),
    "debts-are-kept": Mutant(
        "A key that comes back waits until the others have had as much as it had alone.",
        Edit("server.fair_lane:FairLane._joined", "min(...)", "max(share.taken, self._base)"),
        test="tests/server/roles/test_shares.py::test_a_key_owes_one_task_at_most_when_it_comes_back",
        why_test=_NO_KEYS,
    ),
    "idle-keys-compete": Mutant(
        "A key without due tasks holds the clock of its lane, and has credit when it comes back.",
        Edit("server.store.memory.shares:MemoryShares.charge", "waiting is not None and ...", "True"),
        test="tests/server/roles/test_shares.py::test_a_key_that_was_away_has_no_credit",
        why_test=_NO_KEYS,
    ),
    "new-keys-missed": Mutant(
        "A claim does not see the keys of tasks that its own transaction has scheduled.",
        Edit("server.store.sql.keyed:KeyedTasks.keys", "self._keys.get(...)", "set()"),
        test="tests/server/roles/test_shares.py::test_a_task_is_granted_once_in_the_transaction_that_schedules_it",
        why_test=_NO_KEYS,
    ),
    "shares-not-written": Mutant(
        "A transaction leaves the shares of the keys that it changes as they were.",
        Edit("server.store.sql.keyed:KeyedTasks.changes", "sorted(...)", "[]"),
        test="tests/server/roles/test_shares.py::test_keys_that_come_and_go_stay_within_two_tasks_of_each_other",
        why_test=_NO_KEYS,
    ),
    "returned-tasks-lose-their-key": Mutant(
        "A task that is given back waits among those without a key.",
        Edit("server.store.sql.keyed:KeyedTasks.save", "self._look_up(...)", "pass"),
        test="tests/server/roles/test_shares.py::test_tasks_that_expire_or_are_given_back_keep_their_key",
        why_test=_NO_KEYS,
    ),
}
