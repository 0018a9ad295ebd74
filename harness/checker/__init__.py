"""Check that a history keeps the promises: safety (S1-S11), liveness (L1-L7), what lets a task start or changes it
(A1-A15), and no task lost or made up (`queue`).

    problems = check(read(*paths), Rules(ttl=300, faults={"kill", "cut"}))
    assert not problems, "\n".join(map(str, problems))

The checker sees only events (`harness.history`), so it judges simulated and real processes alike. A history in which
little happened proves little: too little traffic, or a fault that should have fired and did not, is a violation too.
"""

from collections.abc import Sequence

from harness.checker.admission import admission
from harness.checker.index import Lives
from harness.checker.liveness import liveness
from harness.checker.queue import queue
from harness.checker.rules import Rules, Violation
from harness.checker.safety import safety
from harness.checker.waiting import waiting
from harness.history import Event, Fault, SettleAnswered

__all__ = ["Rules", "Violation", "check"]


def check(events: Sequence[Event], rules: Rules | None = None) -> list[Violation]:
    """Return the promises that a history breaks; its events must be ordered by time."""
    rules = rules or Rules()
    lives = Lives(_without_lost(events))
    return [
        *safety(lives, rules),
        *liveness(lives, rules),
        *admission(lives, rules),
        *waiting(lives, rules),
        *queue(lives),
        *_proof(lives, rules),
    ]


def _without_lost(events: Sequence[Event]) -> Sequence[Event]:
    """Leave out the tasks that changed while a service lost its writes: for these it promises nothing.

    A fault with the name "rollback" covers the time whose acknowledged writes are lost.
    """
    lost = [
        (fault.at, fault.at + fault.lasts) for fault in events if isinstance(fault, Fault) and fault.name == "rollback"
    ]
    if not lost:
        return events
    tasks = {
        getattr(event, "task", "")
        for event in events
        for begin, end in lost
        if begin <= event.at and getattr(event, "asked_at", event.at) <= end
    }
    return [event for event in events if getattr(event, "task", None) not in tasks]


def _proof(lives: Lives, rules: Rules) -> list[Violation]:
    """Check that enough happened for a history without violations to prove something."""
    violations: list[Violation] = []
    settled = sum(isinstance(event, SettleAnswered) and event.verdict == "settled" for event in lives.events)
    if settled < rules.least_settled:
        why = f"{settled} settlements were answered, {rules.least_settled} are needed: so little proves nothing"
        violations.append(Violation(rule="traffic", why=why))
    if missing := sorted(set(rules.faults) - {fault.name for fault in lives.faults}):
        violations.append(Violation(rule="faults", why=f"these did not fire: {', '.join(missing)}"))
    return violations
