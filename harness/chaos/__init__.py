"""Real servers and workers, started as users start them, under faults; the checker judges their history.

    python -m harness.chaos --list
    python -m harness.chaos --row 17           # one row of the fault matrix
    python -m harness.chaos                    # all rows, and the big run

Each row is a scenario: it starts processes in a folder of its own, injects a fault, makes sure that this fired, lets
all tasks end, and passes the merged logs of all processes to `harness.checker`.
"""
