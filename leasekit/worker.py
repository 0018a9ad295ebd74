"""A fleet of handlers: `Worker` claims tasks and runs them; `HandlerFunction` is what it makes of a function."""

from leasekit._worker.handler_function import HandlerFunction
from leasekit._worker.worker import Worker

__all__ = ["HandlerFunction", "Worker"]
