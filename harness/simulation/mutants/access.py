"""Mutants of access tokens, their lives, and the audit log: who may do what, until when, and what is noted of it."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

_OF_TOKENS = tested(
    "the clients of a history need no access tokens",
    """
open-again: A server whose store has tokens takes requests without one.
server.http.auth:Authenticator.access_of
- self._is_required or self._engine.tokens.has_any
+ self._is_required
tests/server/http/test_http_access.py::test_once_there_was_a_token_requests_need_one[sqlite]

open-to-others: A server that other machines reach takes requests without a token while its store has none.
server.http.auth:Authenticator.access_of
- self._is_required or self._engine.tokens.has_any
+ self._engine.tokens.has_any
tests/server/http/test_http_access.py::test_a_server_that_others_can_reach_needs_a_token_while_its_store_has_none[sqlite]

never-locked-out: Bad tokens are answered however many come.
server.http.auth:Failures.add
- not bucket.tokens(now)
+ False
tests/server/http/test_http_access.py::test_bad_tokens_are_locked_out_and_good_ones_are_not[sqlite]

good-ones-locked-out: A token that is missing counts as a bad one.
server.http.auth:Authenticator._refuse
- self._failures.add(peer) if reason == "invalid" else None
+ self._failures.add(peer)
tests/server/http/test_http_access.py::test_requests_without_a_token_lock_nobody_out[sqlite]

unauthenticated: Nobody is asked for a token.
server.http.app:_Resource._answer
- await request.authenticate()
+ pass
tests/server/http/test_http_access.py::test_a_token_with_a_scope_may_act_for_its_own_kinds[sqlite-stats]

scopes-ignored: A token may do whatever it likes.
server.http.needs:Needs.check_scope
- not access.has(self.scopes)
+ False
tests/server/http/test_http_access.py::test_a_token_without_the_scope_is_refused_and_told_which_it_lacks[sqlite-stats]

needs-ignored: The kinds that a request names are not judged.
server.http.operations:Operation.__call__
- await check(self.needs, request.access, request.parts.engine, given)
+ pass
tests/server/http/test_http_access.py::test_a_token_for_other_kinds_learns_and_changes_nothing[sqlite-schedule]

all-kinds-not-needed: What concerns all kinds is for tokens of some.
server.http.needs:check
- wanted.where is Where.ALL
+ False
tests/server/http/test_http_access.py::test_a_token_for_other_kinds_learns_and_changes_nothing[sqlite-nodes]

foreign-tasks-waited-for: A request waits for the end of a task of a foreign kind.
server.http.needs:check
- wanted.where is Where.TASK
+ False
tests/server/http/test_http_access.py::test_nobody_waits_for_the_end_of_a_foreign_task[sqlite]

errors-counted: Whoever may not read selects by what is in errors.
server.http.needs:_check_filters
- getattr(body, name, None) not in (None, UNSET)
+ False
tests/server/http/test_http_access.py::test_whoever_may_not_read_does_not_count_by_what_is_in_errors[sqlite-error-purge]

foreign-items: Items of a request that name foreign tasks are applied.
server.http.request:ApiRequest.each
- self.access.has_all_kinds
+ True
tests/server/http/test_http_access.py::test_a_token_for_other_kinds_learns_and_changes_nothing[sqlite-results]

foreign-cancelled: A token cancels a task whose id has become that of a foreign one.
server.roles.frontend:cancel
- kinds.match(rows[task_id].kind)
+ True
tests/server/http/test_http_access.py::test_kinds_are_judged_where_tasks_are_changed[sqlite-cancel]

foreign-rescheduled: A token reschedules a task whose id has become that of a foreign one.
server.roles.rescheduling:_Desk.reschedule
- request.kinds.match(row.kind)
+ True
tests/server/http/test_http_access.py::test_kinds_are_judged_where_tasks_are_changed[sqlite-reschedule]

foreign-redriven: A token redrives a task whose id has become that of a foreign one.
server.roles.redrive:_Desk.__init__
- is_own(found[task_id])
+ True
tests/server/http/test_http_access.py::test_kinds_are_judged_where_tasks_are_changed[sqlite-redrive]

consumer-name: A worker claims under the name of a consumer.
server.http.routes:_check_worker
- name.startswith(CONSUMER)
+ False
tests/server/http/test_http_access.py::test_nobody_works_under_the_name_of_a_consumer[sqlite-claims-fields0]

bulk-by-id: A bulk act changes a task that has the id of one that it has found.
server.roles.bulk:_is_as
- (row.seq, row.fence, waits, row.status.ended) == (before.seq, before.fence, waited, False)
+ (row.fence, waits, row.status.ended) == (before.fence, waited, False)
tests/server/roles/test_bulk.py::test_another_task_that_has_the_id_of_one_that_was_found_is_left_alone[memory]

foreign-leases: A token renews leases of foreign kinds.
server.http.request:ApiRequest.each_lease
- self.access.kinds.match(kind)
+ True
tests/server/http/test_http_access.py::test_a_token_for_other_kinds_learns_and_changes_nothing[sqlite-heartbeat]

foreign-status: A token that uses an id of a foreign task learns its status.
server.http.request:ApiRequest.without_foreign
- answer.conflict and answer.id not in own
+ False
tests/server/http/test_http_access.py::test_an_id_of_a_foreign_task_tells_nothing_of_its_status[sqlite]

purge-of-foreign: A purge of ids removes foreign tasks.
server.roles.retention:search
- Named(request.ids, of_kinds(kinds))
+ Named(request.ids, of_kinds(None))
tests/server/http/test_http_access.py::test_a_purge_of_foreign_ids_alone_purges_nothing_else[sqlite]

successors-unjudged: A result schedules successors that its token may not submit.
server.http.needs:check_successors
- "submit" not in access.scopes or not access.kinds.match(kind)
+ False
tests/server/http/test_http_access.py::test_a_result_schedules_only_what_its_token_may_submit[sqlite]

claims-of-anybody: A repeated claim has its tasks for every token.
server.http.routes:claim
- body.claim_id if by is None else f"{by}/{body.claim_id}"
+ body.claim_id
tests/server/http/test_http_access.py::test_a_repeated_claim_has_tasks_only_for_the_token_that_made_it[sqlite]

another-after-the-wait: A request that waited for a task shows a foreign one that has its id by then.
server.http.routes:get_task
- info is None or not request.access.kinds.match(info.kind)
+ info is None
tests/server/http/test_http_access.py::test_a_task_that_became_a_foreign_one_while_a_request_waited_is_not_shown[sqlite]

ended-after-the-wait: A request that waited for tasks shows foreign ones that have their ids by then.
server.http.routes:_without_others
- not match(task.kind)
+ False
tests/server/http/test_http_access.py::test_a_task_that_became_a_foreign_one_while_a_request_waited_is_not_shown[sqlite]

payloads-logged: The log has the payload of a periodic task that an operator sets.
server.roles.periodic:described
- replace(task, payload=size)
+ task
tests/server/roles/test_periodic.py::test_the_log_says_what_was_set_without_the_payload[sqlite]

names-alike: The name of a token may end with a space, and look like that of another.
server.roles.tokens:_check_order
- order.name != order.name.strip()
+ False
tests/server/http/test_http_access.py::test_a_name_that_means_something_else_is_refused[sqlite- admin]

drains-ended-by-anybody: A drain ends when any token claims under the name of its worker.
server.fleet:Fleet._within
- within.issuperset(roster.tokens(name))
+ True
tests/server/roles/test_drains.py::test_a_token_for_other_kinds_than_those_of_a_worker_ends_no_drain[sqlite-claim]

leases-unseen: A worker that holds foreign leases since before a restart is that of whoever uses its name.
server.fleet:Fleet._within
- all(map(kinds.match, roster.held_kinds(name)))
+ True
tests/server/roles/test_drains.py::test_a_token_for_other_kinds_than_those_of_a_worker_ends_no_drain[sqlite-lease]

drains-ended-early: A server that has just started takes the names that it has heard for all.
server.drains:Drains.tick
- now < self._early_until
+ False
tests/server/roles/test_drains.py::test_soon_after_a_start_no_token_for_some_kinds_ends_a_drain[sqlite]

drains-ended-by-forgotten: What used a name with a token that is forgotten was of no kind.
server.fleet:Fleet._within
- roster.tokens(name)
+ {*roster.tokens(name)} & {"", *self._tokens._rows}
tests/server/roles/test_drains.py::test_a_token_that_is_no_longer_known_ends_no_drain_and_owns_no_worker[sqlite]

tokens-left-out: Of many tokens that have used a name, some count for nothing.
server.roles.directory:Directory.hear
- caller if len(tokens) < _TOKENS else ""
+ caller
tests/server/roles/test_drains.py::test_a_token_for_other_kinds_than_those_of_a_worker_ends_no_drain[sqlite-many tokens]

workers-left-out: A node does not say that it leaves workers out.
server.roles.directory:Directory.written
- rows.append(_OTHERS)
+ pass
tests/server/test_neighbours.py::test_what_a_node_writes_of_its_workers_is_bounded_and_has_those_that_were_heard_last

kinds-for-nothing: The kinds of a worker do not count.
server.roles.directory:Directory.claims
- size += _size(kind)
+ size += 0
tests/server/roles/test_directory.py::test_the_kinds_and_labels_of_a_worker_count_and_what_is_forgotten_is_given_back

forgotten-by-another: A token that makes up workers has those of others forgotten.
server.roles.directory:Directory._keep
- self._bytes.largest()
+ next(iter(self._of))
tests/server/roles/test_directory.py::test_a_full_directory_forgets_workers_of_the_token_with_most_the_oldest_first

claims-for-another: What a token claims under the name of another one's worker counts for that one.
server.roles.directory:Directory.claims
- known._replace(kinds=of_worker, labels=labels, start=start, caller=caller, size=size)
+ known._replace(kinds=of_worker, labels=labels, start=start, size=size)
tests/server/roles/test_directory.py::test_a_worker_counts_for_the_token_of_its_last_claim

forgotten-names-free: The name of a worker that was forgotten is that of whoever uses it next.
server.roles.directory:Directory.hear
- self._forgotten.may_have(worker, now)
+ False
tests/server/roles/test_drains.py::test_a_name_that_was_forgotten_for_lack_of_room_is_that_of_no_token_for_some_kinds[sqlite]

forgotten-is-gone: The drain of a worker ends that was forgotten for lack of room.
server.fleet:Fleet.gone
- not self._directory.may_have_forgotten(mark.worker, now)
+ True
tests/server/roles/test_drains.py::test_a_worker_that_was_forgotten_for_lack_of_room_has_not_gone[sqlite]

forgotten-unsaid: A node does not say that it has forgotten workers.
server.roles.directory:Directory.written
- self._forgotten.has_any(now)
+ False
tests/server/roles/test_directory.py::test_a_node_that_has_forgotten_workers_tells_the_others_so

names-of-lost-nodes: What a server had heard that has left is taken for nothing.
server.neighbours:Neighbours.has_lost_one
- node.id not in alive and node.address is not None and node.seen >= since
+ False
tests/server/test_neighbours.py::test_a_name_is_that_of_all_tokens_that_have_used_it_at_any_node

streams-for-ever: A stream of events goes on when its token is revoked.
server.http.routes:events
- access.may_end
+ False
tests/server/http/test_http_access.py::test_a_stream_ends_when_its_secret_does_and_shows_only_its_kinds[sqlite-revoke]

foreign-events: A stream has events of foreign kinds.
server.http.routes:events
- access.kinds.match
+ lambda kind: True
tests/server/http/test_http_access.py::test_a_stream_ends_when_its_secret_does_and_shows_only_its_kinds[sqlite-revoke]

waits-for-ever: A claim that waits goes on when its token is revoked.
server.token_book:TokenBook.look
- not self.is_valid(access)
+ False
tests/server/http/test_http_access.py::test_what_waits_ends_when_its_secret_does[sqlite-claims-revoke]

rotated-streams-go-on: What began with the secret before the latest goes on after a rotation without an overlap.
server.token_book:TokenBook.is_valid
- secret is not None and self._is_good(secret)
+ access.token_id in self._rows
tests/server/http/test_http_access.py::test_a_stream_ends_when_its_secret_does_and_shows_only_its_kinds[sqlite-rotate]

rotated-sessions-go-on: A session of the console goes on when its token gets another secret.
server.console.sessions:Sessions.access_of
- await self._auth.access_of_digest(row.secret)
+ next(iter(self._engine.tokens._secrets.values())).access
tests/server/console/test_login.py::test_a_session_ends_when_its_token_gets_another_secret_but_not_during_the_overlap

successors-foreseen: The id of a successor is known before, and is used by a task of another kind.
server.roles.hsc:_Desk._end_run
- successor_id(row.id, settlement.token, position)
+ successor_id(row.id, str(row.attempt), position)
tests/server/roles/test_hsc.py::test_each_run_has_successors_of_its_own[memory]

names-taken: A task of any kind has the id that stands for a name, and ends what others do once.
task.leased:NewTask.__post_init__
- self.id != self.kind and ...
+ False
tests/server/http/test_http_access.py::test_nobody_takes_the_id_of_a_name_for_a_task_of_another_kind[sqlite-once:message-7]

foreign-periodics-replaced: A periodic task of a foreign kind is taken over under its name.
server.roles.periodic:_changed
- wanted.kinds is not None and not wanted.kinds.match(decoded(row).kind)
+ False
tests/server/http/test_http_access.py::test_a_periodic_task_of_a_foreign_kind_cannot_be_taken_over[sqlite]

foreign-periodics-set: A periodic task is set that submits tasks of a foreign kind.
server.http.operator_routes:set_periodic
- check_kinds(...)
+ None
tests/server/http/test_http_access.py::test_a_token_for_other_kinds_learns_and_changes_nothing[sqlite-set_periodic]

periodics-set-by-submitters: Whoever may only submit sets a periodic task by hand.
server.http.operator_routes:set_periodic
- params.is_declared or "operate" in request.access.scopes
+ True
tests/server/http/test_http_access.py::test_a_token_with_a_scope_may_act_for_its_own_kinds[sqlite-set_periodic]

payloads-shown: Whoever changes a periodic task sees its payload without `read`.
server.http.operator_routes:_changed
- "read" in request.access.scopes or bytes(info.task.payload) == sent
+ True
tests/server/http/test_http_access.py::test_only_a_reader_gets_the_payload_of_a_periodic_task_that_it_changes[sqlite]

firings-stopped: A foreign task that has the id of a firing stops it.
server.roles.firing:schedule_firings
- task.id in known and known[task.id].kind != task.kind
+ False
tests/server/roles/test_periodic.py::test_a_foreign_task_that_took_the_id_in_advance_stops_no_firing
""",
)

_OF_LIVES = tested(
    "the clients of a history need no access tokens",
    """
wider-tokens: A token makes one that may do more than itself.
server.roles.tokens:_created
- not by.covers(order.scopes, order.kinds, until)
+ False
tests/server/http/test_http_access.py::test_a_token_makes_none_that_may_do_more_or_lives_longer[sqlite]

longer-tokens: A token makes one that ends later.
server.access:Access.covers
- not outlives
+ True
tests/server/http/test_http_access.py::test_a_token_makes_none_that_may_do_more_or_lives_longer[sqlite]

decoys: The id of a new token is the name of another, which is revoked by its name in vain.
server.roles.tokens:_check_order
- any(row.name == order.id for row in rows.values())
+ False
tests/server/http/test_http_access.py::test_a_token_that_is_ended_by_its_name_is_that_of_the_name[sqlite]

all-tokens-used-up: An operator of some kinds makes so many tokens that nobody can make one.
server.roles.tokens:_check_room
- _MOST if by.has_all_kinds else _MOST_OF_SOME
+ _MOST
tests/server/http/test_http_access.py::test_an_operator_of_some_kinds_leaves_room_for_those_of_all[sqlite]

all-gates-used-up: An operator of some kinds closes so many gates that nobody can close one.
server.roles.gates:change
- _MOST if wanted.has_all_kinds else _MOST_OF_SOME
+ _MOST
tests/server/http/test_http_access.py::test_an_operator_of_some_kinds_leaves_room_for_those_of_all[sqlite]

wider-patterns: A pattern covers all that begin as its kinds do.
server.access:KindPatterns.cover
- self.match(pattern)
+ self.match(pattern) or pattern.startswith(tuple(self._exact))
tests/server/test_access.py::test_a_pattern_is_covered_by_one_that_matches_all_of_its_kinds

exact-kinds-begin: An exact kind stands for all that begin so.
server.access:KindPatterns.match
- kind in self._exact
+ kind.startswith(tuple(self._exact))
tests/server/test_access.py::test_a_pattern_is_exact_or_a_beginning

wider-tokens-ended: A token ends one that may do more than itself.
server.roles.tokens:is_covered
- by.covers(...)
+ True
tests/server/http/test_http_access.py::test_a_narrow_operator_neither_sees_nor_ends_a_wider_token[sqlite]

revoked-taken: A revoked token is taken.
server.roles.tokens:is_valid
- row.revoked_at is None
+ True
tests/server/http/test_http_access.py::test_a_revoked_token_is_refused_at_once_and_like_an_unknown_one[sqlite]

expired-taken: An expired token is taken.
server.roles.tokens:is_valid
- row.expires_at is None or now < row.expires_at
+ True
tests/server/http/test_http_access.py::test_an_expired_token_is_refused[sqlite]

former-for-ever: The secret before the latest is taken for ever.
server.token_book:TokenBook._is_good
- now < secret.until
+ True
tests/server/roles/test_tokens.py::test_the_secret_before_the_latest_is_taken_until_the_overlap_is_over[memory]

former-at-once: The secret before the latest is not taken during the overlap.
server.roles.tokens:_rotated
- turn.now + wanted.order.overlap if wanted.order.overlap else _LONG_AGO
+ _LONG_AGO
tests/server/http/test_http_access.py::test_a_rotated_token_has_both_secrets_for_a_while[sqlite]

revoked-rotated: A revoked token gets another secret.
server.roles.tokens:_rotated
- not is_valid(old, turn.now)
+ False
tests/server/roles/test_tokens.py::test_a_revoked_token_has_no_secret_any_longer_also_none_from_before[memory]

secret-of-two: A secret that another token had becomes that of a new one.
server.roles.tokens:_check_digest
- (row.digest, row.former_digest)
+ (row.digest,)
tests/server/roles/test_tokens.py::test_a_secret_is_of_one_token_also_if_it_is_that_from_before[memory]

last-forgotten: The last token of a store is forgotten, and its servers become open again.
server.roles.tokens:forget
- rows[:-1]
+ rows
tests/server/roles/test_tokens.py::test_tokens_that_ended_are_kept_for_a_month_and_the_latest_one_for_ever[memory]

old-tokens-trusted: A node that cannot read the tokens goes on with those that it remembers.
server.token_watch:TokenWatch.freshen
- self._every is None
+ True
tests/server/store/test_postgres_tokens.py::test_a_node_that_cannot_read_the_tokens_trusts_none

stall-trusted: A node that has stood still trusts what it read before.
server.token_watch:TokenWatch.freshen
- self._book.read_at < since
+ self._book.read_at < since - 9
tests/server/store/test_postgres_tokens.py::test_a_node_that_has_stood_still_reads_the_tokens_before_it_trusts_one

guests-after-a-stall: A node that has stood still serves who has no token, as it did before.
server.http.auth:Authenticator.access_of
- await self._engine.token_watch.freshen()
+ pass
tests/server/store/test_postgres_tokens.py::test_a_node_that_has_stood_still_looks_for_a_token_before_it_serves_who_has_none

guests-make-tokens: Who came without a token makes one, though the store has another by now.
server.roles.tokens:_changed
- rows and wanted.by.is_guest
+ False
tests/server/roles/test_tokens.py::test_who_came_without_a_token_makes_none_once_there_is_one[memory]

tokens-retold: A repeat tells of a token whoever asks.
server.roles.tokens:_created
- known is not None and is_covered(by, known) and ...
+ known is not None
tests/server/roles/test_tokens.py::test_a_repeat_is_answered_to_those_who_may_see_the_token_and_for_the_same_order[memory]

names-of-servers: Whoever may use names has those of the servers.
server.access:KindPatterns.match
- kind is None or kind.startswith(_OF_SERVERS)
+ kind is None
tests/server/test_access.py::test_a_pattern_is_exact_or_a_beginning

guests-go-on: What began without a token goes on after the store's first token.
server.token_book:TokenBook.is_valid
- not (access.is_guest and self.has_any)
+ True
tests/server/http/test_http_access.py::test_what_began_without_a_token_ends_with_the_first_one[sqlite-claims]

old-streams: A stream of events goes on at a node that cannot read the tokens.
server.http.routes:_while_valid
- not await _is_valid(engine, access)
+ False
tests/server/store/test_postgres_tokens.py::test_a_stream_of_events_ends_at_a_node_that_cannot_read_the_tokens
""",
)

_OF_THE_LOG = tested(
    "a history has no operators with access tokens",
    """
acts-unnoted: Acts of operators are not noted.
server.commit:_noted
- if rows:
-     turn.tx.add_audit(rows)
+ pass
tests/server/http/test_http_access.py::test_each_act_of_an_operator_writes_one_entry[sqlite-close_kind]

values-noted: The log has values beside the names.
server.roles.audit:names_of
- field.encode_name
+ f"{field.encode_name}={getattr(values, field.name)}"
tests/server/http/test_http_access.py::test_the_log_has_names_and_no_values[sqlite]

removals-noted: The log has that a periodic task of a foreign kind was removed, which is there.
server.roles.periodic:_counted
- int(answer is not None)
+ 1
tests/server/http/test_http_access.py::test_the_log_tells_what_was_removed_from_what_was_left[sqlite]

cancels-counted-again: The log counts tasks that were cancelled already.
server.roles.frontend:cancel
- int(after is not before)
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_what_was_so_already[sqlite-cancel]

redrives-counted-again: The log counts the tasks of a redrive again when it is repeated.
server.roles.redrive:redrive
- len(saved)
+ len(plan.ids)
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_a_repeat[sqlite]

reschedules-counted-again: The log counts the repeat of a reschedule.
server.roles.rescheduling:_Desk.reschedule
- Counted(self._answer(row), 0)
+ Counted(self._answer(row), 1)
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_a_repeat[sqlite]

refused-reschedules-counted: The log has that a task was rescheduled that had ended.
server.roles.rescheduling:_Desk.reschedule
- Counted(fault, 0)
+ Counted(fault, 1)
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_a_reschedule_that_is_refused[sqlite]

open-gates-counted: The log has that a gate was opened that was open.
server.roles.gates:change
- int(is_closed if new.mode == OPEN else new is not old)
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_what_was_so_already[sqlite-open_kind]

same-settings-counted: The log has that settings were changed that were the same already.
server.roles.kinds:_counted
- int(is_change)
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_what_was_so_already[sqlite-set_kind]

same-periodic-counted: The log has that a periodic task was changed that was the same already.
server.roles.periodic:_counted
- int(is_change)
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_what_was_so_already[sqlite-set_periodic]

revocations-counted-again: The log has that a token was revoked that was revoked already.
server.roles.tokens:_changed
- int(new is not old)
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_the_revocation_of_a_token_once[sqlite]

tokens-counted-again: The log has that a token was made twice, as the request was repeated.
server.roles.tokens:_changed
- int(made is not rows.get(made.id))
+ 1
tests/server/http/test_http_access.py::test_the_log_counts_nothing_for_what_was_so_already[sqlite-create_token]

settings-that-stayed-named: The log names the settings that a request has, and not those that it has changed.
server.commit:_noted
- job.note.row(turn, done.changed, done.fields)
+ job.note.row(turn, done.changed)
tests/server/http/test_http_access.py::test_the_log_names_the_settings_of_a_kind_that_were_changed[sqlite]

unseen-settings-undone: A change of settings undoes those of others that its client has not seen.
server.roles.kinds:change
- _check_was(old, wanted)
+ None
tests/server/http/test_http_access.py::test_settings_that_others_have_changed_are_a_conflict[sqlite]

forms-undo-settings: A form of the console undoes settings that others have changed since its page was shown.
server.console.kind_acts:run
- visit.engine.operations.set_kind(wanted.kind, _new(was, wanted), by=visit.by, was=was, note=note)
+ visit.engine.operations.set_kind(wanted.kind, _new(was, wanted), by=visit.by, note=note)
tests/server/console/test_acts.py::test_a_form_of_settings_changes_what_its_page_says_and_nothing_else

old-forms-replace-all: A form of the console that was open for long sets all that it shows.
server.console.kind_acts:_new
- getattr(wanted, name) != getattr(was, name)
+ True
tests/server/console/test_acts.py::test_a_form_of_settings_that_was_open_for_long_leaves_what_others_have_changed_since

commands-undo-settings: A command for one setting undoes another that is changed at the same moment.
cli.kinds:_write
- client.set_kind(kind, KindSettings(**left), was=was)
+ client.set_kind(kind, KindSettings(**left))
tests/cli/test_kinds.py::test_settings_that_others_change_at_the_same_moment_stay

commands-give-up: A command for one setting fails if another is changed at the same moment.
cli.kinds:_change
- reversed(range(_TRIES))
+ [0]
tests/cli/test_kinds.py::test_settings_that_others_change_at_the_same_moment_stay

nulls-unnamed: The log leaves out what was given as null.
server.roles.audit:names_of
- (UNSET, [], _default(field))
+ (None, UNSET, [], _default(field))
tests/server/http/test_http_access.py::test_the_log_names_what_was_given_as_null[sqlite]

unknown-workers-unnoted: The drain of a worker that is unknown is not in the log.
server.drains:Drains.drain
- note is not None
+ False
tests/server/http/test_http_access.py::test_the_log_has_the_drain_of_a_worker_that_is_unknown[sqlite]

submitters-noted: What submitters do every day is in the log.
server.http.request:ApiRequest.note_of_operator
- self.access.token_id is not None and "operate" in self.access.scopes
+ True
tests/server/http/test_http_access.py::test_a_submitter_who_cancels_is_not_in_the_log[sqlite]

log-of-a-day: Entries are deleted early.
server.roles.audit:forget
- turn.now - KEPT
+ turn.now - 86400
tests/server/roles/test_tokens.py::test_the_log_is_kept_for_a_year[memory]
""",
)

_OF_BROWSERS = tested(
    "a history has no browsers",
    """
token-file-for-all: The token of a file goes to whatever service the code names.
leasekit_http.headers:token_of_environment
- url != os.environ.get("LEASEKIT_URL")
+ False
tests/adapters/http/test_way.py::test_a_token_of_the_environment_goes_to_the_service_of_the_environment_alone[True]

payload-logged: The log tells what of a payload does not fit.
_worker.handlers:Handler._arguments
- _VALUE.sub(..., str(error))
+ str(error)
tests/worker/test_task_lines.py::test_a_failure_without_an_exception_has_the_reason_in_its_line_if_it_is_ours

revoked-meanwhile: A request is done whose token was revoked while its body arrived.
server.http.request:ApiRequest.decode
- await self.check_token()
+ pass
tests/server/http/test_http_access.py::test_a_request_whose_secret_ends_while_its_body_arrives_does_nothing[sqlite-revoke]

session-over-meanwhile: A form does what it says though its session has ended while it arrived.
server.console.site:Console._act
- await self._access_of(request)
+ access
tests/server/console/test_login.py::test_a_form_whose_session_ends_while_it_arrives_does_nothing

old-secret-back: A late copy of an earlier rotation brings its secret back.
server.roles.tokens:_rotated
- old._replace(digest=digest, former_digest=old.digest, former_until=until, rotated_at=turn.now)
+ old._replace(digest=digest, former_digest=None, former_until=None, rotated_at=turn.now)
tests/server/roles/test_tokens.py::test_a_late_copy_of_the_rotation_before_brings_no_old_secret_back[memory]

chain-cancelled-unnoted: The audit log does not tell of a chain that the console has cancelled.
server.console.acts:cancel_chain
- visit.note("chain.cancel", target=wanted.id)
+ None
tests/server/console/test_acts.py::test_the_audit_log_counts_all_tasks_of_a_chain_that_was_cancelled_in_steps

lasting-sessions: A session of the console has no end.
server.queries:Queries.session
- self._clock.peek() < row.until
+ True
tests/server/roles/test_tokens.py::test_a_session_of_the_console_ends_when_its_time_is_over[memory]

endless-sessions: Sessions whose time is over, and those beyond the thousandth, are kept.
server.roles.tokens:change_sessions
- room > 0
+ True
tests/server/roles/test_tokens.py::test_a_thousand_sessions_of_the_console_are_kept_and_none_that_is_over[memory]

left-sessions-go-on: A session goes on when it is left.
server.console.sessions:Sessions.end
- await self._engine.operations.end_session(...)
+ None
tests/server/console/test_login.py::test_a_session_ends_when_it_is_left_and_when_its_token_is_revoked

console-for-some-kinds: The console shows all kinds to a token for some.
server.console.site:_checked
- not access.has(["read"]) or not access.has_all_kinds
+ False
tests/server/console/test_login.py::test_a_token_for_some_kinds_or_without_read_is_told_what_it_lacks
""",
)

ACCESS: Mapping[str, Mutant] = _OF_TOKENS | _OF_LIVES | _OF_THE_LOG | _OF_BROWSERS
