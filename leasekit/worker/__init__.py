"""A fleet of handlers on one keeper: controllers claim ahead, executors run, `Worker` is the handle."""

from leasekit.worker.worker import Worker

__all__ = ["Worker"]
