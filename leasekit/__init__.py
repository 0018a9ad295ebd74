"""The keeper of leases for long-running work."""

from leasekit.client import Client, connect
from leasekit.config import Beats
from leasekit.errors import (
    AlreadyDone,
    BackendError,
    Cancelled,
    Closed,
    ConfigError,
    Draining,
    Fatal,
    IdleTimeout,
    LeaseError,
    LeaseEvent,
    LeasekitError,
    LeaseLost,
    MissingDependency,
    NotGranted,
    NotHeld,
    ProtocolError,
    Refused,
    StoreDamaged,
    StoreLocked,
    Throttled,
    TooLarge,
    Unavailable,
    UnknownScheme,
)
from leasekit.idle import Idle
from leasekit.lease import Lease, lease, leased
from leasekit.task import NewTask, Status, Task
from leasekit.worker import Worker

__all__ = [
    "AlreadyDone", "BackendError", "Beats", "Cancelled", "Client", "Closed", "ConfigError", "Draining", "Fatal", "Idle",
    "IdleTimeout", "Lease", "LeaseError", "LeaseEvent", "LeaseLost", "LeasekitError", "MissingDependency", "NewTask",
    "NotGranted", "NotHeld", "ProtocolError", "Refused", "Status", "StoreDamaged", "StoreLocked", "Task", "Throttled",
    "TooLarge", "Unavailable", "UnknownScheme", "Worker", "connect", "lease", "leased",
]  # fmt: skip
