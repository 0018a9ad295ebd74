"""Break leasekit's rules on purpose, and see that each break makes a simulated history break a promise.

    python -m harness.simulation.mutants                    the unbroken code, then all mutants
    python -m harness.simulation.mutants --only no-timer    one mutant

A mutant is a value (`mutant.py`): what is replaced (`edit.py`), what is wrong then, the stress under which that shows,
and the rules of the checker that have to report it. A mutant is dead when the checker names one of its rules; a program
that merely crashes proves nothing. A mutant that no history shows has a test that must fail instead, and the reason.
"""
