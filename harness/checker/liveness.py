"""The rules of liveness, L1-L7, each a function of a history."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Rules, Violation

__all__ = ["liveness"]

_ENDED = frozenset({"success", "fatal_failure", "cancelled", "dropped", "dead"})
_SET_BACK = "wall_back"  # the fault of a wall clock

Found = Iterator[Violation]


def liveness(lives: Lives, rules: Rules) -> list[Violation]:
    """What breaks L1-L7. L1, L2 and L4 hold from the moment at which the faults are over."""
    found: list[Violation] = []
    if lives.over_at is not None and rules.start_within is not None:
        room = _Room(lives)
        found += _l1_granted_soon(lives, rules, room, rules.start_within)
        found += _l2_taken_back(lives, rules, room, rules.start_within)
    found += _l2_claims_no_more(lives, rules)
    if lives.over_at is not None:
        found += _l4_converges(lives)
    if rules.lost_claim is not None:
        found += _l4_no_leak(lives, rules, rules.lost_claim)
    if rules.outage is not None:
        found += _l3_outage(lives, rules, rules.outage)
    found += _l5_no_zombie(lives, rules)
    found += _l5_whole_runtime(lives, rules)
    if rules.fresh is not None:
        found += _l7_progress(lives, rules, rules.fresh)
    if rules.restarts_extend:
        found += _l6_restart(lives, rules)
    return found


class _Room:
    """When which worker had a free slot, and nothing held it up."""

    def __init__(self, lives: Lives) -> None:
        changes: dict[str, list[tuple[float, int]]] = {}
        for lease in lives.leases:
            for begin in lease.started:
                stop = next((one.at for one in lease.stopped if one.who == begin.who and one.at >= begin.at), math.inf)
                changes.setdefault(begin.who, []).extend([(begin.at, 1), (stop, -1)])
        self._free: list[tuple[frozenset[str], float, float]] = []
        for who, process in lives.processes.items():
            began = process.began
            if began is None or began.role != "worker":
                continue
            until = min(process.drains_at, lives.last_at if process.ended is None else process.ended.at)
            stood = [change for since, to in process.stood for change in ((since, began.slots), (to, -began.slots))]
            kinds = frozenset(began.kinds)
            self._free += [
                (kinds, since, to)
                for since, to in _below(began.slots, [*changes.get(who, ()), *stood], began.at, until)
            ]

    def throughout(self, kind: str, since: float, until: float) -> bool:
        """Whether one and the same worker could have begun a task of this kind during all of that time."""
        return any(begin <= since and until <= end and (not kinds or kind in kinds) for kinds, begin, end in self._free)


def _below(
    slots: int, changes: Iterable[tuple[float, int]], since: float, until: float
) -> Iterator[tuple[float, float]]:
    """The stretches in which fewer than all slots were taken."""
    taken, free_since = 0, since
    for at, change in sorted(changes):
        if at > until:
            break
        if taken < slots <= taken + change:
            yield free_since, at
        elif taken + change < slots <= taken:
            free_since = at
        taken += change
    if taken < slots:
        yield free_since, until


def _l1_granted_soon(lives: Lives, rules: Rules, room: _Room, within: float) -> Found:
    """A task that is ready is granted soon, where a worker has room for it."""
    assert lives.over_at is not None  # noqa: S101 - the caller has looked
    stood = _service_clock_stood(lives)
    for life in lives.tasks.values():
        if not life.asked or not life.is_durable or life.cancel_asked or (life.known[:1] and life.known[0].fence > 1):
            continue
        ready_at = max(life.acknowledged[0].at, _surely_due_at(life, lives, stood), lives.over_at)
        yield from _must_start("L1", life, None, ready_at, lives, room, within)


def _service_clock_stood(lives: Lives) -> list[tuple[float, float]]:
    """When the clock of the service need not have gone on, by time: its wall clock may have been set back.

    It stands with a machine that is frozen, and after a restart it goes on from when the last task had come in.
    """
    servers = lives.servers
    stood = [one for server in servers for one in server.frozen]
    for before, after in pairwise(servers):
        if before.ended is None or before.began is None or after.began is None:
            continue
        came_in = [
            life.asked[0].at
            for life in lives.tasks.values()
            if life.asked and life.acknowledged and life.acknowledged[0].at <= before.ended.at
        ]
        stood.append((max(came_in, default=before.began.at), after.began.at))
    return sorted(stood)


def _surely_due_at(life: Life, lives: Lives, stood: Iterable[tuple[float, float]]) -> float:
    """When its time has come by the clock of the service too, at the latest; never: nobody can tell."""
    asked, heard_at = life.asked[0], life.acknowledged[0].at
    if asked.due_at is None:
        return -math.inf
    # The service may never have seen the wall clock by which this time was chosen.
    if any(fault.name == _SET_BACK and asked.at <= fault.at <= heard_at for fault in lives.faults):
        return math.inf
    due_at = asked.due_at
    for begin, end in stood:
        if end > asked.at and begin < due_at:
            due_at += end - begin
    return due_at


def _l2_taken_back(lives: Lives, rules: Rules, room: _Room, within: float) -> Found:
    """The task of a holder that is gone is ready after its ttl, or at once where the holder could give it back."""
    assert lives.over_at is not None  # noqa: S101 - the caller has looked
    for life in lives.tasks.values():
        for lease in life.known:
            process = lives.processes.get(lease.holder)
            if process is None or process.ended is None:
                continue
            # Who reported an end may have asked for a wait with it, heard or not.
            if any(one.verdict == "settled" for one in lease.settle_answered) or any(
                not end.expired for end in lease.closed
            ):
                continue
            ready_at = process.ended.at
            # Who asked for something may not have been heard, and who had lost it had nothing to give back.
            if process.ended.how == "killed" or lease.lost or lease.refused or lease.settle_asked:
                ready_at = max(ready_at, _surely_over_at(lease, lives, rules))
            yield from _must_start("L2", life, lease, max(ready_at, lives.over_at), lives, room, within)


def _l2_claims_no_more(lives: Lives, rules: Rules) -> Found:
    """Who was asked to end gives back, and takes nothing more."""
    for lease in lives.leases:
        for grant in lease.granted:
            process = lives.processes.get(grant.who)
            if process is not None and grant.asked_at > process.drains_at + rules.jitter:
                why = f"it was claimed {grant.asked_at - process.drains_at:.1f} s after its worker was asked to end"
                yield Violation(rule="L2", task=lease.task, why=why, events=[grant])


def _surely_over_at(lease: Lease, lives: Lives, rules: Rules) -> float:
    """When the service has noticed that it ran out, at the latest; a restart gives it its ttl anew."""
    until = lease.at_most_until(rules.drift)
    longest = lives.of(lease.task).longest_ttl * (1 + rules.drift)
    extended = longest * (1 + rules.spread)
    holder = lives.processes.get(lease.holder)
    if longest > lease.ttl * (1 + rules.drift) and holder is not None and holder.ended is not None:
        until = max(until, holder.ended.at + longest)  # its last beat may have granted more than it had heard of
    stood_still = 0.0  # clocks of servers that were frozen as a whole
    for server in lives.servers:
        if server.began is not None and server.began.at > lease.asked_at:
            until = max(until, server.began.at + extended)
        stood_still += sum(end - begin for begin, end in server.frozen if end > lease.asked_at)
    return until + stood_still + rules.regrant_delay + rules.sweep


def _must_start(
    rule: str, life: Life, after: Lease | None, ready_at: float, lives: Lives, room: _Room, within: float
) -> Found:
    fence = after.fence if after is not None else 0
    later = [lease for lease in life.known if lease.fence > fence]
    if after is not None and (life.final is None or (life.final.fence == fence and life.final.status in _ENDED)):
        return
    started_at = later[0].grant.at if later else math.inf
    if min(started_at, lives.last_at) - ready_at <= within:
        return
    if life.asked and room.throughout(life.asked[0].kind, ready_at, ready_at + within):
        why = f"it was ready, a worker had room, and nobody got it within {within:g} s"
        events: list[log.Event] = [
            *life.acknowledged[:1],
            *([after.grant] if after else ()),
            *(x.grant for x in later[:1]),
        ]
        yield Violation(rule=rule, task=life.task, why=why, events=events)


def _l3_outage(lives: Lives, rules: Rules, outage: float) -> Found:
    """No lease is lost for less trouble than the outage that it survives."""
    for lease in lives.leases:
        for lost in lease.lost:
            if lost.reason not in ("expired", "strikes") or any(one.at <= lost.at for one in lease.refused):
                continue
            since = max(
                [beat.asked_at for beat in lease.renewed if beat.at <= lost.at], default=lease.granted[0].asked_at
            )
            stretches = list(_stretches(lives, lost.who, since, lost.at, rules.bridge))
            if len(stretches) > 1:
                continue
            trouble = sum(end - begin for begin, end in stretches)
            if trouble < outage - rules.jitter:
                why = f"fence {lease.fence} was lost for {trouble:.1f} s of trouble: {outage:.1f} are to be survived"
                yield Violation(rule="L3", task=lease.task, why=why, events=[lease.grant, *lease.renewed[-1:], lost])


def _stretches(lives: Lives, who: str, since: float, until: float, bridge: float) -> Iterator[tuple[float, float]]:
    """When something was wrong for this process, or for all; what is near to one another counts as one."""
    process = lives.process(who)
    wrong = [
        (fault.at, fault.at + fault.lasts)
        for fault in lives.faults
        if fault.target in ("", who) and fault.at < until and fault.at + fault.lasts >= since
    ]
    wrong += [(begin, end) for begin, end in process.stood if begin < until and end >= since]
    begin = end = -math.inf
    for fault_at, over_at in sorted(wrong):
        if fault_at > end + bridge:
            if end > -math.inf:
                yield begin, end
            begin, end = fault_at, over_at
        end = max(end, over_at)
    if end > -math.inf:
        yield begin, end


def _l4_converges(lives: Lives) -> Found:
    """Once all is well, every task comes to its end."""
    for life in lives.tasks.values():
        if life.final is not None and life.final.status not in _ENDED:
            why = f"it stands as {life.final.status} after everything was drained"
            yield Violation(rule="L4", task=life.task, why=why, events=[*life.acknowledged[:1], life.final])


def _l4_no_leak(lives: Lives, rules: Rules, outage: float) -> Found:
    """A lost answer to a claim costs a repeat, never a ttl: what it was granted does not run out unheard of."""
    for lease in lives.leases:
        process = lives.processes.get(lease.grant.holder) if isinstance(lease.grant, log.Issued) else None
        ran_out = next((end for end in lease.closed if end.expired), None)
        if process is None or ran_out is None or lease.granted:
            continue
        if min(process.drains_at, process.ended.at if process.ended else math.inf) <= ran_out.at:
            continue
        stretches = list(_stretches(lives, process.who, lease.grant.at - 2 * outage, ran_out.at, rules.bridge))
        if len(stretches) <= 1 and sum(end - begin for begin, end in stretches) < outage:
            why = f"fence {lease.fence} was granted to {process.who}, who never heard of it, and ran out"
            yield Violation(rule="L4", task=lease.task, why=why, events=[lease.grant, ran_out])


def _l5_no_zombie(lives: Lives, rules: Rules) -> Found:
    """Heartbeats alone keep no body for ever: its runtime ends, and so does its idleness."""
    for life in lives.tasks.values():
        longest = life.asked[0].max_runtime if life.asked else None
        for lease in life.known:
            if not lease.started:
                continue
            body = lease.started[0]
            if lives.was_frozen(body.who, lease.asked_at, math.inf):
                continue
            # It ends with the lease, which is not renewed any more: one ttl later, or a little more after a restart.
            spare = life.longest_ttl * (1 + rules.spread) * (1 + rules.drift) + rules.jitter
            if longest is not None:
                last = max([one.at for one in lease.effects], default=body.at)
                allowed = _runs_until(lease, longest, spare, lives, rules)
                if last > allowed:
                    why = f"its body ran for {last - body.at:.1f} s: {longest:g} were allowed"
                    yield Violation(
                        rule="L5", task=life.task, why=why, events=[*life.asked[:1], body, lease.effects[-1]]
                    )
            if body.idle_timeout is not None:
                yield from _idle(life.task, lease, body, body.idle_timeout * (1 + rules.drift) + spare)


def _l5_whole_runtime(lives: Lives, rules: Rules) -> Found:
    """No beat of a live lease is refused before the runtime is over, whatever clocks show and restarts do."""
    for life in lives.tasks.values():
        longest = life.asked[0].max_runtime if life.asked else None
        for lease in life.known if longest is not None else []:
            over_at = lease.started[0].at + (longest or 0.0) * (1 - rules.drift) if lease.started else math.inf
            grants: list[log.Issued | log.Extended] = [*lease.issued, *lease.extended]
            for one in lease.served:
                if one.what != "beat" or one.verdict != "gone" or one.at >= over_at:
                    continue
                until = max([it.at + it.ttl * (1 - rules.drift) for it in grants if it.at <= one.at], default=0.0)
                if one.at < until - rules.jitter and not any(end.at <= one.at for end in lease.closed):
                    why = f"a beat was refused {over_at - one.at:.1f} s before its runtime of {longest:g} s was over"
                    yield Violation(rule="L5", task=life.task, why=why, events=[lease.started[0], one])


def _runs_until(lease: Lease, longest: float, spare: float, lives: Lives, rules: Rules) -> float:
    """When its body must have ended that may run for so long.

    That counts from the first beat that told the service of it, by a clock that stands while the service is frozen. A
    start of the service's machine, of which the service knows no clock, adds the time since it last wrote.
    """
    began_at = lease.started[0].at
    since = min([one.at for one in lease.renewed if one.asked_at >= began_at], default=began_at)
    stood_still = sum(end - begin for server in lives.servers for begin, end in server.frozen if end > began_at)
    until = since + longest * (1 + rules.drift) + stood_still + spare
    for down in (one for one in lives.faults if one.name == "server_reboot" and one.at > began_at):
        until += (down.lasts or 0.0) + spare if down.at <= until else 0.0
    return _restarted(lives, began_at, until, spare)


def _restarted(lives: Lives, since: float, until: float, spare: float) -> float:
    """`until`, or later by what restarts of the service in between have extended the lease."""
    for server in lives.servers:
        if server.began is not None and since <= server.began.at <= until:
            until = max(until, server.began.at + spare)
    return until


def _idle(task: str, lease: Lease, body: log.Started, allowed: float) -> Found:
    moved_at = body.at
    for effect in lease.effects:
        if effect.at - moved_at > allowed:
            why = f"its body had reported no progress for {effect.at - moved_at:.1f} s, and went on"
            yield Violation(rule="L5", task=task, why=why, events=[body, effect])
            return
        if effect.progress:
            moved_at = effect.at


def _l6_restart(lives: Lives, rules: Rules) -> Found:
    """A restart of the service ends no lease: whoever could not beat meanwhile gets a whole ttl."""
    servers = lives.servers
    starts = sorted(one.began.at for one in servers if one.began is not None)
    stops = sorted(one.ended.at for one in servers if one.ended is not None)
    pairs = [(stop, next((start for start in starts if start >= stop), None)) for stop in stops]
    for life in lives.tasks.values():
        for lease, after in pairwise(life.known):
            for stop, start in pairs:
                if start is None or not lease.grant.at <= stop < lease.surely_until(rules.drift):
                    continue
                until = start + lease.ttl * (1 - rules.drift)
                ended = any(ask.at <= after.grant.at for ask in lease.settle_asked)
                ended = ended or any(not end.expired and end.at <= after.grant.at for end in lease.closed)
                if start < after.grant.at < until and not ended and not _holder_ended(lives, lease, after.grant.at):
                    why = f"a restart took fence {lease.fence} from its holder {until - after.grant.at:.1f} s too early"
                    yield Violation(rule="L6", task=life.task, why=why, events=[lease.grant, after.grant])


def _l7_progress(lives: Lives, rules: Rules, fresh: float) -> Found:
    """The next holder begins where the last one was, but for what that reported in its last moments.

    What the service has acknowledged it keeps, whatever comes late. Progress is taken to grow.
    """
    for life in lives.tasks.values():
        for lease, after in pairwise(life.known):
            if not after.granted or not after.started:  # an ended claim is told its tasks without progress
                continue
            ended = lives.process(lease.holder).ended if lease.holder else None
            ends = [after.grant.at, *(one.at for one in (*lease.lost, *lease.refused, *lease.closed))]
            by = min(*ends, math.inf if ended is None else ended.at) - fresh
            reports = [one for one in lease.effects if one.reported is not None and one.at <= by]
            report = next((one for one in reversed(reports) if _was_calm(lives, one, fresh, lease, rules)), None)
            got = after.granted[0].progress
            told = max((one for one in lease.renewed if one.progress is not None), key=_progress, default=None)
            if told is not None and after.fence == lease.fence + 1 and (got is None or got < _progress(told)):
                why = f"fence {after.fence} was given progress {got}: {told.progress} had been acknowledged"
                yield Violation(rule="L7", task=life.task, why=why, events=[lease.grant, told, after.granted[0]])
            if report is not None and report.reported is not None and (got is None or got < report.reported):
                why = f"fence {after.fence} was given progress {got}: {report.reported} was reported long before"
                yield Violation(rule="L7", task=life.task, why=why, events=[lease.grant, report, after.granted[0]])


def _progress(beat: log.Renewed) -> float:
    return -math.inf if beat.progress is None else beat.progress


def _was_calm(lives: Lives, report: log.Effect, fresh: float, lease: Lease, rules: Rules) -> bool:
    """Nothing was wrong when it was reported, nor so shortly before that the holder was still catching up.

    A lease whose tries of one cycle have all failed is tried again in the next, which begins within its ttl.
    """
    since = report.at - max(2 * (rules.outage or 0.0), lease.ttl)
    return not any(_stretches(lives, report.who, since, report.at + fresh, rules.bridge))


def _holder_ended(lives: Lives, lease: Lease, by: float) -> bool:
    ended = lives.process(lease.holder).ended if lease.holder else None
    return not lease.holder or (ended is not None and ended.at <= by)
