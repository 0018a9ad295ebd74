"""Mutants of what operators select, redrive and purge."""

from collections.abc import Mapping

from harness.simulation.mutants.mutant import Mutant, tested

DEAD_LETTERS: Mapping[str, Mutant] = tested(
    "no history of the simulation selects tasks by what they have in common",
    """
selections-ignored: A selection selects by kind, status and collection alone.
server.roles.selection:matching
- not wanted.needs_a_look
+ True
tests/testing/test_contract_memory.py::TestMemory::test_a_purge_removes_what_it_names_or_selects_and_nothing_else

errors-ignored: A selection does not look at errors.
task.info:TaskSelection.matches
- _is_error(task.error, self.error, self.error_type)
+ True
tests/testing/test_contract_memory.py::TestMemory::test_dead_tasks_are_selected_by_all_that_is_given

one-page-for-all: What matches behind the first page is not found.
server.roles.selection:Search.look
- str(found[room - 1].seq if room else self._after)
+ None
tests/testing/test_contract_memory.py::TestMemory::test_filters_select_a_page_at_a_time

a-page-skips-what-did-not-fit: A page of which some tasks did not match skips the tasks that it has not looked at.
server.roles.selection:Search.look
- rows[-1].seq if len(rows) == most else stretch.until
+ stretch.until
tests/server/test_dead_letters.py::test_what_does_not_match_takes_no_place_in_a_page

a-list-skips-what-did-not-fit: A list of which some tasks did not match skips the tasks that it has not looked at.
server.roles.listing:Listing.look
- rows[-1].seq if len(rows) == most else stretch.until
+ stretch.until
tests/server/test_dead_letters.py::test_what_does_not_match_takes_no_place_in_a_page

named-tasks-purged-alive: A purge of tasks that it names removes some that run.
server.roles.retention:_is_old
- row.ended_at is not None and row.status.ended and row.ended_at <= until
+ True
tests/testing/test_contract_memory.py::TestMemory::test_a_purge_removes_what_it_names_or_selects_and_nothing_else

unbounded-search: A search for a few tasks among many ends its page only at the last task.
server.roles.selection:Search.look
- self._steps == _STEPS
+ False
tests/server/test_dead_letters.py::test_a_search_ends_its_page_after_a_while_and_goes_on
""",
)
