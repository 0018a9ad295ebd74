"""What the code does not say of its settings and values in a comment or docstring is said here."""

__all__ = ["unused", "words"]

_WORDS = {
    "Beats.retries_per_cycle": "how often a lease that failed is tried again before it rests until the next cycle",
    "NewTask.kind": "which handler runs it",
    "NewTask.collection": "a name under which it can be listed",
    "NewTask.max_runtime": "how long a run may take from its first beat; then it is renewed no more: a crash",
    "NewTask.enqueue_timeout": "kept with the task; nothing acts on it while the store is the queue",
    "NewTask.retry": "how long to wait before the next attempt: a retry policy, see below",
    "NewTask.traceparent": "the W3C trace context of who scheduled it",
    "Exponential.first": "seconds before the second attempt",
    "Exponential.factor": "how much longer each further wait is",
    "Exponential.max": "seconds, the longest wait",
    "Exponential.jitter": "the largest part by which chance shortens a wait",
    "Waits.waits": "seconds, one for each attempt",
    "connect.url_or_backend": "where the tasks are: `http://host:port`, `sqlite:///file.db`, `memory://`, the scheme "
    "of an installed adapter, or a backend object",
    "connect.beats": "the rhythm of heartbeats; where the service grants another ttl, the rhythm follows it",
    "connect.hooks": "callables that hear what happens",
    "connect.worker": "the name under which this process claims; by default host, process and a random part",
    "connect.patience": "seconds for which calls are repeated while the service is away; None: 30; 0: once",
    "Worker.beats": "the rhythm of heartbeats; only where the worker makes its client itself",
    "Worker.hooks": "callables that hear what happens; only where the worker makes its client itself",
    "Worker.handler.kind": "which tasks the function runs; one kind, one handler",
    "Worker.run.url": "goes before the URL that the worker was made with",
    "Worker.run.beats": "goes before the rhythm that the worker was made with",
    "Worker.run.concurrency": "goes before the number that the worker was made with",
    "Worker.run.drain_grace": "goes before the grace that the worker was made with",
    "Worker.run.drain_timeout": "goes before the time-out that the worker was made with",
    "lease.task": "what `client.tasks()` gave",
    "Client.tasks.kinds": "one or more",
    "Client.tasks.until_idle": "the loop ends when no task has come for so many seconds; None: it goes on for ever",
    "Event.at": "when it happened",
    "Claimed.task_ids": "which tasks",
    "Claimed.waited": "seconds for which the request had waited at the service; None: it does not say",
    "Claimed.took": "seconds from the first request to the answer",
    "Claimed.tasks": "the tasks themselves",
    "Sent.task_ids": "whose beats",
    "Sent.late": "seconds after the slot was due",
    "Renewed.task_ids": "whose beats",
    "Renewed.round_trip": "seconds from request to answer",
    "Answered.round_trip": "seconds from request to answer",
    "Answered.verdicts": "verdict → how many",
    "AtRisk.why": "what failed, in one sentence",
    "Ordered.order": "`cancel`",
    "Lost.reason": "one word, as in `LeaseLost.reason`",
    "Lost.why": "one sentence",
    "Lost.events": "what happened to the lease before, the oldest first: `LeaseEvent`",
    "Settled.outcome": "what was reported",
    "Settled.verdict": "`settled` or `gone`",
    "Settled.reason": "with *gone*: why",
    "Settled.task": "the task itself",
    "Unreported.task_ids": "whose settlements",
    "Unreported.why": "what failed, in one sentence",
    "Overloaded.held": "how many leases",
    "Overloaded.capacity": "how many can beat in one cycle",
    "Task.id": "which task",
    "Task.kind": "which handler runs it",
    "Task.attempt": "1 for the first; releases are not counted",
    "Task.payload": "JSON, as it was scheduled",
    "Task.collection": "as it was scheduled",
    "Task.priority": "as it was scheduled",
    "Task.traceparent": "as it was scheduled",
    "Beat.id": "which task",
    "Beat.token": "of its claim",
    "Settlement.id": "which task",
    "Settlement.token": "of its claim",
    "Settlement.outcome": "how the run ended",
    "Settlement.progress": "the latest checkpoint, where there is a new one",
    "Verdict.id": "which task",
    "Verdict.verdict": "one word",
    "ClaimRequest.worker": "who asks",
    "ClaimRequest.kinds": "what it can run",
    "ClaimRequest.limit": "tasks, at most; 0 ends the claim: nothing is granted to it from then on",
    "ClaimRequest.claim_id": "made up for each claim, and the same when it is repeated",
    "Scheduled.id": "which task",
    "Scheduled.status": "where it is in its life",
    "TaskInfo.id": "which task",
    "TaskInfo.kind": "which handler runs it",
    "TaskInfo.status": "where it is in its life",
    "TaskInfo.priority": "0 is the most urgent",
    "TaskInfo.attempt": "of the current or last run; releases are not counted",
    "TaskInfo.crashes": "runs that ended because their holder vanished",
    "TaskInfo.fence": "of the last claim",
    "TaskInfo.collection": "as it was scheduled",
    "TaskInfo.payload": "as it was scheduled",
    "TaskInfo.progress": "the latest checkpoint",
    "TaskInfo.result": "of the success",
    "TaskInfo.error": "of the last failure",
    "TaskInfo.worker": "who holds it, or did last",
    "TaskInfo.history": "its runs, as they ended",
    "task_id": "which task",
    "token": "of its claim; not in the `repr`, and never for a log",
}  # fmt: skip
"""`owner.name` → what the code does not say in a comment or docstring; without an owner: of every owner."""

_used: set[str] = set()


def words(owner: str, name: str, said: str = "") -> str:
    for key in (f"{owner}.{name}", name):
        if not said and key in _WORDS:
            _used.add(key)
            said = _WORDS[key]
    if not said:
        raise ValueError(f"{owner}.{name} is said nowhere: comment it in its class, or add it to docs/_words.py")
    return said


def unused() -> set[str]:
    """Words for what is no more, or says itself by now; after all pages were made."""
    return _WORDS.keys() - _used
