"""Leases and heartbeats for long-running Python tasks."""

from leasekit.client import Client, connect
from leasekit.config import Heartbeats
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
    LossReason,
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
    Untrusted,
)
from leasekit.idle import Idle
from leasekit.lease import Lease, lease, leased
from leasekit.named import Named, NamedLease, Once, OnceLease
from leasekit.task import (
    Exponential,
    FixedDelays,
    GateInfo,
    Health,
    HistoryEntry,
    KindInfo,
    KindSettings,
    NewTask,
    NodeInfo,
    Page,
    Polynomial,
    RetryPolicy,
    Scheduled,
    Stats,
    Status,
    Task,
    TaskInfo,
    TaskOptions,
    Verdict,
    WorkerInfo,
)
from leasekit.task_iterator import Tasks
from leasekit.worker import Worker

__all__ = [
    "AlreadyDone", "BackendError", "Cancelled", "Client", "Closed", "ConfigError", "Draining", "Exponential", "Fatal",
    "FixedDelays", "GateInfo", "Health", "Heartbeats", "HistoryEntry", "Idle", "IdleTimeout", "KindInfo",
    "KindSettings", "Lease", "LeaseError", "LeaseEvent", "LeaseLost", "LeasekitError", "LossReason",
    "MissingDependency", "Named", "NamedLease", "NewTask", "NodeInfo", "NotGranted", "NotHeld", "Once", "OnceLease",
    "Page", "Polynomial", "ProtocolError", "Refused", "RetryPolicy", "Scheduled", "Stats", "Status", "StoreDamaged",
    "StoreLocked", "Task", "TaskInfo", "TaskOptions", "Tasks", "Throttled", "TooLarge", "Unavailable", "UnknownScheme",
    "Untrusted", "Verdict", "Worker", "WorkerInfo", "connect", "lease", "leased",
]  # fmt: skip
