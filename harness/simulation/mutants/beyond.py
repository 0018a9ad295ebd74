"""Mutants of rules that no history reaches: of processes, files, requests at their limits, and the adapters."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

_PROCESSES = tested(
    "in the simulation, handlers are coroutines, and nothing interrupts a user's thread",
    """
unguarded-executor-used: A handler begins before the guard of its executor has confirmed the end of its lease.
_worker.process.place:Place._begins
- run.number <= executor.confirmed
+ True
tests/worker/process/test_guarded.py::test_an_executor_whose_guard_does_not_answer_is_given_no_body

group-not-killed: The children of an executor are not killed with it.
_worker.process.guarded_process:GuardedProcess.kill
- _kill_group(...)
+ pass
tests/worker/process/test_guarded_process.py::\
test_the_process_group_is_killed_with_an_executor_whose_guard_is_stopped

text-for-a-length: Text in the socket of an executor is taken for the length of a message, which never comes.
_worker.process.messages:Frames.feed
- length > _LONGEST
+ False
tests/worker/process/test_handlers_in_processes.py::\
test_whatever_a_body_does_it_ends_as_what_it_is[prints_into_its_line]

guard-never-armed: The guard does not kill its executor at the end of trust.
_worker.process.guard:_Executor.arm
- self._timers.alarm.arm(...)
+ pass
tests/worker/process/test_guarded_process.py::\
test_of_a_body_that_changed_its_user_nothing_runs_after_its_trust_although_its_worker_is_stopped

guard-ends-unread: A guard ends at once if its worker died before it had read an answer.
_worker.process.guard:_obey
- ConnectionError
+ InterruptedError
tests/worker/process/test_guarded_process.py::\
test_a_worker_that_dies_with_an_unread_answer_leaves_no_process_of_its_handler[True]

executor-job-not-waited-for: A task is settled while a thread that its handler started goes on.
_worker.jobs:count_in.run_counted
- jobs.add(job)
+ pass
tests/worker/test_jobs.py::test_a_task_is_settled_when_nothing_of_its_body_runs

run-left-current: Where the begin or the end of a block was interrupted, later tasks count as scheduled by its task.
_lineage:_innermost
- (run := entered.run()) is None or run.is_over
+ False
tests/test_interrupts.py::test_an_interrupt_anywhere_holds_up_no_beats_and_leaves_no_lease

abandoned-lease-renewed: A lease is renewed for ever where the end of its block was interrupted.
_driver.keeping.keeper:Keeper._look_after
- self.abandoned(...)
+ pass
tests/test_interrupts.py::\
test_a_lease_whose_block_was_left_by_two_interrupts_is_given_back_with_its_next_heartbeat
""",
)

_FILES = tested(
    "in the simulation, no process has a file",
    """
store-locked-by-its-path: A server that comes to the store of another by another path is let in.
server.store.sqlite.lock:FileLock.acquire
- self._lock(self._path)
+ os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
tests/server/store/test_identity.py::test_a_second_server_is_refused_by_whatever_way_it_comes

hard-link-accepted: A store with two names is opened, and SQLite keeps a log for each.
server.store.sqlite.lock:FileLock._check_file
- status.st_nlink > 1
+ False
tests/server/store/test_identity.py::test_a_file_with_two_names_is_refused_with_what_to_do

spool-of-another-version-dropped: A spool with lines that this version cannot read is deleted.
_driver.reporting.spool:_Adopted.end
- if self.unread:
-     ...
- else:
-     ...
+ self.path.unlink(missing_ok=True)
tests/driver/reporting/test_spool.py::test_a_file_that_cannot_be_read_to_its_end_is_kept_aside_and_the_rest_reported
""",
)

_LIMITS = tested(
    "histories have no requests and no settings at their limits",
    """
outage-without-the-slots: The outage that is survived does not count the wait for the next slot.
config:Heartbeats._last_try
- max(self.retry_wait, 1 / self.rate)
+ self.retry_wait
tests/core/test_outages.py::test_an_outage_of_outage_survived_loses_no_lease_whatever_the_settings_are

too-large-reported-for-ever: A settlement that no request can hold is sent all the same, and again.
leasekit_http.backend:HttpBackend._post_items
- if len(body) > MAX_BODY:
-     ...
+ pass
tests/test_too_large.py::test_a_settlement_that_fits_into_no_request_is_refused_with_its_largest_field

repeats-decode-what-is-stored: Each repeat of a known id decodes the payload that is stored.
server.roles.frontend:_Intake.take
- known.digest
+ payload_digest(next(iter(self._turn.tx.entities([self._rows[task.id].seq]).values())).payload)
tests/server/test_worst_requests.py::test_repeats_of_a_known_id_do_not_look_at_what_is_stored

successors-not-counted: One request may bring any number of successors.
wire:ResultsRequest.__post_init__
- successors > MAX_SUCCESSORS
+ False
tests/server/test_worst_requests.py::test_successors_are_counted_over_all_results_of_a_request

nodes-not-counted: A value of any number of arrays is decoded.
_lifecycle.validation:value_fault
- nodes > wire.MAX_NODES
+ False
tests/server/test_worst_requests.py::test_a_value_of_too_many_arrays_is_refused_before_it_is_decoded

kinds-of-all-claims-together: One transaction looks at the kinds of all claims that came.
server.roles.claims:_out_of_reach
- len(kinds) > _KINDS
+ False
tests/server/test_worst_requests.py::test_claims_of_many_kinds_share_no_transaction

known-kinds-wait-too: A claim whose kinds are looked at anyway waits behind those of many kinds.
server.roles.claims:_first_kinds
- new = [kind for kind in request.kinds if kind not in kinds]
+ new = request.kinds
tests/server/test_worst_requests.py::test_claims_of_many_kinds_of_one_token_go_before_no_claim_of_another

kinds-of-left-claims: One transaction looks at the kinds of all claims whose callers have left.
server.roles.claims:claim
- _out_of_reach(turn, [item for item in waiting if not item.tickets])
+ _out_of_reach(turn, [item for item in waiting if not (item.tickets or item.is_gone)])
tests/server/test_worst_requests.py::test_claims_whose_callers_have_left_are_looked_at_in_many_turns_too

left-claims-are-tried: Claims whose callers have left before they were tried keep others out of a transaction.
server.roles.claims:WaitingClaim.needs_nothing
- self.is_gone and self.is_new
+ False
tests/server/test_worst_requests.py::test_claims_whose_callers_have_left_before_they_were_tried_are_not_looked_at

left-claims-keep-their-wake: A claim whose caller has left before its turn came keeps the wake of a task.
server.long_poll:LongPolls._after_attempt
- if answer.again:
-     self._missed.update((kind for kind in poll.claim.kinds if kind in self._parked))
+ pass
tests/server/test_long_poll.py::test_the_wake_of_a_claim_whose_caller_has_left_before_its_turn_goes_to_another

lanes-without-tasks-read: A claim reads a row for each kind and priority, also where no task waits.
server.store.sql.lanes:_lanes
- of_lanes.where(first.is_not(None))
+ of_lanes
tests/server/test_worst_requests.py::test_claims_of_kinds_without_tasks_read_nothing_of_them

keyed-lanes-without-tasks-read: A claim reads a row for each kind and priority as soon as one task has a key.
server.store.sql.lanes:_keyed_lanes
- of_lanes.where(has_some, first.is_not(None))
+ of_lanes.where(has_some)
tests/server/test_worst_requests.py::test_claims_of_kinds_without_tasks_read_nothing_of_them

claims-wait-for-any-kinds: Claims may wait for any number of kinds.
server.long_poll:LongPolls._check_room
- self._kinds.is_reached(caller, _KINDS, request.kinds)
+ False
tests/server/test_long_poll.py::test_claims_wait_for_many_kinds_only_if_these_are_the_same

same-kinds-refused: Claims that wait for the same kinds as many others are refused.
server.fair_bound:FairNames.is_reached
- any((name not in known for name in names))
+ True
tests/server/test_long_poll.py::test_claims_wait_for_many_kinds_only_if_these_are_the_same

kinds-of-answered-claims: The kinds of claims that were answered count for ever.
server.long_poll:LongPolls._finish
- self._kinds.remove(caller_of(poll.claim.claim_id), poll.claim.kinds)
+ pass
tests/server/test_long_poll.py::test_kinds_that_no_claim_waits_for_any_longer_are_not_counted

polls-of-all-kinds-tried: Each look tries a claim of each kind, due or not.
server.long_poll:LongPolls.look
- missed, self._missed = self._missed, set()
+ missed, self._missed = set(self._parked), set()
tests/server/test_worst_requests.py::test_of_many_polls_of_many_kinds_only_one_for_each_kind_that_is_due_is_tried
""",
)

_ON_REDIS = tested(
    "histories run on the server's own stores",
    """
redis-beat-shortens-the-lease: A beat moves the end of a lease before the end that the claim granted.
leasekit_redis/lua/beat.lua
- math.max(end_of(i, id), now + lease.ttl)
+ now + lease.ttl
tests/adapters/redis/test_contract_redis.py::TestRedis::test_a_beat_brings_no_end_nearer

redis-gone-is-not-final: A lease that was answered *gone* is renewed after a restart of Redis.
leasekit_redis/lua/beat.lua
-     expire(id, lease)
+
tests/adapters/redis/test_contract_redis.py::TestRedis::test_gone_stays_gone_after_an_interruption

redis-full-for-ever: Maintenance begins with a write that a Redis with full memory refuses.
leasekit_redis/lua/maintain.lua
- outrank_full_memory()
+ redis.call('HSET', META, 'asked', now)
tests/adapters/redis/test_redis_full.py::test_all_that_ends_something_or_makes_room_is_let_through

redis-demoted-and-kept: A connection to a primary that has become a replica is kept.
leasekit_redis.client:Link._call_once
- is_displaced(error) or ...
+ False
tests/adapters/redis/test_redis_failover.py::test_each_call_follows_the_address

redis-cancel-of-a-chain-overtaken: A task that is made while its chain is cancelled runs.
leasekit_redis.intake:Intake._cancel_late
- [at for at in positions if records[at].root in over]
+ list[int]()
tests/adapters/redis/test_redis_chains.py::\
test_a_cancel_between_the_note_of_a_task_and_its_making_is_not_missed[server]

redis-cancelled-chain-goes-on: A task that comes to a cancelled chain runs.
leasekit_redis/lua/schedule.lua
- if is_over then
+ if false then
tests/adapters/redis/test_redis_chains.py::\
test_what_comes_to_a_cancelled_chain_is_cancelled_and_so_is_what_waits_for_it[server]

redis-chain-left-behind: What names the tasks of a chain outlives them.
leasekit_redis/lua/drop.lua
- if s.root or s.leads then
+ if false then
tests/adapters/redis/test_redis_chains.py::test_a_purged_chain_leaves_nothing_behind[server]

redis-root-of-the-batch: A task whose parent comes with it has that parent as root.
leasekit_redis.chains:_root
- known.get(way[-1], way[-1])
+ known.get(way[-1], way[min(1, len(way) - 1)])
tests/adapters/redis/test_redis_chains.py::test_tasks_that_come_together_have_the_root_of_the_first[server]
""",
)

_ENDS = tested(
    "no client of the simulation waits for the end of a task",
    """
end-wakes-nobody: A request that waits hears of no end, and finds it with the next look only.
server.unit_of_work:UnitOfWork.tell
- self.ends.append(row.id)
+ pass
tests/server/test_end_waits.py::test_a_task_that_fails_and_is_tried_again_has_not_ended

each-waiting-request-looks: The store is looked at for each request that waits, also for the same task.
server.end_waits:EndWaits._enter
- not x.waits
+ True
tests/server/test_end_waits.py::test_ten_thousand_requests_for_one_task_cost_one_look_and_one_read

ends-by-news-only: An end of which no news came is never found.
server.end_waits:EndWaits._keep_looking
- time() >= look_at
+ False
tests/server/test_end_waits.py::test_an_end_of_which_no_news_came_is_found_by_a_look

redriven-counts-as-ended: A request is answered with a task that was given a new life, as if it had ended.
server.end_waits:EndWaits.get
- info.status.ended
+ True
tests/server/test_end_waits.py::test_a_dead_task_that_was_redriven_before_it_was_read_is_waited_for_on
""",
)

_CODECS = tested(
    "no client of the simulation has a codec",
    """
nonce-makes-another: A submission that is repeated with another nonce is taken for another one.
_lifecycle.sameness:payload_identity
- form is None or form.digest is None
+ True
tests/test_codecs.py::test_a_repeated_submission_is_known_although_its_nonce_differs[memory]

nonce-makes-new-code: A worker that declares an encoded payload again undoes what was changed by hand.
server.declarations:digest_of
- identity is not payload
+ False
tests/test_codecs.py::\
test_code_that_declares_an_encoded_payload_again_undoes_no_change_by_hand[memory]

equal-payloads-told: Two tasks with one payload have one digest, which the service sees.
_driver.coding:_digest
- known_as.encode() + b"\\0" + canonical
+ canonical
tests/test_codecs.py::\
test_a_repeat_is_known_after_a_rotation_and_equal_payloads_of_two_tasks_cannot_be_told[memory]

foreign-codec-counted: A worker without the codec uses up the attempts of a task.
_leased_run:LeasedRun.open
- not error.has_codec
+ False
tests/test_codecs.py::test_a_worker_that_cannot_decode_says_so_and_runs_no_code[memory-False]

clear-from-executors: What a handler in a process of its own returns is stored in the clear.
_driver.reporting.encoding:from_executor
- coding.encoded(settlement.result)
+ settlement.result
tests/test_codecs.py::test_handlers_and_dedupe_functions_see_clear_values[memory-process]
""",
)

BEYOND: Mapping[str, Mutant] = {**_PROCESSES, **_FILES, **_LIMITS, **_ON_REDIS, **_ENDS, **_CODECS}
