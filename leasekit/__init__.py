"""Leases and heartbeats for long-running Python tasks."""

from leasekit.client import Client, connect
from leasekit.config import Heartbeats
from leasekit.errors import (
    AccessDenied,
    AlreadyDone,
    BackendError,
    Cancelled,
    CannotDecode,
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
    NotYet,
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
from leasekit.flows import Flow, FlowInfo, Step, StepInfo
from leasekit.idle import Idle
from leasekit.lease import Lease, lease, leased
from leasekit.named import Named, NamedLease, Once, OnceLease
from leasekit.periodic import Firing, PeriodicInfo, PeriodicTask
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
from leasekit.tokens import AuditEntry, NewToken, TokenInfo
from leasekit.worker import Worker

__all__ = [
    "AccessDenied", "AlreadyDone", "AuditEntry", "BackendError", "Cancelled", "CannotDecode", "Client", "Closed",
    "ConfigError", "Draining", "Exponential", "Fatal", "Firing", "FixedDelays", "Flow", "FlowInfo", "GateInfo",
    "Health", "Heartbeats", "HistoryEntry", "Idle", "IdleTimeout", "KindInfo", "KindSettings", "Lease", "LeaseError",
    "LeaseEvent", "LeaseLost", "LeasekitError", "LossReason", "MissingDependency", "Named", "NamedLease", "NewTask",
    "NewToken", "NodeInfo", "NotGranted", "NotHeld", "NotYet", "Once", "OnceLease", "Page", "PeriodicInfo",
    "PeriodicTask", "Polynomial", "ProtocolError", "Refused", "RetryPolicy", "Scheduled", "Stats", "Status", "Step",
    "StepInfo", "StoreDamaged", "StoreLocked", "Task", "TaskInfo", "TaskOptions", "Tasks", "Throttled", "TokenInfo",
    "TooLarge", "Unavailable", "UnknownScheme", "Untrusted", "Verdict", "Worker", "WorkerInfo", "connect", "lease",
    "leased",
]  # fmt: skip
