"""Mutants of what waits for others, and of what is changed while it waits."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_BY_HISTORIES: Mapping[str, Mutant] = {
    "followers-not-gated": Mutant(
        "A task that runs after others is due at once.",
        Edit("server.roles.following:_begun", "replace(row, next_trigger_at=AWAITING_AT) if ... else row", "row"),
        by=Histories("dependencies", ["A7"]),
    ),
    "first-success-suffices": Mutant(
        "A task that runs after several others is ready once one of them has succeeded.",
        Edit(
            "server.roles.following:_told",
            "ready.difference_update(task_id for _, task_id in turn.tx.waits_of(ready))",
            "None",
        ),
        by=Histories("dependencies", ["A7"]),
    ),
    "failures-count-as-success": Mutant(
        "A task runs although a task that it runs after has failed.",
        Edit(
            "server.roles.following:_told",
            "ended[wait[0]].status is Status.SUCCESS and wait[1] not in locked",
            "wait[1] not in locked",
        ),
        Edit("server.roles.following:_told", "ended[name].status is not Status.SUCCESS", "False"),
        by=Histories("dependencies", ["A7"]),
    ),
    "ends-not-followed": Mutant(
        "What waits for a task is not told of its end.",
        Edit("server.roles.following:follow", "not turn.tx.has_waits()", "True"),
        by=Histories("dependencies", ["L4"]),
    ),
    "late-grants": Mutant(
        "A claim grants tasks after their start deadlines, and nothing drops them.",
        Edit("server.due_tasks:Sieve.sift", "self._has_deadlines and rows", "False"),
        Edit("server.roles.start_deadlines:tend", "drop(turn, late)", "None"),
        by=Histories("changes", ["A10"]),
    ),
    "new-time-forgotten": Mutant(
        "A reschedule answers with the new time, and the task is due at the old one.",
        Edit(
            "_lifecycle.transitions:rescheduled",
            "replace(row, status=status, fence=row.fence + 1, priority=priority, next_trigger_at=at)",
            "replace(row, status=status, fence=row.fence + 1, priority=priority)",
        ),
        by=Histories("changes", ["A8"]),
    ),
    "reschedule-not-written": Mutant(
        "A reschedule answers with the new time, and writes nothing.",
        Edit("server.roles.rescheduling:reschedule", "desk.save()", "None"),
        by=Histories("changes", ["A8"]),
    ),
    "bulk-act-spreads": Mutant(
        "A bulk act changes tasks that were scheduled after its dry run.",
        Edit("server.roles.selection:Stretch.next", "min(first + LOOK - 1, last)", "first + LOOK - 1"),
        Edit("server.roles.bulk:begin", "until / 1e6", "1e12"),
        by=Histories("bulk", ["A12"]),
    ),
    "bulk-act-stops-early": Mutant(
        "A bulk act changes the first task that it finds.",
        Edit("server.roles.bulk:_unchanged", "found.items()", "list(found.items())[:1]"),
        by=Histories("bulk", ["A12"]),
    ),
    "bulk-reschedule-moves-nothing": Mutant(
        "A bulk reschedule answers with the tasks that match, and their due times stay.",
        Edit("server.roles.bulk:_rescheduled", "rescheduling.reschedule(turn, wanted)", "[]"),
        by=Histories("bulk", ["A12"]),
    ),
    "runs-replaced-by-submissions": Mutant(
        "A submission replaces the payload of a task that was claimed.",
        Edit("server.roles.frontend:Replaced.take", "row.claimed_at is not None", "False"),
        by=Histories("debounces", ["A13"]),
    ),
    "payload-of-the-first": Mutant(
        "A submission that replaces a task moves its due time only.",
        Edit("server.roles.frontend:Replaced.save", "tx.replace_payloads(self._payloads)", "None"),
        by=Histories("debounces", ["A13"]),
    ),
    "replaced-is-due-as-before": Mutant(
        "A submission that replaces a task leaves its due time.",
        Edit(
            "server.roles.frontend:Replaced.take",
            "rescheduled(row, at=..., priority=None)",
            "rescheduled(row, at=row.next_trigger_at, priority=None)",
        ),
        by=Histories("debounces", ["A13"]),
    ),
    "bursts-without-end": Mutant(
        "Submissions put a task off for longer than their `debounce`.",
        Edit(
            "server.roles.frontend:Replaced.take",
            "min(due_at(task, turn.now), entities[row.seq].created_at + (task.debounce or 0.0))",
            "due_at(task, turn.now)",
        ),
        by=Histories("debounces", ["A13"]),
    ),
    "live-keys-free": Mutant(
        "A live dedupe key is free while its task has not ended.",
        Edit(
            "server.roles.frontend:_Intake.take",
            'task.dedupe_scope == "kept" or not status.ended',
            'task.dedupe_scope == "kept"',
        ),
        by=Histories("debounces", ["S11"]),
    ),
}

_BY_TESTS = tested(
    "each needs a message of a queue, a gate, or a step between two others",
    """
running-task-rescheduled: A task that runs gets another due time, and its lease ends then.
server.roles.rescheduling:_fault
- row.status in LEASED
+ False
tests/server/roles/test_rescheduling.py::test_what_does_not_wait_is_refused_with_what_to_do[memory]

message-outlives-its-task: A message that was sent for a task before it was put off brings the new time forward.
_lifecycle.transitions:rescheduled
- row.fence + 1
+ row.fence
tests/server/roles/test_rescheduling.py::test_a_message_that_was_sent_before_brings_no_later_time_forward[memory]

others-not-awaited: A task that runs after others is due once it is rescheduled.
server.roles.rescheduling:_Desk._change
- is_awaiting(row)
+ False
tests/server/roles/test_rescheduling.py::\
test_a_task_that_waits_for_others_goes_on_waiting_and_is_due_then[memory]

parked-and-lost: A task that a gate has parked, and that gets another priority, is never due again.
server.roles.rescheduling:_Desk._change
- self._parked.get(row.seq, row.next_trigger_at or turn.now)
+ row.next_trigger_at or turn.now
tests/server/roles/test_rescheduling.py::\
test_a_task_that_a_gate_has_parked_waits_behind_it_until_its_new_time[memory]

parked-and-forgotten: A repeated reschedule takes a task from where a gate has parked it, and it is never due again.
server.roles.rescheduling:_Desk.save
- self._parked.keys() & {row.seq for row in self._changed.values()}
+ self._parked
tests/server/roles/test_rescheduling.py::\
test_a_request_that_changes_nothing_leaves_a_parked_task_behind_its_gate[memory-None]

lane-kept: A task with another priority is due in its old lane.
server.store.sql.keyed:KeyedTasks.move
- place._replace(priority=priority)
+ place
tests/server/roles/test_rescheduling.py::test_a_task_goes_to_the_lane_of_its_new_priority[sqlite-tenant]

reschedule-repeated: A reschedule whose answer was lost is made again when it is repeated.
server.roles.rescheduling:_Desk.reschedule
- entry is not None and entry.token == request.wanted.request_id
+ False
tests/server/roles/test_rescheduling.py::test_a_repeated_request_changes_nothing[memory]

history-grows: Each reschedule has an entry in the history.
server.roles.rescheduling:_Desk._note
- entry is not None and entry.fence == row.fence - 1 and row.seq not in self._runs
+ False
tests/server/roles/test_rescheduling.py::\
test_the_history_has_the_last_of_the_reschedules_between_two_runs[memory]

late-result-in-place-of-a-reschedule: The late result of an expired lease overwrites the reschedule in the history.
server.roles.hsc:_Desk._revise
- row.fence if run is None else run.fence
+ row.fence
tests/server/roles/test_rescheduling.py::\
test_a_task_whose_lease_has_ended_waits_and_its_late_result_counts[memory]

begun-task-replaced: A submission replaces the payload of a task that runs again, whose checkpoint is of the old one.
server.roles.frontend:Replaced.take
- row.claimed_at is not None
+ False
tests/server/roles/test_debounce.py::\
test_a_task_that_waits_for_its_next_attempt_keeps_its_payload[memory]

put-off-for-ever: Submissions put a task off for longer than its `debounce`.
server.roles.frontend:Replaced.take
- min(due_at(task, turn.now), entities[row.seq].created_at + (task.debounce or 0.0))
+ due_at(task, turn.now)
tests/server/roles/test_debounce.py::test_it_is_not_put_off_for_longer_than_it_says[memory]

later-tasks-touched: A bulk act touches tasks that were scheduled after its dry run.
server.roles.selection:Stretch.next
- min(first + LOOK - 1, last)
+ first + LOOK - 1
tests/server/roles/test_bulk.py::test_what_comes_after_the_dry_run_is_not_touched[memory]

later-tasks-of-other-nodes-touched: A bulk act touches tasks whose numbers another node had reserved before.
server.store.sql.listing:ListingView.page
- task.c.created_at <= wanted.scheduled_by
+ True
tests/server/roles/test_bulk.py::test_what_another_node_takes_later_under_an_earlier_number_is_not_touched

any-token: A bulk act takes the token of another one.
server.roles.bulk:_bounds
- match is None or match[3] != digest
+ match is None
tests/server/roles/test_bulk.py::test_an_act_takes_the_token_of_the_same_request_only[memory]

found-is-changed: A bulk act changes tasks that have begun to run since it has found them.
server.roles.bulk:_is_as
- (row.seq, row.fence, waits, row.status.ended) == (before.seq, before.fence, waited, False)
+ True
tests/server/roles/test_bulk.py::test_a_task_that_has_changed_since_it_was_found_is_left_alone[memory]

live-key-kept: A live dedupe key is taken after the end of its task.
server.roles.frontend:_Intake.take
- task.dedupe_scope == "kept" or not status.ended
+ True
tests/server/roles/test_debounce.py::test_a_live_key_is_free_once_its_task_has_ended[memory]

late-tasks-granted: A claim grants a task past its start deadline.
server.due_tasks:Sieve.sift
- self._has_deadlines and rows
+ False
tests/server/roles/test_start_deadlines.py::\
test_a_claim_grants_no_task_too_late_also_between_two_looks[memory]

late-tasks-kept: A task past its start deadline that no worker asks for waits for ever.
server.roles.start_deadlines:tend
- drop(turn, late)
+ None
tests/server/roles/test_start_deadlines.py::\
test_a_task_for_which_no_worker_asks_is_dropped_by_the_consumer[memory]

half-open-engine: The writer of an engine that did not open goes on, beside that of the next engine.
server.engine:Engine.__aenter__
- steps.push_async_callback(self.commit.stop)
+ pass
tests/server/test_engine.py::\
test_an_engine_that_fails_or_is_cancelled_while_it_opens_leaves_no_writer[memory-False]

half-closed-engine: A caller that is cancelled leaves the engine of its backend neither open nor closed.
server.embedded:EmbeddedBackend._whole
- return await asyncio.shield(task)
+ return await task
tests/server/test_embedded.py::\
test_an_engine_is_opened_and_closed_to_the_end_though_the_caller_is_cancelled[close]

late-tasks-given-back: A task past its start deadline that a worker gives back unbegun is granted again.
server.roles.start_deadlines:tend
- turn.tx.drop_deadlines(set(seqs) - granted - {row.seq for row in late})
+ turn.tx.drop_deadlines(turn.tx.deadlines(range(1000)))
tests/server/roles/test_start_deadlines.py::\
test_a_task_that_a_worker_gives_back_from_its_buffer_too_late_is_dropped[memory]

begun-and-too-late: A task that has begun in time is dropped if it runs again.
server.roles.hsc:_save_beats
- start_deadlines.begun(turn, batch.begun)
+ None
tests/server/roles/test_start_deadlines.py::test_a_task_that_has_begun_is_not_dropped_when_it_runs_again[memory]

crashed-and-too-late: A task whose handler has begun in time, and crashed at once, is not tried again.
server.roles.hsc:_Desk.save
- start_deadlines.begun(self._turn, self._failed)
+ None
tests/server/roles/test_start_deadlines.py::\
test_a_task_whose_handler_has_crashed_before_its_first_heartbeat_is_not_dropped[memory]

deadline-not-moved: A start deadline counts from the due time before a reschedule.
server.roles.rescheduling:_Desk.save
- start_deadlines.move(self._turn, self._new_due)
+ None
tests/server/roles/test_start_deadlines.py::test_another_due_time_moves_the_deadline[memory-reschedule]
""",
)

CHANGES: Mapping[str, Mutant] = {**_BY_HISTORIES, **_BY_TESTS}
