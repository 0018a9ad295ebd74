"""The rules of liveness, L1-L7, each a function of a history."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Check, Found, Rules, Violation, violations

_ENDED = frozenset({"success", "fatal_failure", "cancelled", "dropped", "dead"})
_SET_BACK = "wall_back"  # the fault of a wall clock
_REPORTED_WITHIN = 300.0  # seconds without faults, for the longest wait between two tries and a throttled one


def liveness(lives: Lives, rules: Rules) -> list[Violation]:
    """Find the violations of L1-L7. L1, L2 and L4 hold from the moment at which the faults are over."""
    checks = _CHECKS
    if lives.over_at is not None and rules.start_within is not None:
        # A change of a gate or a limit that came late holds tasks up as a fault does.
        late = [change.at for change in (*lives.gates[-1:], *lives.kinds[-1:])]
        room = _Room(lives, max([lives.over_at, *late]), rules.start_within)
        checks = (("L1", partial(_l1_granted_soon, room)), ("L2", partial(_l2_taken_back, room)), *_CHECKS)
    return violations(lives, rules, checks)


class _Room:
    """The times in which each worker ran and had a free slot; tasks that are ready start `within` seconds there."""

    def __init__(self, lives: Lives, over_at: float, within: float) -> None:
        self.over_at = over_at
        self.within = within
        self.clock_stood = _service_clock_stood(lives)
        changes: dict[str, list[tuple[float, int]]] = {}
        for lease in lives.leases:
            for begin in lease.started:
                stop = next((end.at for end in lease.stopped if end.who == begin.who and end.at >= begin.at), math.inf)
                changes.setdefault(begin.who, []).extend([(begin.at, 1), (stop, -1)])
        self._free: list[tuple[log.Began, float, float]] = []
        for who, process in lives.processes.items():
            began = process.began
            if began is None or began.role != "worker":
                continue
            until = min(process.drains_at, lives.last_at if process.ended is None else process.ended.at)
            stood = [change for since, to in process.stood for change in ((since, began.slots), (to, -began.slots))]
            self._free += [
                (began, since, to)
                for since, to in _below(began.slots, [*changes.get(who, ()), *stood], began.at, until)
            ]

    def throughout(self, task: log.Asked, since: float, until: float, *, lacks: bool) -> bool:
        """Whether a single worker could have begun this task during all of that time.

        `lacks`: also one that lacks the labels which the task prefers.
        """
        wanted = task.requires if lacks else task.requires | task.prefers
        return any(
            begin <= since and until <= end and _may_run(worker, task.kind, wanted) for worker, begin, end in self._free
        )


def _may_run(worker: log.Began, kind: str, labels: Mapping[str, str]) -> bool:
    return (not worker.kinds or kind in worker.kinds) and labels.items() <= worker.labels.items()


def _below(
    slots: int, changes: Iterable[tuple[float, int]], since: float, until: float
) -> Iterator[tuple[float, float]]:
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


def _l1_granted_soon(room: _Room, life: Life, lives: Lives, rules: Rules) -> Found:
    """A ready task is granted soon where a worker has a free slot for its kind."""
    if (
        life.asked
        and life.is_durable
        and life.is_simple
        and not life.cancel_asked
        and not (life.known and life.known[0].fence > 1)
    ):
        ready_at = max(life.acknowledged[0].at, _surely_due_at(life, lives, room.clock_stood))
        yield from _must_start(life, None, ready_at, lives, room)


def _service_clock_stood(lives: Lives) -> list[tuple[float, float]]:
    """The times in which the clock of the service may have stood still.

    The clock stands while its machine is frozen. Where the wall clock was set back, a restart continues it from the
    arrival of the last task.
    """
    servers = lives.servers
    stood = [span for server in servers for span in server.frozen]
    for before, after in pairwise(servers):
        if before.ended is None or before.began is None or after.began is None:
            continue
        arrivals = [
            life.asked[0].at
            for life in lives.tasks.values()
            if life.asked and life.acknowledged and life.acknowledged[0].at <= before.ended.at
        ]
        stood.append((max(arrivals, default=before.began.at), after.began.at))
    return sorted(stood)


def _surely_due_at(life: Life, lives: Lives, stood: Iterable[tuple[float, float]]) -> float:
    """The latest moment at which the task is due by the clock of the service; infinite: unknown."""
    asked, heard_at = life.asked[0], life.acknowledged[0].at
    if asked.due_at is None:
        return -math.inf
    # The wall clock by which `due_at` was chosen may never have been the service's.
    if any(fault.name == _SET_BACK and asked.at <= fault.at <= heard_at for fault in lives.faults):
        return math.inf
    due_at = asked.due_at
    for begin, end in stood:
        if end > asked.at and begin < due_at:
            due_at += end - begin
    return due_at


def _l2_taken_back(room: _Room, life: Life, lives: Lives, rules: Rules) -> Found:
    """The task of a dead holder is ready after the ttl, or at once where the holder could release it."""
    for lease in life.known:
        process = lives.processes.get(lease.holder)
        if process is None or process.ended is None:
            continue
        # A settlement may have asked for a delay, whether or not its answer arrived.
        is_settled = any(answer.verdict == "settled" for answer in lease.settle_answered)
        if is_settled or any(not end.expired for end in lease.closed):
            continue
        if any(ask.at >= lease.asked_at for ask in life.reschedule_asked):  # it may have been put off
            continue
        if life.asked and life.asked[0].expiry == "retry":  # it waits as its retry policy says
            continue
        ready_at = process.ended.at
        # A settlement may not have arrived, and a holder does not release what it has lost.
        if process.ended.how == "killed" or lease.lost or lease.refused or lease.settle_asked:
            ready_at = max(ready_at, _surely_over_at(lease, lives, rules))
        yield from _must_start(life, lease, ready_at, lives, room)


def _l2_claims_no_more(life: Life, lives: Lives, rules: Rules) -> Found:
    """A worker that was asked to end claims nothing more."""
    for lease in life.known:
        for grant in lease.granted:
            process = lives.processes.get(grant.who)
            if process is not None and grant.asked_at > process.drains_at + rules.jitter:
                why = f"it was claimed {grant.asked_at - process.drains_at:.1f} s after its worker was asked to end"
                yield why, [grant]


def _surely_over_at(lease: Lease, lives: Lives, rules: Rules) -> float:
    """The latest moment at which the service notices that a lease has expired; a restart renews the ttl."""
    until = lease.at_most_until(rules.drift)
    longest = lives.of(lease.task).longest_ttl * (1 + rules.drift)
    extended = longest * (1 + rules.spread)
    holder = lives.processes.get(lease.holder)
    if longest > lease.ttl * (1 + rules.drift) and holder is not None and holder.ended is not None:
        until = max(until, holder.ended.at + longest)  # the answer to its last beat, which grants more, may be lost
    stood_still = 0.0  # seconds for which the server's clock stood
    for server in lives.servers:
        if server.began is not None and server.began.at > lease.asked_at:
            until = max(until, server.began.at + extended)
        stood_still += sum(end - begin for begin, end in server.frozen if end > lease.asked_at)
    return until + stood_still + rules.regrant_delay + rules.sweep


def _must_start(life: Life, after: Lease | None, ready_at: float, lives: Lives, room: _Room) -> Found:
    within = room.within
    fence = after.fence if after is not None else 0
    later = [lease for lease in life.known if lease.fence > fence]
    if after is not None and any(end.ended for end in after.closed):
        return  # until an operator redrives the task
    if after is not None and (life.final is None or (life.final.fence == fence and life.final.status in _ENDED)):
        return
    started_at = later[0].grant.at if later else math.inf
    if after is None and 0 in life.leases:  # it may have ended before any grant
        started_at = min([started_at, *(end.at for end in life.leases[0].closed if end.ended)])
    for kept_for, lacks in ((0.0, False), (_preferred_for(life), True)):
        open_at = max(ready_at + kept_for, room.over_at)
        if min(started_at, lives.last_at) - open_at <= within:
            return
        if life.asked and room.throughout(life.asked[0], open_at, open_at + within, lacks=lacks):
            why = f"it was ready, a worker had a free slot, and it was not granted within {within:g} s"
            grants = [lease.grant for lease in (after, *later[:1]) if lease is not None]
            yield why, [*life.acknowledged[:1], *grants]
            return


def _preferred_for(life: Life) -> float:
    return max([asked.prefer_for for asked in life.asked], default=0.0)


def _l3_outage(life: Life, lives: Lives, rules: Rules) -> Found:
    """No lease is lost in faults that are shorter than the outage that it survives with the ttl granted last."""
    for lease in life.known:
        for lost in lease.lost:
            if lost.reason not in ("expired", "strikes") or any(answer.at <= lost.at for answer in lease.refused):
                continue
            beats = [beat for beat in lease.renewed if beat.at <= lost.at]
            since = max([beat.asked_at for beat in beats], default=lease.granted[0].asked_at)
            stretches = list(_stretches(lives, lost.who, since, lost.at, rules.bridge))
            if len(stretches) > 1:
                continue
            trouble = sum(end - begin for begin, end in stretches)
            outage = rules.outage(next((beat.ttl for beat in reversed(beats) if beat.ttl), lease.ttl))
            if trouble < outage - rules.jitter:
                why = f"fence {lease.fence} was lost in {trouble:.1f} s of faults: it has to survive {outage:.1f} s"
                yield why, [lease.grant, *lease.renewed[-1:], lost]


def _stretches(lives: Lives, who: str, since: float, until: float, bridge: float) -> Iterator[tuple[float, float]]:
    """The times of faults that hit this process; faults no further apart than `bridge` count as one.

    While no server runs, something is wrong for as long as that lasts, whatever the faults say: a server that does not
    come up is started again.
    """
    process = lives.process(who)
    wrong = [
        (fault.at, fault.at + fault.lasts)
        for fault in lives.faults
        if fault.target in ("", who) and fault.at < until and fault.at + fault.lasts >= since
    ]
    wrong += [(begin, end) for begin, end in (*process.stood, *lives.unserved) if begin < until and end >= since]
    begin = end = -math.inf
    for fault_at, over_at in sorted(wrong):
        if fault_at > end + bridge:
            if end > -math.inf:
                yield begin, end
            begin, end = fault_at, over_at
        end = max(end, over_at)
    if end > -math.inf:
        yield begin, end


def _l4_converges(life: Life, lives: Lives, rules: Rules) -> Found:
    """Once the faults are over, every task ends."""
    if lives.over_at is not None and life.final is not None and life.final.status not in _ENDED:
        why = f"its final status is {life.final.status} after everything was drained"
        yield why, [*life.acknowledged[:1], life.final]


def _l4_no_leak(life: Life, lives: Lives, rules: Rules) -> Found:
    """A lost answer to a claim costs a repeat, never a ttl: no lease expires without its holder knowing of it."""
    outage = rules.lost_claim or 0.0
    for lease in life.known:
        process = lives.processes.get(lease.grant.holder) if isinstance(lease.grant, log.Issued) else None
        expiry = next((end for end in lease.closed if end.expired), None)
        if process is None or expiry is None or lease.granted:
            continue
        if min(process.drains_at, process.ended.at if process.ended else math.inf) <= expiry.at:
            continue
        stretches = list(_stretches(lives, process.who, lease.grant.at - 2 * outage, expiry.at, rules.bridge))
        if len(stretches) <= 1 and sum(end - begin for begin, end in stretches) < outage:
            why = f"fence {lease.fence} was granted to {process.who}, which got no answer, and expired"
            yield why, [lease.grant, expiry]


def _l4_reported(life: Life, lives: Lives, rules: Rules) -> Found:
    """A settlement is reported until it is answered: no process without faults has one unanswered for long.

    What a process has left on disk, another one reports: an answer to it is one to both.
    """
    for lease in life.leases.values():
        for ask in lease.settle_asked:
            if ask.who not in lives.processes or any(_answers(answer, ask) for answer in lease.settle_answered):
                continue
            ended = lives.processes[ask.who].ended
            until = lives.last_at if ended is None else ended.at
            calm_since, calm = ask.at, 0.0
            for begin, end in (*_stretches(lives, ask.who, ask.at, until, rules.bridge), (until, until)):
                calm, calm_since = max(calm, begin - calm_since), max(calm_since, end)
            if calm > _REPORTED_WITHIN:
                yield f"its settlement had no answer, though nothing was wrong for {calm:.0f} s", [ask]


def _answers(answer: log.SettleAnswered, ask: log.SettleAsked) -> bool:
    return answer.who == ask.who or (answer.asked_at > ask.at and answer.digest == ask.digest)


def _l5_no_zombie(life: Life, lives: Lives, rules: Rules) -> Found:
    """Heartbeats alone keep no handler for ever: its runtime and its idle time are bounded."""
    longest = life.asked[0].max_runtime if life.asked else None
    for lease in life.known:
        if not lease.started or lives.was_frozen(lease.started[0].who, lease.asked_at, math.inf):
            continue
        start = lease.started[0]
        # The lease is not renewed any more, and ends one ttl later, or a little more after a restart.
        spare = life.longest_ttl * (1 + rules.spread) * (1 + rules.drift) + rules.jitter
        if longest is not None:
            last = max([effect.at for effect in lease.effects], default=start.at)
            if last > _runs_until(lease, longest, spare, lives, rules):
                why = f"its handler ran for {last - start.at:.1f} s: {longest:g} were allowed"
                yield why, [*life.asked[:1], start, lease.effects[-1]]
        if start.idle_timeout is not None:
            yield from _idle(lease, start, start.idle_timeout * (1 + rules.drift) + spare)


def _l5_whole_runtime(life: Life, lives: Lives, rules: Rules) -> Found:
    """No beat of a live lease is refused before the runtime is over, in spite of clock steps and restarts."""
    longest = life.asked[0].max_runtime if life.asked else None
    for lease in life.known if longest is not None else []:
        over_at = lease.started[0].at + (longest or 0.0) * (1 - rules.drift) if lease.started else math.inf
        grants: list[log.Issued | log.Extended] = [*lease.issued, *lease.extended]
        for beat in lease.served:
            if beat.what != "beat" or beat.verdict != "gone" or beat.at >= over_at:
                continue
            until = max([it.at + it.ttl * (1 - rules.drift) for it in grants if it.at <= beat.at], default=0.0)
            if beat.at < until - rules.jitter and not any(end.at <= beat.at for end in lease.closed):
                why = f"a beat was refused {over_at - beat.at:.1f} s before its runtime of {longest:g} s was over"
                yield why, [*lease.started[:1], beat]


def _l5_told_at_once(life: Life, lives: Lives, rules: Rules) -> Found:
    """A holder without faults loses the lease soon after the end of the runtime, not with its next regular beat."""
    longest = life.asked[0].max_runtime if life.asked else None
    for lease in life.known if longest is not None and rules.fresh is not None else []:
        beats = [beat for beat in lease.renewed if lease.started and beat.asked_at >= lease.started[0].at]
        if not beats:
            continue
        over_at = beats[0].at + (longest or 0.0) * (1 + rules.drift) + (rules.fresh or 0.0)
        late = next((effect for effect in lease.effects if effect.at > over_at), None)
        is_told = any(lost.at <= over_at for lost in lease.lost)
        if late and not is_told and not any(_stretches(lives, late.who, lease.asked_at, late.at, rules.bridge)):
            yield f"its runtime of {longest:g} s was over, and its holder was not told", [beats[0], late, *lease.lost]


def _runs_until(lease: Lease, longest: float, spare: float, lives: Lives, rules: Rules) -> float:
    """When a handler that may run for `longest` seconds must have ended.

    The runtime counts from the first beat after its start, by a clock that stands while the service is frozen. A reboot
    of the service's machine, during which the service has no clock, adds the time since its last write.
    """
    began_at = lease.started[0].at
    since = min([beat.at for beat in lease.renewed if beat.asked_at >= began_at], default=began_at)
    stood_still = sum(end - begin for server in lives.servers for begin, end in server.frozen if end > began_at)
    until = since + longest * (1 + rules.drift) + stood_still + spare
    for down in (fault for fault in lives.faults if fault.name == "server_reboot" and fault.at > began_at):
        until += (down.lasts or 0.0) + spare if down.at <= until else 0.0
    for server in lives.servers:  # each restart in between has extended the lease
        if server.began is not None and began_at <= server.began.at <= until:
            until = max(until, server.began.at + spare)
    return until


def _idle(lease: Lease, start: log.Started, allowed: float) -> Found:
    moved_at = start.at
    for effect in lease.effects:
        if effect.at - moved_at > allowed:
            yield f"its handler had reported no progress for {effect.at - moved_at:.1f} s, and went on", [start, effect]
            return
        if effect.progress:
            moved_at = effect.at


def _l6_restart(life: Life, lives: Lives, rules: Rules) -> Found:
    """A restart of the service ends no lease: every live one gets a whole ttl again, once until its next beat."""
    for lease, after in pairwise(life.known):
        for stop, start in lives.restarts if rules.restarts_extend else ():
            if not lease.grant.at <= stop < lease.surely_until(rules.drift):
                continue
            heard_at = max([lease.asked_at, *(beat.asked_at for beat in lease.renewed if beat.at <= stop)])
            if any(heard_at <= at <= stop for at in lives.may_extend):
                continue
            until = start + lease.ttl * (1 - rules.drift)
            ended = any(ask.at <= after.grant.at for ask in lease.settle_asked)
            ended = ended or any(not end.expired and end.at <= after.grant.at for end in lease.closed)
            ended = ended or not lease.holder or lives.has_ended(lease.holder, after.grant.at)
            if start < after.grant.at < until and not ended:
                why = f"a restart ended the lease of fence {lease.fence} {until - after.grant.at:.1f} s too early"
                yield why, [lease.grant, after.grant]


def _l7_progress(life: Life, lives: Lives, rules: Rules) -> Found:
    """The next holder gets the progress of the last one, except for reports from its last moments.

    The service keeps all acknowledged progress, whichever beats arrive late. Progress is assumed to grow.
    """
    fresh = rules.fresh
    for lease, after in pairwise(life.known):
        if fresh is None or not after.granted or not after.started:  # the answer to an ended claim has no progress
            continue
        ended = lives.process(lease.holder).ended if lease.holder else None
        ends = [after.grant.at, *(end.at for end in (*lease.lost, *lease.refused, *lease.closed))]
        by = min(*ends, math.inf if ended is None else ended.at) - fresh
        reports = [effect for effect in reversed(lease.effects) if effect.reported is not None and effect.at <= by]
        report = next((effect for effect in reports if _was_calm(lives, effect, fresh, lease, rules)), None)
        got = after.granted[0].progress
        kept = max((beat for beat in lease.renewed if beat.progress is not None), key=_progress, default=None)
        if kept is not None and after.fence == lease.fence + 1 and (got is None or got < _progress(kept)):
            why = f"fence {after.fence} was given progress {got}: {kept.progress} had been acknowledged"
            yield why, [lease.grant, kept, after.granted[0]]
        if report is not None and report.reported is not None and (got is None or got < report.reported):
            why = f"fence {after.fence} was given progress {got}: {report.reported} was reported long before"
            yield why, [lease.grant, report, after.granted[0]]


def _progress(beat: log.Renewed) -> float:
    return -math.inf if beat.progress is None else beat.progress


def _was_calm(lives: Lives, report: log.Effect, fresh: float, lease: Lease, rules: Rules) -> bool:
    """Whether no fault hit the holder at the report, nor so shortly before that beats were still late.

    A lease whose beats of one cycle have all failed is retried in the next cycle, which begins within its ttl: that of
    its heartbeats, which may be longer than that of its claim.
    """
    ttl = max([lease.ttl, *(beat.ttl or 0.0 for beat in lease.renewed)])
    since = report.at - max(2 * rules.outage(ttl), ttl)
    return not any(_stretches(lives, report.who, since, report.at + fresh, rules.bridge))


_CHECKS: Sequence[tuple[str, Check]] = (
    ("L2", _l2_claims_no_more),
    ("L3", _l3_outage),
    ("L4", _l4_converges),
    ("L4", _l4_no_leak),
    ("L4", _l4_reported),
    ("L5", _l5_no_zombie),
    ("L5", _l5_whole_runtime),
    ("L5", _l5_told_at_once),
    ("L6", _l6_restart),
    ("L7", _l7_progress),
)
