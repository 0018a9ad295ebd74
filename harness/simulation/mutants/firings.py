"""Mutants of periodic tasks: when they fire, what becomes of a firing, and who says what they are."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_OF_RULES = tested(
    "a history has no days on which clocks change",
    """
skipped-times-lost: A firing whose wall time is skipped is left out.
server.firings:Cron._only
- [self._end_of_gap(wall, before, after)]
+ []
tests/server/test_firings.py::test_a_gap_of_half_an_hour

repeated-times-twice: A firing at a chosen hour is made each time at which the wall clock shows its time.
server.firings:Cron._both
- 2 if self.is_hourly else 1
+ 2
tests/server/test_firings.py::test_a_repetition_of_half_an_hour

all-caught-up: All firings of an outage are made up for.
server.firings:due
- max(0, task.catch_up - (len(come) - len(late)))
+ len(late)
tests/server/test_firings.py::test_after_a_day_of_outage_the_latest_are_made_up_for

start-deadline-ignored: A firing is made after its start deadline.
server.firings:due
- lateness[at] > deadline
+ False
tests/server/test_firings.py::test_a_firing_past_its_start_deadline_is_missed_also_if_it_is_made_up_for
""",
)

_OF_FIRINGS = tested(
    "each needs firings that overlap, or an order of a few steps",
    """
firings-in-order: The periodic tasks of one author that are due first fire before all of others.
server.store.memory.view:MemoryView.names_due
- before[by] += 1
+ pass
tests/server/roles/test_periodic.py::test_the_firings_of_one_author_keep_out_none_of_another[memory]

author-by-choice: A client with an access token says who it is.
server.http.request:ApiRequest.author
- self.access.token_id is None
+ True
tests/server/http/test_http_periodic.py::test_whoever_has_an_access_token_is_named_by_it_alone

overlap-allowed: A firing is made while the one before has not ended, whatever the policy says.
server.roles.firing:_planned
- made[:1] if previous is None else []
+ made[:1]
tests/server/roles/test_periodic.py::test_skip_leaves_a_firing_out_while_the_one_before_has_not_ended

runs-replaced: A firing that replaces the one before ends its run.
server.roles.firing:_planned
- previous is not None and previous.status in WAITING
+ previous is not None
tests/server/roles/test_periodic.py::test_replace_lets_a_run_go_on

replaced-go-on: A firing that replaces the one before leaves it.
server.roles.firing:fire_one
- plan.replaced is not None
+ False
tests/server/roles/test_periodic.py::test_replace_cancels_the_one_before_if_it_waits

judged-beside-another-writer: A firing is judged although another writer has the last task.
server.roles.firing:fire_one
- if is_locked:
-     return Fired(row, 0, is_locked=True)
+ pass
tests/server/store/test_postgres_periodic.py::test_while_another_writer_has_the_last_task_nothing_is_judged_and_then_it_is

damaged-ones-judged-again-at-once: A periodic task that cannot be judged is judged again at each look.
server.roles.firing:_put_off
- row._replace(next_at=turn.now + _AGAIN)
+ row
tests/server/roles/test_periodic.py::test_one_that_cannot_be_judged_is_noted_keeps_no_other_from_firing_and_can_be_set_again

repeated-triggers-noted: Each repeat of a trigger is noted as a firing.
server.roles.periodic:_triggered
- answer.created
+ True
tests/server/roles/test_periodic.py::test_a_trigger_that_is_repeated_makes_one_task
""",
)

_OF_CHANGES = tested(
    "the periodic tasks of a history seldom change in the second in which they fire",
    """
pauses-made-up-for: What falls into a pause is made when it ends.
server.roles.periodic:_paused
- row._replace(is_paused=wanted.is_paused, since=turn.now)
+ row._replace(is_paused=wanted.is_paused)
tests/server/roles/test_periodic.py::test_a_paused_one_does_not_fire_and_makes_up_for_nothing_when_it_is_resumed

changes-forget-firings: A change forgets the firings that were due before it.
server.roles.periodic:_changed
- _replaced(turn, _judged(turn, row), wanted)
+ _replaced(turn, row, wanted)
tests/server/roles/test_periodic.py::test_a_change_makes_what_was_due_before_it

changes-fire-for-the-past: Another rule makes the firings that it would have made before.
server.roles.periodic:_replaced
- row.since if _has_same_rule(row, wanted.task) else turn.now
+ row.since
tests/server/roles/test_periodic.py::test_another_rule_makes_no_firing_of_the_past

code-overrules-operators: Code that declares the same again undoes what an operator has set.
server.roles.periodic:_declared
- is_new and data != row.task
+ data != row.task
tests/server/roles/test_periodic.py::test_what_code_declares_again_changes_nothing_that_an_operator_has_changed

older-code-undoes-newer: A worker of an older version undoes what a newer one has declared.
server.declarations:declare
- digest in digests and age < FORGOTTEN
+ False
tests/server/roles/test_periodic.py::test_workers_of_two_versions_do_not_undo_each_other

code-never-taken-back: The older version of code is ignored also after the newer one was taken back.
server.declarations:declare
- digest in digests and age < FORGOTTEN
+ digest in digests
tests/server/roles/test_periodic.py::test_code_that_was_taken_back_holds_no_longer_once_no_worker_repeats_it

each-repeat-written: Each repeat of a declaration is written.
server.declarations:declare
- abs(age) >= _NOTED
+ True
tests/server/roles/test_periodic.py::test_a_fleet_that_repeats_a_declaration_writes_once_a_minute_and_tells_nobody

older-settings-undo-newer: A worker of an older version undoes the settings that a newer one has declared.
server.roles.kinds:_declared
- not is_new or wanted.settings is None
+ wanted.settings is None
tests/server/roles/test_kinds.py::test_an_older_declaration_counts_again_once_the_newer_one_is_forgotten[memory]

other-settings-replaced: Code that says something new about one setting undoes what an operator has set for another.
server.roles.kinds:_merged
- name not in changed
+ False
tests/server/roles/test_kinds.py::test_code_changes_only_the_settings_of_which_it_says_something_new[memory]
""",
)

_BY_HISTORIES: Mapping[str, Mutant] = {
    "firings-skipped": Mutant(
        "A firing is skipped as if the task of the one before had not ended.",
        Edit("server.roles.firing:_planned", 'task.overlap == "skip"', 'task.overlap != "skip"'),
        by=Histories("firings", ["A9"]),
    ),
    "outages-forgotten": Mutant(
        "Only the latest of the firings that came while the server was away is made.",
        Edit("server.firings:due", "task.catch_up", "1"),
        by=Histories("firings", ["A9"]),
    ),
}

FIRINGS: Mapping[str, Mutant] = {**_BY_HISTORIES, **_OF_RULES, **_OF_FIRINGS, **_OF_CHANGES}
