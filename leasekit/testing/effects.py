"""Side effects, and whether any of them came after its lease was lost.

    effects = Effects(Log("effects.jsonl", who="test"))
    client = leasekit.connect(service, hooks=[effects])
    ...
    held.check()
    effects.record(held)                 # beside the write itself, in the body that is tested
    ...
    effects.assert_none_after_loss()

The fixture `leasekit_effects` of the pytest plugin is one of these.
"""

import threading

from leasekit import hooks
from leasekit.lease import Lease
from leasekit.testing.checker import Rules, Violation, check
from leasekit.testing.history import Effect, Event, Granted, Log, Lost, Renewed

__all__ = ["Effects"]


class Effects:
    """What bodies did, and what became of their leases: a hook, to be given to the client that they run on.

    `log` keeps it all, in the format of `leasekit.testing.history`.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._fences: dict[tuple[str, str], int] = {}  # by task and token
        self._newest: dict[str, int] = {}  # by task
        self.events: list[Event] = []
        self._more = threading.Condition()

    def record(self, held: Lease, *, progress: bool = False) -> None:
        """A body makes a side effect now, under this lease. Raises nothing, whatever has become of the lease."""
        self._add(Effect, task=held.task.id, fence=held.fence, progress=progress)

    def __call__(self, event: hooks.Event) -> None:
        """Hear what happens to leases."""
        match event:
            case hooks.Claimed():
                for task in event.tasks:
                    self._fences[task.id, task.token] = self._newest[task.id] = task.fence
                    self._add(
                        Granted, at=event.at, asked_at=event.at - event.took, task=task.id, fence=task.fence,
                        token=task.token, attempt=task.attempt, ttl=task.ttl, kind=task.kind, priority=task.priority,
                    )  # fmt: skip
            case hooks.Renewed():
                for task_id in event.task_ids:
                    asked_at = event.at - event.round_trip
                    self._add(Renewed, at=event.at, asked_at=asked_at, task=task_id, fence=self._newest[task_id])
            case hooks.Lost() if (fence := self._fences.get((event.task_id, event.token))) is not None:
                self._add(Lost, at=event.at, task=event.task_id, fence=fence, reason=event.reason)
            case _:
                pass

    def of(self, kind: type[Event]) -> list[Event]:
        """All events of one kind, in the order in which they were made."""
        return [event for event in self.events if isinstance(event, kind)]

    def assert_none_after_loss(self, *, lost: int = 1, within: float = 5.0) -> None:
        """Fail where a side effect carries a fence whose lease was lost, or had run out, or is another's by now.

        Fails too where fewer than `lost` leases were lost, or nothing was recorded: then nothing is proved. A body may
        hear of its loss before this does: it waits for that, `within` so many seconds.
        """
        __tracebackhide__ = True
        with self._more:
            self._more.wait_for(lambda: len(self.of(Lost)) >= lost, within)
        losses, deeds = len(self.of(Lost)), len(self.of(Effect))
        if losses < lost or not deeds:
            raise AssertionError(
                f"{losses} leases were lost, of at least {lost}, and {deeds} side effects recorded: nothing is proved"
            )
        if problems := self.problems():
            raise AssertionError("\n".join(map(str, problems)))

    def problems(self) -> list[Violation]:
        """The side effects that came too late, and whatever else of what happened breaks S1, S2 or S9."""
        ordered = sorted(self.events, key=lambda event: event.at)
        found = [one for one in check(ordered, Rules(least_settled=0)) if one.rule in {"S1", "S2", "S9"}]
        lost = {(one.task, one.fence): one for one in ordered if isinstance(one, Lost)}
        for deed in ordered:
            if isinstance(deed, Effect) and (loss := lost.get((deed.task, deed.fence))) and deed.at > loss.at:
                why = f"fence {deed.fence} made a side effect {deed.at - loss.at:.3f} s after its lease was lost"
                found.append(Violation(rule="S2", task=deed.task, why=why, events=[loss, deed]))
        return found

    def _add(self, kind: type[Event], /, **fields: object) -> None:
        with self._more:
            self.events.append(self._log.add(kind, **fields))
            self._more.notify_all()
