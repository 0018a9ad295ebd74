"""Mutants of flows: of each edge, and of each rule of the moves."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

FLOWS: Mapping[str, Mutant] = tested(
    "in the simulation, tasks stand alone",
    """
success-edge-dropped: A step that has succeeded is the last one.
_flows.moves:succeed
- choice or node.on_success
+ choice
tests/flows/test_moves.py::test_a_success_leads_to_the_next_step_with_the_new_state_and_the_options_of_the_flow

choice-ignored: A step that chooses its edge goes to `on_success`.
_flows.moves:succeed
- choice or node.on_success
+ node.on_success
tests/flows/test_moves.py::test_a_choice_wins_over_on_success

any-choice-taken: A step may choose a step that it has not declared.
_flow_run:_Visit._move_after
- choice not in self.step.node.choices
+ False
tests/flows/test_flow.py::test_a_step_chooses_among_its_choices

failure-edge-dropped: A step that fails stops the flow, although there is a way back.
_flows.moves:fail
- node.on_failure is None
+ True
tests/flows/test_moves.py::test_a_failure_leads_back_with_the_state_that_the_step_got

retry-edge-is-failure: A step that is not ready has failed.
_flow_run:_Visit.raised
- isinstance(error, NotYet)
+ False
tests/flows/test_flow.py::test_a_step_that_is_not_ready_is_called_again

retry-for-ever: `retry_until` has no effect.
_flows.moves:wait
- node.retry_until is not None and ...
+ False
tests/flows/test_moves.py::test_a_step_is_called_again_until_retry_until_is_over

retry-clock-restarts: The time of `retry_until` begins anew with each call.
_flows.moves:wait
- began_at if mark.since is None else mark.since
+ began_at
tests/flows/test_moves.py::test_a_step_is_called_again_until_retry_until_is_over

one-attempt-more: A step has one attempt more than it says.
_flows.moves:is_last
- attempt - mark.spent >= node.max_attempts
+ attempt - mark.spent > node.max_attempts
tests/flows/test_flow.py::test_a_failure_takes_its_edge_after_the_last_attempt

fatal-tried-again: `Fatal` is a failure like others.
_flow_run:_Visit.raised
- any(encoding.each(error, Fatal))
+ False
tests/flows/test_flow.py::test_a_fatal_failure_takes_its_edge_at_once

crashes-uncounted: A step whose workers die is begun for ever.
_flow_run:_Visit.begins
- not moves.has_crashed_too_often(...)
+ True
tests/flows/test_flow.py::test_a_step_whose_workers_vanish_takes_the_edge_of_its_failure

service-counts-first: The service ends the first step by its own limits, and no edge is taken.
flows:Flow._first
- {**given, **first.options, **COUNTLESS}
+ {**given, **first.options}
tests/flows/test_flow.py::test_the_service_ends_no_step_by_itself

service-counts-later: The service ends a later step by its own limits, and no edge is taken.
_flow_run:_Visit._task
- {**call.options, **of_step, **COUNTLESS, "id": planned.id, "after": ...}
+ {**call.options, **of_step, "id": planned.id, "after": list(planned.after)}
tests/flows/test_flow.py::test_the_service_ends_no_step_by_itself

resume-without-attempts: A step that is resumed has no attempt left.
_flow_run:_Visit._stop
- self._held.progress(...)
+ pass
tests/flows/test_flow.py::test_a_step_that_fails_without_an_edge_stops_the_flow_which_can_be_resumed_from_there

failure-never-made-good: A flow whose failed step succeeds later counts as rolled back.
_flows.moves:_left
- call.failure is not None and ...
+ False
tests/flows/test_moves.py::test_a_failure_is_made_good_when_the_step_that_failed_succeeds

first-failure-forgotten: A failure on the way back hides the one that led there.
_flows.moves:_back
- call.failure or failure
+ failure
tests/flows/test_moves.py::test_a_flow_keeps_its_first_failure_on_the_way_back

branch-goes-back-alone: A branch that fails rolls back while the others run.
_flows.moves:fail
- call.item is not None
+ False
tests/flows/test_moves.py::test_a_branch_ends_with_what_it_returned_or_why_it_failed

branches-each-join: Each branch goes on to the join by itself.
_flows.moves:succeed
- call.item is not None
+ False
tests/flows/test_flow.py::test_a_step_runs_for_each_item_and_the_next_has_all_results_in_order

join-at-once: A join does not wait for its branches.
_flows.moves:fan_out
- Planned(joining, after=after)
+ Planned(joining)
tests/flows/test_moves.py::test_branches_have_an_item_each_and_the_join_runs_after_all

join-blind: A join runs although a branch has failed.
_flows.moves:join
- not failed or ...
+ True
tests/flows/test_moves.py::test_a_join_takes_the_edge_of_failure_if_a_branch_has_failed

no-meetings: A join runs after more tasks than a task can run after.
_flows.moves:fan_out
- len(branches) > _MEET
+ False
tests/flows/test_moves.py::test_many_branches_meet_in_groups_of_a_hundred

too-many-branches: A list may have any length.
_flow_run:_Visit._planned
- len(items) > moves.LIMIT
+ False
tests/flows/test_flow.py::test_more_items_than_one_settlement_has_room_for_are_refused

other-version-fails: A worker without the step fails the flow.
_flow_run:_visit
- held.release(...)
+ held.fail("unknown", retry=False)
tests/flows/test_flow.py::test_a_step_of_another_version_is_left_to_the_workers_that_have_it

state-unchecked: What a step returns need not fit.
_flow_run:_Visit._move_after
- self._call.item is None
+ False
tests/flows/test_flow.py::test_a_state_that_is_returned_must_fit

flow-in-the-chain-of-its-starter: A flow that a task starts is part of the chain of that task.
_lineage:outside
- _running.set(None)
+ _running.set(_running.get())
tests/flows/test_flow.py::test_a_flow_is_a_chain_of_its_own

waits-not-counted: The workload leaves out the calls after a wait.
flow_info:_Visit.executions
- self.task.attempt + self.mark.waits
+ self.task.attempt
tests/flows/test_flow.py::test_a_step_that_is_not_ready_is_called_again

unknown-target: An edge may lead to no step.
_flows.graph:Graph._faults_of
- name not in self.nodes
+ False
tests/flows/test_graph.py::test_a_graph_with_a_fault_is_refused

unreached-step: A step may be declared that is never reached.
_flows.graph:Graph._faults
- name not in reached and ...
+ False
tests/flows/test_graph.py::test_a_graph_with_a_fault_is_refused

circle-without-exit: A flow may go in a circle for ever.
_flows.graph:Graph._faults
- not any(...)
+ False
tests/flows/test_graph.py::test_a_graph_with_a_fault_is_refused

circle-of-failures: A flow may fail for ever.
_flows.graph:Graph._faults
- node.on_failure and ...
+ False
tests/flows/test_graph.py::test_a_graph_with_a_fault_is_refused
""",
)
