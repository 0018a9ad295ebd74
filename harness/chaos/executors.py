"""Handlers of `harness.chaos.handlers` in processes of their own (`run="process"`)."""

import leasekit
from harness.chaos import handlers

worker = leasekit.Worker(hooks=[handlers.hear])

for kind in ("deaf", "family", "gil", "hungry", "poison", "steady"):
    worker.handler(kind, run="process")(getattr(handlers, kind))
