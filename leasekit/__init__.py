"""The keeper of leases for long-running work."""

from leasekit.config import Beats
from leasekit.errors import (
    BackendError,
    Cancelled,
    ConfigError,
    Fatal,
    LeaseError,
    LeasekitError,
    LeaseLost,
    MissingDependency,
    NotHeld,
    ProtocolError,
    Refused,
    StoreLocked,
    Throttled,
    Unavailable,
    UnknownScheme,
)
from leasekit.task import Task

__all__ = [
    "BackendError", "Beats", "Cancelled", "ConfigError", "Fatal", "LeaseError", "LeaseLost", "LeasekitError",
    "MissingDependency", "NotHeld", "ProtocolError", "Refused", "StoreLocked", "Task", "Throttled", "Unavailable",
    "UnknownScheme",
]  # fmt: skip
