"""Thousands of hours of leasekit in a few minutes: its real parts in a simulated world, with faults.

    python -m harness.simulation --seed 7             one history, and what is wrong with it
    python -m harness.simulation --minutes 10         as many as there is time for, in two processes

What runs is the real code: keeper, cycle, controller, outbox on the one side, engine, roles and store on the other.
What is simulated is the world around them: time, chance, the network, the kernel's timer, processes that stop and die.
One seed is one history, to the last event.
"""
