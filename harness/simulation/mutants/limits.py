"""Mutants of limits and shares: how many tasks of a kind run and start, and which kind's turn it is."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant

_LIMITS = "tests/server/roles/test_limits.py"
_KEYS = "tests/server/roles/test_key_limits.py"
_ORDER = "tests/server/roles/test_ordered_keys.py"

LIMITS: Mapping[str, Mutant] = {
    "running-tasks-not-counted": Mutant(
        "A claim takes no account of the leases that a kind has already.",
        Edit("server.rooms:Rooms._measured", "rules.concurrency - running.get(kind, 0)", "rules.concurrency"),
        by=Histories("kind_limits", ["A3"]),
    ),
    "one-claim-passes-the-limit": Mutant(
        "A claim gets all that it asks for of a kind that has one place left.",
        Edit("server.kind_queue:KindQueue.take", "min(limit, self._rooms.left(self.kind))", "limit"),
        by=Histories("kind_limits", ["A3", "A4"]),
    ),
    "tokens-not-kept": Mutant(
        "The next transaction finds the bucket as full as the last one did.",
        Edit("server.rooms:Rooms.save", "self._tx.set_buckets(changed)", "pass"),
        by=Histories("kind_limits", ["A4"]),
    ),
    "bucket-without-a-bottom": Mutant(
        "A bucket that was full for long lets more than its burst start.",
        Edit("server.token_bucket:Bucket.less", "max(self.full_at, now)", "self.full_at"),
        by=Histories("kind_limits", ["A4"]),
    ),
    "debt-of-an-old-rate": Mutant(
        "What was started under a low rate counts in full against a higher one.",
        Edit("server.rooms:Rooms.refit", "rules.rate is not None", "False"),
        test=f"{_LIMITS}::test_a_rate_that_is_raised_holds_at_once",
        why_test="the checker judges no waits at a limit",
    ),
    "free-place-not-told": Mutant(
        "A claim that waits for a place hears nothing when a run ends.",
        Edit("server.unit_of_work:UnitOfWork._places_freed", "not rules", "True"),
        test=f"{_LIMITS}::test_claims_are_not_woken_for_tasks_that_cannot_start",
        why_test="the checker judges no waits at a limit",
    ),
    "running-tasks-of-keys-not-counted": Mutant(
        "A claim takes no account of the leases that a key has already.",
        Edit("server.key_rooms:KeyRooms.look", "running.get(key, 0)", "0"),
        by=Histories("key_limits", ["A5"]),
    ),
    "one-claim-passes-the-limit-of-a-key": Mutant(
        "A claim gets all that it asks for of a key that has one place left.",
        Edit("server.fair_lane:FairLane.pop", "self._keys.start(key)", "pass"),
        by=Histories("busy_keys", ["A5", "A6"]),
    ),
    "free-place-of-a-key-unseen": Mutant(
        "The end of a run leaves its key out of the competition.",
        Edit("server.key_rooms:release", "_ready(turn, turn.tx.free_keys(seqs))", "pass"),
        test=f"{_KEYS}::test_a_place_of_a_key_is_free_however_a_run_ends",
        why_test="the checker judges no waits at a limit",
    ),
    "free-place-of-a-key-not-told": Mutant(
        "A claim that waits for a place of a key hears nothing when a run ends.",
        Edit("server.key_rooms:_ready", "turn.ready(lane.name, lane.due_at)", "pass"),
        test=f"{_KEYS}::test_a_claim_that_waits_gets_a_task_when_its_key_has_a_place",
        why_test="the checker judges no waits at a limit",
    ),
    "place-given-up-for-a-retry": Mutant(
        "A task of an ordered key that runs again gives up its place meanwhile.",
        Edit("server.key_rooms:release", "turn.tx.keep_places(again)", "pass"),
        by=Histories("busy_keys", ["A14"]),
    ),
    "kept-places-not-counted": Mutant(
        "A claim takes no account of the places that tasks keep while they wait to run again.",
        Edit(
            "server.store.memory.view:MemoryView.running_of_keys",
            "itertools.chain(self._leased(), kept)",
            "self._leased()",
        ),
        by=Histories("busy_keys", ["A14"]),
    ),
    "places-kept-beside-each-other": Mutant(
        "All tasks that ran before their key was ordered keep its place, and run again at once.",
        Edit("server.store.memory.shares:MemoryShares.keep_places", "not self.running_of_keys(...)", "True"),
        by=Histories("key_limits", ["A5"]),
    ),
    "place-kept-by-the-dead": Mutant(
        "A task that ends while it waits to run again keeps the place of its key.",
        Edit("server.key_rooms:let_go", "turn.tx.drop_places(seqs)", "False"),
        test=f"{_ORDER}::test_a_claim_that_waits_hears_that_a_task_that_was_to_run_again_was_cancelled[memory-2]",
        why_test="the checker judges no waits at a limit",
    ),
    "places-outlive-the-order": Mutant(
        "Tasks keep their places when their keys are no longer ordered.",
        Edit("server.roles.kinds:_write", "not rules.ordered", "False"),
        test=f"{_ORDER}::test_no_place_is_kept_once_the_order_is_given_up[memory]",
        why_test="the operator of the simulation takes all limits of a kind back at once",
    ),
    "kept-place-closed-to-its-own-ticket": Mutant(
        "A message of a queue does not entitle to the task that keeps the place of its key.",
        Edit("server.roles.tickets:TicketTasks._has_place_of_key", "self._turn.tx.kept_places(...)", "False"),
        test=f"{_ORDER}::test_a_message_of_a_queue_entitles_to_a_task_that_keeps_its_place_and_to_no_other_of_its_key[memory]",
        why_test="the queues of the simulation are those of kinds without limits of keys",
    ),
    "full-keys-stay": Mutant(
        "A full key stays in its lane, where each claim looks at it again.",
        Edit("server.fair_lane:FairLane.close", "self._turn.tx.leave(...)", "pass"),
        test=f"{_KEYS}::test_a_full_key_costs_later_claims_nothing",
        why_test="the checker judges no waits at a limit",
    ),
    "tokens-of-keys-not-kept": Mutant(
        "The next transaction finds the buckets of keys as full as the last one did.",
        Edit("server.rooms:Rooms.save", "changed |= keys.buckets()", "pass"),
        by=Histories("key_limits", ["A6"]),
    ),
    "key-without-a-token-comes-back-unheard": Mutant(
        "A claim that waits for a token of a key hears nothing when it comes.",
        Edit("server.key_rooms:KeyRooms.again_at", "self._buckets[key].next_at", "None"),
        test=f"{_KEYS}::test_a_claim_that_waits_gets_a_task_when_its_key_has_a_token",
        why_test="the checker judges no waits at a limit",
    ),
    "debt-of-keys-of-an-old-rate": Mutant(
        "What keys have started under a low rate counts in full against a higher one.",
        Edit("server.rooms:Rooms.refit", "rules.key_rate is not None", "False"),
        test=f"{_KEYS}::test_a_rate_of_keys_that_is_raised_or_lifted_holds_at_once",
        why_test="the checker judges no waits at a limit",
    ),
    "joining-keys-cut-off": Mutant(
        "A claim looks at one page of the keys that join, though all in it are full.",
        Edit("server.fair_lane:FairLane._first_shares", "self._keys is None", "True"),
        test=f"{_KEYS}::test_many_keys_that_are_full_delay_no_other_key",
        why_test="the checker judges no waits at a limit",
    ),
    "woken-at-a-limit": Mutant(
        "Each new task of a kind at its limit wakes a claim, which finds no place.",
        Edit("server.long_poll:LongPolls.expect", "kind_of(name) not in self._full", "True"),
        test=f"{_LIMITS}::test_claims_are_not_woken_for_tasks_that_cannot_start",
        why_test="the checker judges no waits at a limit",
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
        why_test="the kinds of the simulation do not age",
    ),
}
