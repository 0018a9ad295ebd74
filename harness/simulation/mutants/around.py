"""Mutants of code around runs: what it shares with the handler, and what it may swallow."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

AROUND: Mapping[str, Mutant] = tested(
    "the workers of the simulation have no handlers of users",
    """
context-of-the-run-before: A thread runs the next task with the context variables of the one before.
_worker.executor:ThreadExecutor._run
- contextvars.copy_context().run(work.handler.call, run)
+ work.handler.call(run)
tests/worker/test_around.py::test_what_it_sets_is_seen_by_all_that_the_handler_starts_and_not_by_the_next_run

context-of-an-executor: An executor runs the next task with the context variables of the one before.
_worker.process.child:_Executor._call_handler
- contextvars.copy_context().run(call, self.handler, run)
+ call(self.handler, run)
tests/worker/process/test_around_processes.py::test_what_one_run_sets_is_not_seen_by_the_next_in_the_same_executor

error-swallowed: A run whose error the code around it has swallowed is a success.
_worker.around:_Insisting.insist
- error is not None and (self._had_decided or not self._held.decided)
+ False
tests/worker/test_around.py::test_an_error_that_it_swallows_counts_all_the_same_and_the_outer_ones_see_it

inside-out: The first that is declared is the innermost.
_worker.around:around_run
- for function in functions:
-     stack.enter_context(_layer(function, held))
+ for function in reversed(functions):
+     stack.enter_context(_layer(function, held))
tests/worker/test_around.py::test_the_first_is_the_outermost_and_kinds_choose
""",
)
