"""The same bodies as in `harness.chaos.handlers`, in processes of their own (`run="process"`)."""

import leasekit
from harness.chaos import handlers

__all__ = ["worker"]

worker = leasekit.Worker(hooks=[handlers.hear])


@worker.handler("deaf", run="process")
def deaf(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.deaf.function(work, held)


@worker.handler("steady", run="process")
def steady(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.steady.function(work, held)


@worker.handler("gil", run="process")
def gil(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.gil.function(work, held)


@worker.handler("poison", run="process")
def poison(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.poison.function(work, held)


@worker.handler("hungry", run="process")
def hungry(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.hungry.function(work, held)


@worker.handler("spawns", run="process")
def spawns(work: handlers.Work, held: leasekit.Lease) -> int:
    return handlers.spawns.function(work, held)


@worker.handler("family", run="process")
def family(work: handlers.Work, held: leasekit.Lease) -> None:
    handlers.family.function(work, held)
