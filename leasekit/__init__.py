"""The keeper of leases for long-running work."""

from leasekit.client import Client, connect
from leasekit.config import Beats
from leasekit.errors import (
    AlreadyDone,
    BackendError,
    Cancelled,
    ConfigError,
    Fatal,
    IdleTimeout,
    LeaseError,
    LeasekitError,
    LeaseLost,
    MissingDependency,
    NotGranted,
    NotHeld,
    ProtocolError,
    Refused,
    StoreLocked,
    Throttled,
    Unavailable,
    UnknownScheme,
)
from leasekit.idle import Idle
from leasekit.lease import Lease, lease, leased
from leasekit.task import NewTask, Status, Task
from leasekit.worker import Worker

__all__ = [
    "AlreadyDone", "BackendError", "Beats", "Cancelled", "Client", "ConfigError", "Fatal", "Idle", "IdleTimeout",
    "Lease", "LeaseError", "LeaseLost", "LeasekitError", "MissingDependency", "NewTask", "NotGranted", "NotHeld",
    "ProtocolError", "Refused", "Status", "StoreLocked", "Task", "Throttled", "Unavailable", "UnknownScheme",
    "Worker", "connect", "lease", "leased",
]  # fmt: skip
