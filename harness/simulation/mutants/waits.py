"""Mutants of runs that wait after `NotYet`, and of the window that bounds what is held."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

_WAITING = tested(
    "what a run that waits holds, and how soon it ends, breaks no promise of a history, or only by seconds",
    """
waits-hold-no-lease: A handler that says `NotYet` is done, and its run ends as a release.
_worker.claimed_task:ClaimedTask._pause
- after is None or ...
+ True
tests/worker/test_not_yet.py::test_the_handler_is_called_again_after_that_time_under_the_same_lease

waits-are-called-at-once: The next call does not wait for its time.
_worker.waiting:WaitingRuns.due
- self._heap and self._heap[0][0] <= now
+ self._heap
tests/worker/test_not_yet.py::test_the_handler_is_called_again_after_that_time_under_the_same_lease

waits-hold-no-place: A run that waits does not count as held.
_worker.controller:Controller._wait
- self._waiting.add(work)
+ self._waiting.add(work)
+ self.window.out -= 1
tests/worker/test_not_yet.py::test_a_run_that_waits_keeps_its_place_in_the_window

waits-are-always-held: A long wait stays in its worker.
_worker.claimed_task:ClaimedTask._pause
- after > LONGEST_WAIT
+ False
tests/worker/test_not_yet.py::test_a_long_wait_goes_back_to_the_service_and_counts_no_attempt

waits-outlast-the-drain: A worker that stops keeps the runs that wait.
_worker.controller:Controller.stop
- self._waiting.take_all()
+ ()
tests/worker/test_not_yet.py::test_a_stop_gives_the_task_back_at_once_with_its_progress_and_its_wait

due-runs-outlast-the-drain: A worker that stops keeps the runs that are due and found no slot.
_worker.controller:Controller.stop
- self._executor.buffer.take_begun()
+ ()
tests/worker/test_not_yet.py::test_a_stop_gives_back_a_run_that_is_due_and_finds_no_slot

waits-begin-while-it-stops: A run waits that said so while its worker stops.
_worker.controller:Controller._wait
- self._stopping or ...
+ False
tests/worker/test_not_yet.py::test_a_run_that_says_it_while_the_worker_stops_is_given_back

waits-given-back-without-their-time: A run that waits is given back as ready at once.
_leased_run:LeasedRun.ended_waiting
- max(0.0, due_at - now)
+ 0.0
tests/worker/test_not_yet.py::test_a_stop_gives_the_task_back_at_once_with_its_progress_and_its_wait

waits-are-not-told: A run that waits hears of a cancel request, or of a loss, with its next call.
_worker.controller:Controller._wait
- work.held.listener = partial(self._hear_of, work)
+ pass
tests/worker/test_not_yet.py::test_a_cancel_request_ends_it_at_once

due-runs-are-not-told: A run that is due and finds no slot hears of a cancel request with its next call.
_worker.controller:Controller._end_waiting
- self._waiting.remove(work) or self._executor.buffer.remove(work)
+ self._waiting.remove(work)
tests/worker/test_not_yet.py::test_a_run_that_is_due_and_finds_no_slot_is_ended_too

waits-that-end-keep-their-place: The place of a run that ends while it waits is not free again.
_worker.controller:Controller._give_up
- self._count_ended(1)
+ pass
tests/worker/test_not_yet.py::test_a_lost_lease_ends_it_at_once_and_frees_its_place

waits-are-guarded: The timer that ends a process runs for a handler that does not.
_driver.keeping.held_lease:HeldLease.pause
- self.end()
+ self.ended = True
tests/worker/test_not_yet.py::test_the_timer_that_ends_the_process_does_not_run_for_it

waits-are-to-blame: A run that waits has crashed if its process dies.
_driver.keeping.held_lease:HeldLease.pause
- ledger.pauses(self.entry)
+ pass
tests/worker/test_not_yet.py::test_it_is_not_to_blame_if_its_process_dies

called-again-unguarded: The next call of a handler is not guarded.
_driver.keeping.held_lease:HeldLease.resume
- self._guard()
+ pass
tests/worker/test_not_yet.py::test_the_timer_that_ends_the_process_does_not_run_for_it

waits-forget-progress: The next call has the checkpoint of the holder before.
_worker.claimed_task:ClaimedTask._task
- self.is_new or progress is UNSET
+ True
tests/worker/test_not_yet.py::test_the_next_call_has_the_latest_progress_as_its_checkpoint

due-runs-come-last: Tasks that have not begun come before runs that are due.
_worker.buffer:Buffer.put
- (work.held.task.priority, work.is_new)
+ (work.held.task.priority, not work.is_new)
tests/worker/test_not_yet.py::test_runs_that_are_due_come_before_tasks_that_have_not_begun
""",
)

_WINDOW = tested(
    "a window that is too large or too small breaks no promise",
    """
window-ignores-waits: The window is as large as without runs that wait.
_worker.window:Window._waiting_beside
- return self.slots * ...
+ return 0.0
tests/worker/test_window.py::test_as_many_are_held_as_keep_all_slots_busy

window-beyond-heartbeats: A window of a given size is larger than heartbeats can keep.
_worker.window:Window.bound
- min(bound, self._most)
+ bound
tests/worker/test_window.py::test_the_heartbeats_bound_a_given_size_too

window-never-forgets: What was measured long ago counts like what was measured last.
_worker.window:Window.called
- self._weight *= _GROWTH**calls
+ pass
tests/worker/test_window.py::test_a_kind_that_no_longer_comes_is_forgotten

window-leaves-slots-idle: Runs that wait take the places of tasks that could run.
_worker.window:Window.bound
- self.slots + (self.waiting if self._idles else 0)
+ self.slots
tests/worker/test_window.py::test_no_slot_is_idle_for_long_because_of_runs_that_wait
""",
)

WAITS: Mapping[str, Mutant] = {**_WAITING, **_WINDOW}
