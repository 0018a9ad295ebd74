"""Mutants of what grants tasks to workers with labels, and finds tasks by their tags."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_TESTED = tested(
    "histories have few sets of labels, one claim at a time, and nobody who lists tasks",
    """
all-of-a-batch: A claim gets tasks that fit another claim of the same transaction.
server.due_tasks:DueTasks._fitting
- self._has_routes
+ False
tests/server/roles/test_routes.py::test_claims_of_one_transaction_get_what_fits_each[memory]

any-claim-woken: A task wakes claims whose labels do not fit.
server.long_poll:LongPolls._candidates
- gets_at_once(name, labels)
+ True
tests/server/roles/test_routes.py::test_one_that_waits_is_woken_if_its_labels_fit[memory]

one-pool-woken: Where a gate opens, or a limit leaves room, only the claims that wait longest are tried.
server.long_poll:LongPolls.ready
- len(self._parked.get(name, ())) > 1
+ False
tests/server/roles/test_routes.py::test_a_claim_is_woken_when_its_gate_opens_though_another_waits_longer[memory-required]

gate-opens-unheard: Claims for tasks that require labels do not hear that a gate opens by itself.
server.roles.claims:_note_what_is_left
- fitting(turn.tx.routes([kind]), workers)
+ []
tests/server/roles/test_routes.py::test_a_claim_is_woken_when_a_gate_opens_by_itself[memory-True-required]

ticket-without-labels: A ticket brings a task to a worker without its labels.
server.roles.tickets:TicketTasks.__init__
- fits(routes.get(row.seq, ""), labels)
+ True
tests/server/roles/test_routes.py::test_a_ticket_entitles_to_no_task_that_the_labels_do_not_fit[memory]

key-full-for-ever: The end of a run does not free its key in the other routes of the kind.
server.store.sql.shares:ShareTx.free_keys
- self.routes(kinds)
+ []
tests/server/roles/test_routes.py::test_the_end_of_a_run_frees_its_key_in_the_other_routes[sqlite]

routes-without-end: A kind has any number of routes.
server.roles.frontend:_check_routes
- count > MOST
+ False
tests/server/roles/test_routes.py::test_too_many_sets_of_labels_of_one_kind_are_refused[memory]

drop-spares-routes: A kind whose due tasks are dropped keeps those that require labels.
server.roles.gates:_drop_lanes
- [row.name, *turn.tx.routes([row.name])]
+ [row.name]
tests/server/roles/test_routes.py::test_a_closed_kind_is_closed_in_all_routes[memory]

unmet-by-any-worker: A worker of the kind counts for tasks whose labels it lacks.
server.roles.unmet:unmet
- fits(name, labels)
+ True
tests/server/roles/test_routes.py::test_what_no_known_worker_can_have_is_listed[memory]

part-of-a-lane: A worker without the preferred labels gets the first tasks of a lane of which an older one was open.
server.kind_queue:KindQueue._admits
- due_at + part.held <= self._now
+ True
tests/server/roles/test_preferences.py::test_claims_of_one_transaction_get_what_is_open_for_each[memory]

opening-unheard: A claim that waits is not woken when a task is open for it.
server.store.routes:ready_after
- _PREFERENCE not in name
+ True
tests/server/roles/test_preferences.py::test_a_claim_that_waits_is_woken_once_it_may_have_the_task[memory]

plain-claims-look-at-no-route: A claim without labels does not see tasks that only prefer some.
server.roles.claims:_due_tasks
- {request.labels for request in requests}
+ {request.labels for request in requests if request.labels}
tests/server/roles/test_preferences.py::test_a_worker_without_the_labels_gets_the_task_later[memory]

early-ticket: A ticket brings a task to a worker without the preferred labels at once.
server.roles.tickets:TicketTasks._is_held_back
- seconds > 0
+ False
tests/server/roles/test_preferences.py::test_a_ticket_of_a_task_that_is_kept_stays_good[memory]

ticket-thrown-away: A ticket is refused because its task is kept for other workers for a while.
server.roles.tickets:TicketTasks.__init__
- kept.union(row.id for row in rows.values() if row.kind not in self._kinds)
+ {row.id for row in rows.values() if row.kind not in self._kinds}
tests/server/roles/test_preferences.py::test_a_ticket_of_a_task_that_is_kept_stays_good[memory]

key-that-prefers: A task of a fair kind prefers workers, and its key hides older tasks of others.
server.roles.frontend:_Intake._check_labels
- task.prefers
+ False
tests/server/roles/test_preferences.py::test_a_task_with_a_key_prefers_nothing[memory]

unmet-of-some: What is unmet is listed of some kinds only, if many wait.
server.queries:Queries.unmet
- range(0, len(kinds), _UNMET)
+ range(0, len(kinds), _UNMET)[:1]
tests/server/roles/test_routes.py::test_what_no_known_worker_can_have_is_listed_of_all_kinds_however_many_wait[sqlite]

unmet-of-the-busy: The metric of what is unmet is that of the kinds of which most tasks wait.
server.http.metrics:_EngineCollector.look
- [*waits, *most]
+ most
tests/server/test_metrics.py::test_what_is_unmet_of_a_kind_is_counted_however_many_tasks_of_other_kinds_wait

unmet-twice: Tasks that require the same are listed once for each of their preferences.
server.roles.unmet:unmet
- required not in of_kind
+ True
tests/server/roles/test_preferences.py::test_only_what_is_required_is_unmet[memory]

any-tag: A search by several tags finds tasks that have only the rarest of them.
server.store.sql.tags:TagView.tagged
- row[1]
+ True
tests/server/roles/test_tags.py::test_a_search_goes_on_in_steps_however_few_match[sqlite]

first-tag: A search reads the index of the first tag, however many tasks have it.
server.store.sql.tags:TagView.tagged
- len(tags) == 1
+ True
tests/server/roles/test_tags.py::test_the_rarest_tag_from_here_on_is_looked_at[sqlite]

tags-left-behind: The tags of a task stay when it is removed.
server.store.sql.tx:SqlTx.remove
- (*REMOVE, DROP_KEYED, DROP_TAGS)
+ (*REMOVE, DROP_KEYED)
tests/server/roles/test_tags.py::test_tags_go_with_their_task[sqlite]

tags-forgotten-by-a-purge: A purge by tags removes the ended tasks without them too.
server.roles.retention:search
- request.tags is None
+ True
tests/server/roles/test_tags.py::test_a_purge_by_tags_leaves_the_others[memory]
""",
)

ROUTING: Mapping[str, Mutant] = {
    "any-label": Mutant(
        "A worker that has one of the required labels gets the task.",
        Edit("server.store.routes:fits", "_route(name).required <= labels", "_route(name).required & labels"),
        by=Histories("labels", ["A11"]),
    ),
    "preferred-at-once": Mutant(
        "A worker without the labels that a task prefers gets the task at once.",
        Edit("server.store.routes:hold_back", "_route(name).prefer_for", "0.0"),
        by=Histories("labels", ["A11"]),
    ),
    "kept-for-ever": Mutant(
        "A task that prefers labels which no worker has is never granted.",
        Edit("server.store.routes:fits", "_route(name).required", "_route(name).required | _route(name).preferred"),
        by=Histories("labels", ["L1", "L4"]),
    ),
    **_TESTED,
}
