"""Real processes, really broken: servers and workers as users start them, faults, and the checker on what happened.

    python -m harness.chaos --list
    python -m harness.chaos --row 17           # one row of the fault matrix
    python -m harness.chaos                    # all rows, and the big run

Each row is a scenario: it starts processes in a folder of its own, injects a fault, makes sure that it did fire, lets
everything drain, and hands the merged logs of all processes to `harness.checker`.
"""
