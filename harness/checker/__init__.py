"""Whether a history keeps the promises: safety (S1-S11), liveness (L1-L7), and that what went in came out.

    problems = check(read(*paths), Rules(ttl=300, faults={"kill", "cut"}))
    assert not problems, "\n".join(map(str, problems))

It knows nothing but the events (`harness.history`), so it judges simulated and real processes alike. A history
proves little if little happened in it: one with too little traffic, or in which a fault that was meant to fire did not,
is a problem too.
"""

from collections.abc import Sequence

from harness.checker.index import Lives
from harness.checker.liveness import liveness
from harness.checker.queue import queue
from harness.checker.rules import Rules, Violation
from harness.checker.safety import safety
from harness.history import Event, Fault, SettleAnswered

__all__ = ["Rules", "Violation", "check"]


def check(events: Sequence[Event], rules: Rules | None = None) -> list[Violation]:
    """What is wrong with a history, whose events are ordered by time; nothing, where all promises were kept."""
    rules = rules or Rules()
    lives = Lives(_without_lost(events))
    return [*safety(lives, rules), *liveness(lives, rules), *queue(lives), *_proof(lives, rules)]


def _without_lost(events: Sequence[Event]) -> Sequence[Event]:
    """Leave out tasks of which a service has lost something, as it declares: of these it promises nothing.

    A fault of the name "rollback" says in which time what was acknowledged is as if it had never been.
    """
    lost = [(one.at, one.at + one.lasts) for one in events if isinstance(one, Fault) and one.name == "rollback"]
    if not lost:
        return events
    tasks = {
        getattr(one, "task", "")
        for one in events
        for begin, end in lost
        if begin <= one.at and getattr(one, "asked_at", one.at) <= end
    }
    return [one for one in events if getattr(one, "task", None) not in tasks]


def _proof(lives: Lives, rules: Rules) -> list[Violation]:
    """Whether enough happened for a history without violations to mean something."""
    found: list[Violation] = []
    settled = sum(isinstance(event, SettleAnswered) and event.verdict == "settled" for event in lives.events)
    if settled < rules.least_settled:
        why = f"{settled} settlements were answered, of at least {rules.least_settled}: nothing is proved by so little"
        found.append(Violation(rule="traffic", why=why))
    if missing := sorted(set(rules.faults) - {fault.name for fault in lives.faults}):
        found.append(Violation(rule="faults", why=f"these did not fire: {', '.join(missing)}"))
    return found
