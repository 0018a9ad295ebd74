"""Does the simulation notice? Deliberate breaks of leasekit's rules, each of which has to break a promise of a history.

    python -m harness.simulation.mutants                    all of them, after the code as it is
    python -m harness.simulation.mutants --only no-timer    one

A mutant is a value (`mutant.py`): what is replaced (`edit.py`), what then goes wrong, the stress under which it shows,
and the rules of the checker that have to say so. A mutant is dead when the checker names one of its rules; a program
that merely falls over proves nothing. What no history shows has a test instead, which has to fail, and the reason.
"""
