"""Mutants of limits and shares: how many tasks of a kind run and start, and which kind's turn it is."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Mutant

_LIMITS = "tests/server/roles/test_limits.py"

LIMITS: Mapping[str, Mutant] = {
    "running-tasks-not-counted": Mutant(
        "A claim takes no account of the leases that a kind has already.",
        Edit("server.rooms:Rooms._measured", "rules.concurrency - running.get(kind, 0)", "rules.concurrency"),
        test=f"{_LIMITS}::test_no_more_tasks_are_under_a_lease_than_the_concurrency_of_their_kind",
        why_test="the kinds of the simulation have no limits",
    ),
    "one-claim-passes-the-limit": Mutant(
        "A claim gets all that it asks for of a kind that has one place left.",
        Edit("server.kind_queue:KindQueue.take", "min(limit, self._rooms.left(self.kind))", "limit"),
        test=f"{_LIMITS}::test_no_more_tasks_start_than_the_burst_and_what_has_come_since",
        why_test="the kinds of the simulation have no limits",
    ),
    "tokens-not-kept": Mutant(
        "The next transaction finds the bucket as full as the last one did.",
        Edit("server.rooms:Rooms.save", "self._tx.set_buckets(changed)", "pass"),
        test=f"{_LIMITS}::test_no_more_tasks_start_than_the_burst_and_what_has_come_since",
        why_test="the kinds of the simulation have no limits",
    ),
    "bucket-without-a-bottom": Mutant(
        "A bucket that was full for long lets more than its burst start.",
        Edit("server.token_bucket:Bucket.less", "max(self.full_at, now)", "self.full_at"),
        test=f"{_LIMITS}::test_no_more_tasks_start_than_the_burst_and_what_has_come_since",
        why_test="the kinds of the simulation have no limits",
    ),
    "debt-of-an-old-rate": Mutant(
        "What was started under a low rate counts in full against a higher one.",
        Edit("server.rooms:Rooms.refit", "turn.tx.set_buckets(new)", "pass"),
        test=f"{_LIMITS}::test_a_rate_that_is_raised_holds_at_once",
        why_test="the kinds of the simulation have no limits",
    ),
    "free-place-not-told": Mutant(
        "A claim that waits for a place hears nothing when a run ends.",
        Edit("server.unit_of_work:UnitOfWork._places_freed", "not rules", "True"),
        test=f"{_LIMITS}::test_claims_are_not_woken_for_tasks_that_cannot_start",
        why_test="the kinds of the simulation have no limits",
    ),
    "woken-at-a-limit": Mutant(
        "Each new task of a kind at its limit wakes a claim, which finds no place.",
        Edit("server.long_poll:LongPolls.expect", "kind not in self._full", "True"),
        test=f"{_LIMITS}::test_claims_are_not_woken_for_tasks_that_cannot_start",
        why_test="the kinds of the simulation have no limits",
    ),
    "kinds-without-turns": Mutant(
        "Of several kinds, the one with the longest backlog is served first.",
        Edit("server.kind_clock:KindClock.take", "start + 1 / queue.weight", "start"),
        test=f"{_LIMITS}::test_kinds_take_turns_whichever_is_longer_due",
        why_test="the checker judges no order among kinds of one priority",
    ),
    "credit-of-idle-kinds": Mutant(
        "A kind that was away for a while is served alone until it has caught up.",
        Edit("server.kind_clock:KindClock._starts", "max(end, now)", "end"),
        test=f"{_LIMITS}::test_a_kind_that_was_away_has_no_credit",
        why_test="the checker judges no order among kinds of one priority",
    ),
    "age-ignored": Mutant(
        "A task that has waited for long is as urgent as before.",
        Edit("server.kind_queue:levels", "reader.due_at <= now - rules.aging", "False"),
        test=f"{_LIMITS}::test_a_task_that_has_aged_counts_as_of_the_highest_priority",
        why_test="the kinds of the simulation have no rules",
    ),
}
