"""Mutants of what callers share: their turns, the rooms in which they wait, and how much each request counts."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

TURNS: Mapping[str, Mutant] = tested(
    "the clients of a history are one caller",
    """
shares-ignored: One token takes up what requests of all tokens have together.
server.fair_bound:FairBound.is_reached
- return self._of[caller] * callers >= most
+ return True
tests/server/http/test_http_access.py::test_answers_that_one_token_does_not_read_hold_up_no_other[sqlite]

readers-of-nobody: Readers of events are counted for all tokens together.
server.http.events:Feed._reading
- self._of_callers.add(caller, 1)
+ self._of_callers.add("", 1)
tests/server/http/test_events.py::test_the_readers_of_one_token_keep_no_other_out

reads-of-nobody: Reads wait in one line, whoever asks.
server.readers:Readers.run
- CALLER.get()
+ ""
tests/server/test_readers.py::test_a_caller_with_many_reads_holds_up_no_other_by_more_than_one

reads-of-one-caller: What serves all that wait is read in the turn of the caller who has begun to wait first.
server.end_waits:EndWaits._enter
- asyncio.create_task(self._keep_looking(), context=Context())
+ asyncio.create_task(self._keep_looking())
tests/server/test_end_waits.py::test_what_serves_all_requests_is_read_for_none_of_their_callers[sqlite]

turns-without-end: A caller has the next turn too, as long as it has reads.
server.fair_queue:FairQueue.take
- self._now + work
+ self._now
tests/server/test_fair_queue.py::test_two_who_wait_all_the_time_are_given_the_same_work_but_for_one_item[0]

turns-by-number: Callers take turns by their requests, however large these are.
server.fair_queue:FairQueue.take
- self._now + work
+ self._now + 1
tests/server/test_fair_queue.py::test_who_asks_for_much_work_comes_after_all_who_ask_for_little

turns-from-anew: Who comes back is taken for one who was given nothing.
server.fair_queue:FairQueue._wait
- max(self._now, self._ends.get(caller, 0))
+ self._now
tests/server/test_fair_queue.py::test_who_comes_back_with_much_work_again_and_again_gains_nothing

one-of-those-left-out: Of a class that was left out one request is served, however many wait.
server.commit:GroupCommit._passed_over
- self._take_some(rank, _SHARE, at_least=1)
+ self._take_some(rank, 0, at_least=1)
tests/server/test_commit.py::test_no_flood_of_a_class_keeps_out_the_classes_after_it[memory]

bad-ones-at-once: Requests that fail together are applied one after another, before anybody else has a turn.
server.commit:GroupCommit._apply
- self._put_back(jobs, seconds=time.perf_counter() - began_at)
+ _merged(list(map(self._apply, zip(jobs))))
tests/server/test_commit.py::test_bad_requests_of_one_caller_hold_up_others_for_one_of_them_at_a_time[memory]

cheap-as-dear: Requests that fail together cost their caller the same, however soon they are refused.
server.commit:GroupCommit._put_back
- max(_LEAST, seconds * _PER_SECOND)
+ _MOST
tests/server/test_commit.py::test_what_failed_counts_in_its_callers_turn_by_the_time_that_it_took[memory-0.0-250]

long-steps: A step of a search looks at as many tasks as a page has.
server.roles.selection:number_to_read
- min(room + 1, _SCAN) if accept is any_kind and not wanted.needs_a_look else _SCAN
+ room + 1
tests/server/roles/test_listing.py::test_a_step_reads_few_tasks_however_many_its_page_has_room_for[wanted1]

dry-runs-go-on: A dry run counts on when its client has gone.
server.http.routes:_acted
- request.wait(request.parts.waits, acting) if is_dry else acting
+ acting
tests/server/http/test_http_connections.py::test_a_search_ends_when_its_client_has_gone[sqlite-dry purge]

sessions-of-one: Sessions of one access token end those of others.
server.roles.tokens:change_sessions
- of_token[row.secret] < _OF_ONE
+ True
tests/server/roles/test_tokens.py::test_the_sessions_of_one_access_token_end_none_of_another[memory]

progress-weighs-nothing: Checkpoints of any size are written in one transaction.
server.request_classes:work_of_beat
- _blocks(beat.progress)
+ 0
tests/server/test_worst_requests.py::test_values_successors_and_kinds_count_as_work_in_a_transaction

errors-weigh-nothing: Errors of any size are written in one transaction.
server.request_classes:work_of_settlement
- (settlement.result, settlement.error, settlement.progress)
+ (settlement.result,)
tests/server/test_worst_requests.py::test_values_successors_and_kinds_count_as_work_in_a_transaction

writes-of-nobody: What waits to be written is counted for all tokens together, and served as it came.
server.commit:GroupCommit.submit
- caller = CALLER.get() if caller is None else caller
+ caller = ""
tests/server/test_commit.py::test_callers_take_turns_and_none_fills_the_queue_of_a_class[sqlite]

revocations-behind-tasks: A flood of tasks keeps the requests of later classes, such as revocations, from being written.
server.commit:GroupCommit._passed_over
- self._passed[rank] > _PASSED
+ self._passed[rank] > 1000
tests/server/test_commit.py::test_no_flood_of_a_class_keeps_out_the_classes_after_it[sqlite]

waits-of-nobody: Waits for ends are counted for all tokens together.
server.end_waits:EndWaits._wait
- self._waiting.add(caller, len(ids))
+ self._waiting.add("", len(ids))
tests/server/test_end_waits.py::test_the_waits_of_one_token_keep_no_other_out[sqlite]

claims-of-nobody: Claims that wait are counted for all tokens together.
server.long_poll:LongPolls._begin
- self._of_callers.add(caller_of(request.claim_id), 1)
+ self._of_callers.add("", 1)
tests/server/test_long_poll.py::test_the_claims_of_one_token_keep_no_other_from_waiting

claims-of-one-token-first: Claims of one token go before those of others that came later.
server.roles.claims:claim
- _in_turns(left, turn.kinds.served)
+ left
tests/server/test_worst_requests.py::test_claims_for_many_tasks_of_one_token_go_before_no_claim_of_another

claims-served-again: The claims that one token has queued come one after another, in transactions with room for one.
server.roles.claims:claim
- _in_turns(left, turn.kinds.served)
+ _in_turns(left, {})
tests/server/test_worst_requests.py::test_whose_claim_was_served_last_comes_last_in_the_next_transaction

keys-read-one-by-one: The next tasks of each key are a read by themselves.
server.fair_lane:FairLane.refill
- [queue, *empty]
+ [queue]
tests/server/test_worst_requests.py::test_tasks_of_many_keys_are_read_together_also_where_a_collection_is_closed

lanes-read-all: Of each lane with keys a claim reads as much as it takes from all.
server.due_tasks:DueTasks.__init__
- math.ceil(wanted / lanes_of[lane.priority])
+ wanted
tests/server/test_worst_requests.py::test_kinds_with_many_keys_share_what_a_claim_reads

kinds-of-nobody: The kinds that claims wait for are counted for all tokens together.
server.long_poll:LongPolls._begin
- self._kinds.add(caller_of(request.claim_id), request.kinds)
+ self._kinds.add("", request.kinds)
tests/server/test_long_poll.py::test_claims_wait_for_many_kinds_only_if_these_are_the_same

big-answers-of-all: Big answers about tasks wait for those of other tokens.
server.http.sending:Sending.of_task
- self._turns.setdefault(CALLER.get(), asyncio.Semaphore(_OF_TASKS))
+ self._turns.setdefault("", asyncio.Semaphore(_OF_TASKS))
tests/server/test_worst_requests.py::test_big_answers_that_one_token_does_not_read_hold_up_no_other

sign-of-one-token: The workers of one token fill what a node tells the others.
server.roles.directory:Directory._rows_of
- size += len(row)
+ pass
tests/server/roles/test_directory.py::test_what_a_node_writes_leaves_out_workers_of_the_token_with_most

pages-without-end: A page has any number of kinds.
server.roles.directory:Roster.page
- size > _PAGE
+ False
tests/server/roles/test_directory.py::test_a_page_of_workers_ends_where_it_has_very_many_kinds

directory-without-end: Made-up workers and kinds fill the memory.
server.roles.directory:Directory._keep
- self._bytes.total > _MOST
+ False
tests/server/roles/test_directory.py::test_a_full_directory_forgets_workers_of_the_token_with_most_the_oldest_first

counts-for-each: Whoever asks for the counts of all kinds has them counted anew.
server.queries:Queries.counts
- self._next_count is None
+ True
tests/server/test_worst_requests.py::test_those_who_ask_for_counts_together_share_them

reads-without-room: Lists that nobody reads fill the memory.
server.http.sending:Sending.check_reads
- self._reads.is_reached(CALLER.get(), _TOGETHER)
+ False
tests/server/http/test_http_connections.py::test_answers_that_are_not_read_have_a_room_together[sqlite]

heard-without-end: Messages of other nodes fill the memory.
server.neighbours:_Heard.add
- len(self._hints) < _HEARD
+ True
tests/server/test_neighbours.py::test_a_flood_of_messages_has_a_bounded_place_and_the_event_loop_has_turns_between

heard-in-one-turn: All that other nodes say is heard in one turn of the event loop.
server.neighbours:_Heard.take
- min(_TURN, len(self._hints))
+ len(self._hints)
tests/server/test_neighbours.py::test_a_flood_of_messages_has_a_bounded_place_and_the_event_loop_has_turns_between

tokens-lost-in-a-flood: A node does not hear that tokens were changed, or of the inbox, among too many messages.
server.neighbours:_Heard.add
- self._kept |= kept
+ pass
tests/server/test_neighbours.py::test_new_tokens_and_the_inbox_are_heard_of_in_a_flood

roots-walked-anew: The root of each of a thousand tasks in a row is walked for anew.
server.roles.chains:roots_of
- last not in found and (parent := parents.get(last)) is not None and parent not in way
+ (parent := parents.get(last)) is not None and parent not in way
tests/server/roles/test_chains.py::test_the_roots_of_a_thousand_tasks_in_a_row_are_found_in_one_walk[-1]
""",
)
