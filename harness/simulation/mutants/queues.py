"""Mutants of queues: what moves, what a message entitles to, and which messages are deleted."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_BY_HISTORIES: Mapping[str, Mutant] = {
    "tickets-pass-limits": Mutant(
        "Tasks in a queue start beyond the concurrency of their kind.",
        Edit("server.roles.tickets:TicketTasks._startable", "places[row.kind] >= 0", "True"),
        by=Histories("queues", ["A3", "A4"]),
    ),
}

_BY_A_TEST = tested(
    "most cost time, or a call; the others need an order of a few steps",
    """
lost-messages-lose-tasks: A task that was moved to a queue is not due again.
_lifecycle.transitions:enqueue
- next_trigger(status, now=now, after=timeout)
+ next_trigger(status, now=now, after=1e9)
tests/server/roles/test_enqueueing.py::test_a_due_task_is_moved_once_and_again_after_its_timeout

claimed-tasks-put-back: A task that was claimed while its queue failed loses its lease to the next claim.
server.roles.enqueueing:put_back
- _waits_as_moved(row, task)
+ True
tests/server/roles/test_enqueueing.py::test_what_was_claimed_meanwhile_is_not_put_back

tickets-pass-gates: A task in a queue starts though its kind was paused.
server.roles.tickets:TicketTasks._startable
- row.kind not in closed
+ True
tests/server/roles/test_enqueueing.py::test_tasks_of_a_paused_kind_are_not_moved_and_tickets_make_them_wait

repeated-claims-take-other-messages: A claim whose answer was lost is repeated by other messages.
_driver.keeping.queue_claims:QueueClaims._ask_again
- self._unanswered.get(claim_id)
+ None
tests/driver/keeping/test_queue_claims.py::test_a_claim_whose_answer_was_lost_gets_the_same_tasks_when_it_is_repeated

messages-bring-releases-forward: A message that was sent before the last run entitles to the task before it is due.
_lifecycle.transitions:is_claimable
- row.fence == fence
+ True
tests/server/roles/test_enqueueing.py::test_an_old_message_does_not_bring_a_release_forward

put-off-tasks-wait-for-their-timeout: A task that a gate has stopped at its claim stays enqueued.
server.roles.tickets:TicketTasks.close
- self._turn.tx.save([unqueue(row, due_at=row.next_trigger_at or self._turn.now) for row in self._put_off])
+ pass
tests/server/roles/test_enqueueing.py::test_tasks_of_a_paused_kind_are_not_moved_and_tickets_make_them_wait

put-back-tasks-look-enqueued: A task that is in no queue any more still shows that it is.
_lifecycle.transitions:unqueue
- replace(row, status=status, next_trigger_at=due_at)
+ replace(row, next_trigger_at=due_at)
tests/server/roles/test_enqueueing.py::test_a_task_that_was_put_back_is_not_enqueued_any_more

full-queues-get-more: A queue that is full gets messages all the same.
server.enqueuer:Enqueuer.look
- state.again_at > now or _is_full(state)
+ state.again_at > now
tests/server/test_enqueuer.py::test_a_full_queue_gets_no_more_until_it_has_room

consumers-keep-all-kinds: A consumer that came first gives no kinds to those that come later.
server.kind_leases:KindLeases._beyond
- of_kinds[share:]
+ of_kinds[len(of_kinds) :]
tests/server/test_kind_leases.py::test_a_second_consumer_gets_half_of_the_kinds

kinds-outlive-their-lease: A consumer that cannot renew goes on to move the tasks of its kinds.
server.kind_leases:KindLeases.kinds
- name in self._kinds and now < held.until
+ name in self._kinds
tests/server/test_kind_leases.py::test_a_consumer_that_cannot_renew_gives_its_kinds_up_by_itself

hints-of-nodes-move-nothing: Tasks that another node has accepted wait for the next look of their consumer.
server.neighbours:Neighbours._hear
- self._ring(kinds)
+ pass
tests/server/test_neighbours.py::test_a_hint_of_due_tasks_has_them_moved_to_queues

names-enqueued: Names are moved to queues, which nobody looks at for them.
server.roles.enqueueing:move
- not kind.startswith(PREFIXES)
+ True
tests/server/roles/test_enqueueing.py::test_names_are_never_moved

undecided-messages-deleted: A message is deleted though its task was neither granted nor refused.
_driver.keeping.queue_claims:QueueClaims._ask
- message.ticket.id in done
+ True
tests/driver/keeping/test_queue_claims.py::test_a_message_that_may_be_good_later_comes_again
""",
)

QUEUES: Mapping[str, Mutant] = {**_BY_HISTORIES, **_BY_A_TEST}
"""The mutants, by name."""
