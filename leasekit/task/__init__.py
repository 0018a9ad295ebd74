"""The values that users, the keeper, adapters and the server exchange.

All values are frozen, keyword-only and shaped like the items of messages, so that a batch is encoded and decoded as it
is. Durations are seconds; `at` is an instant with its time zone. The garbage collector does not track values that come
in batches (`gc=False`), because JSON has no cycles.
"""

from leasekit.task.info import (
    ChainCancelled,
    Ended,
    GateInfo,
    Health,
    HistoryEntry,
    KindInfo,
    Matched,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Selection,
    Stats,
    TaskInfo,
    TaskSelection,
    Vacuumed,
    WorkerInfo,
)
from leasekit.task.leased import (
    Beat,
    Claimed,
    NewTask,
    Scheduled,
    Settlement,
    Task,
    TaskDefaults,
    TaskOptions,
    Ticket,
    Verdict,
)
from leasekit.task.settings import (
    DEFAULTS,
    CompleteSettings,
    Exponential,
    FixedDelays,
    KindSettings,
    Polynomial,
    RetryPolicy,
    TaskSettings,
    effective,
)
from leasekit.task.words import (
    Name,
    Outcome,
    ProgressSeq,
    Seconds,
    Status,
    Tag,
    VerdictWord,
)

__all__ = [
    "DEFAULTS", "Beat", "ChainCancelled", "Claimed", "CompleteSettings", "Ended", "Exponential", "FixedDelays",
    "GateInfo", "Health", "HistoryEntry", "KindInfo", "KindSettings", "Matched", "Name", "NewTask", "NodeInfo",
    "Outcome", "Page", "Polynomial", "ProgressSeq", "Purged", "Redriven", "Rescheduled", "RetryPolicy", "Scheduled",
    "Seconds", "Selection", "Settlement", "Stats", "Status", "Tag", "Task", "TaskDefaults", "TaskInfo", "TaskOptions",
    "TaskSelection", "TaskSettings", "Ticket", "Vacuumed", "Verdict", "VerdictWord", "WorkerInfo", "effective",
]  # fmt: skip
