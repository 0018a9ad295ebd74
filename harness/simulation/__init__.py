"""Thousands of hours of leasekit's real code in a few minutes: a simulated world, with faults.

    python -m harness.simulation --seed 7             one history, and its violations
    python -m harness.simulation --minutes 10         histories for ten minutes, one process for each processor

The code is real: keeper, cycle, controller and outbox on the one side, engine, roles and store on the other.
The world around it is simulated: time, chance, the network, the kernel's timer, processes that stop and die.
One seed is one history, to the last event.
"""
