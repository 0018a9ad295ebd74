"""The rules of safety, S1-S11, each a function of a history."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Check, Found, Rules, Violation, violations

_ENDS = {"success": "success", "fatal": "fatal_failure", "cancelled": "cancelled"}
"""Outcomes after which a task does not run again, and the final status of each."""

_REDRIVABLE = frozenset({"dead", "fatal_failure", "dropped"})

_CANCELS = frozenset({"cancelled", "cancel_requested", "gone"})
"""Answers to a cancel after which the task does not run again."""


def safety(lives: Lives, rules: Rules) -> list[Violation]:
    of_all = (_s7_claims(lives, rules), _s11_order(lives, rules), _s11_dedupe(lives, rules))
    return [*violations(lives, rules, _OF_TASK), *chain(*of_all)]


def _s1_one_lease(life: Life, lives: Lives, rules: Rules) -> Found:
    """A task has at most one unexpired lease; every fence is greater than all before, and has one token."""
    for lease in life.known:
        grants: list[log.Issued | log.Granted] = [*lease.issued, *lease.granted]
        if len({grant.token for grant in grants}) > 1 or not _has_one_holder(lease, lives):
            yield f"fence {lease.fence} was granted twice", grants
        elif len(lease.issued) > 1:
            yield f"fence {lease.fence} was issued twice", lease.issued
    for before, after in pairwise(life.known):
        if after.grant.at < before.asked_at:
            yield f"fence {after.fence} was granted before fence {before.fence}", [before.grant, after.grant]
        if before.issued and after.issued and not any(end.at <= after.grant.at for end in before.closed):
            why = f"fence {after.fence} was granted while fence {before.fence} was held"
            yield why, [before.grant, after.grant, *before.closed]


def _has_one_holder(lease: Lease, lives: Lives) -> bool:
    """Whether one process holds the lease; a supervisor that repeats a dead worker's claim does not count."""
    for before, after in pairwise(lease.granted):
        is_dead = lives.has_ended(before.who, after.asked_at)
        if before.who != after.who and not (is_dead and after.claim and after.claim == before.claim):
            return False
    return True


def _s2_one_handler(life: Life, lives: Lives, rules: Rules) -> Found:
    """No code of an attempt runs once the next may have been granted, unless the machine was frozen."""
    for position, lease in enumerate(life.known):
        over: list[log.Event] = [later.grant for later in life.known[position + 1 : position + 2]]
        over += [start for later in life.known[position + 1 :] for start in later.started[:1]]
        over += lease.closed[:1]
        deeds: list[log.Event] = [*lease.started, *lease.effects]
        if not deeds:
            continue
        last = max(deeds, key=lambda deed: deed.at)
        ends = min(over, key=lambda end: end.at, default=None)
        if lives.was_frozen(last.who, lease.asked_at, last.at):
            continue
        if ends is not None and last.at > ends.at:
            why = f"fence {lease.fence} acted {last.at - ends.at:.3f} s after its lease was over"
            yield why, [lease.grant, ends, last]
        elif lease.started and last.at > (until := lease.at_most_until(rules.drift)):
            why = f"fence {lease.fence} acted {last.at - until:.3f} s after its ttl, when another may have been granted"
            yield why, [lease.grant, *lease.renewed[-1:], last]


def _s3_fenced(life: Life, lives: Lives, rules: Rules) -> Found:
    """Only the holder of the last fence writes."""
    if (unknown := life.leases.get(0)) is not None and not unknown.is_known:
        accepted = [answer for answer in unknown.served if answer.verdict in ("renewed", "settled")]
        if accepted:
            yield "a token that was never granted wrote", accepted
    for before, after in pairwise(life.known):
        stale: list[log.Event] = [beat for beat in before.renewed if beat.asked_at > after.grant.at]
        stale += [answer for answer in before.served if answer.verdict == "renewed" and answer.at > after.grant.at]
        for digest in {answer.digest for answer in before.settle_answered if answer.verdict == "settled"}:
            asks = [ask for ask in before.settle_asked if ask.digest == digest]
            if asks and asks[0].at > after.grant.at:
                stale.append(asks[0])
        first: dict[tuple[str, str], log.Served] = {}
        for answer in before.served:
            if answer.verdict == "settled":
                first.setdefault((answer.outcome, answer.digest), answer)
        # The repeat of the settlement that ended the lease is answered like the first one, whose answer may be lost.
        if not any(not end.expired and end.at <= after.grant.at for end in before.closed):
            stale += [answer for answer in first.values() if answer.at > after.grant.at]
        if stale:
            why = f"fence {before.fence} wrote after fence {after.fence} was granted"
            yield why, [before.grant, after.grant, *stale]


def _s4_one_outcome(life: Life, lives: Lives, rules: Rules) -> Found:
    """Each life of a task ends at most once, and is not granted afterwards; only an end is followed by another life."""
    for one, redrive in zip(life.lives, life.redriven, strict=False):
        ends = [
            end.status for lease in one.leases.values() for end in lease.closed if end.ended and end.at <= redrive.at
        ]
        if not _REDRIVABLE.issuperset(ends or ["live"]):
            yield f"it was redriven, and was {', '.join(ends or ['live'])}", [redrive]
    for number, one in enumerate(life.lives):
        yield from _s4_of_one_life(one, life.redriven[number : number + 1])


def _s4_of_one_life(life: Life, redriven: Sequence[log.Redriven]) -> Found:
    early = [lease.grant for lease in life.known for redrive in redriven if lease.grant.at > redrive.at]
    if early:
        yield "the life before a redrive was granted after it", [*redriven, *early]
    ends = [end for lease in life.leases.values() for end in lease.closed if end.ended]
    accepted = {
        (answer.fence, answer.outcome, answer.digest): answer
        for lease in life.leases.values()
        for answer in lease.settle_answered
        if answer.verdict == "settled" and answer.outcome in _ENDS
    }
    if len(ends) > 1:
        yield "it ended more than once", ends
    if len(accepted) > 1:
        yield "more than one end was accepted", list(accepted.values())
    for answer in accepted.values():
        success = next((ask for ask in life.leases[answer.fence].settle_asked if ask.outcome == "success"), None)
        if success is not None and answer.outcome == "fatal":
            yield "its result was thrown away, and a fatal failure reported instead", [success, answer]
    ended: list[log.Event] = [*ends, *accepted.values()]
    if not ended:
        return
    first = min(ended, key=lambda end: end.at)
    later: list[log.Event] = [grant for lease in life.known for grant in lease.issued if grant.at > first.at]
    later += [grant for lease in life.known if not lease.issued for grant in lease.granted if grant.asked_at > first.at]
    if later:
        yield "it was granted after its end", [first, *later]
    statuses = {_ENDS[answer.outcome] for answer in accepted.values()} | {end.status for end in ends}
    if life.final is not None and life.final.status not in statuses:
        why = f"it ended as {', '.join(sorted(statuses))}, and its final status is {life.final.status}"
        yield why, [first, life.final]


def _s5_no_loss(life: Life, lives: Lives, rules: Rules) -> Found:
    """A task whose schedule was acknowledged exists at the end."""
    if life.final is None and life.acknowledged and any(other.final is not None for other in lives.tasks.values()):
        yield "it was acknowledged, and is lost", life.acknowledged


def _s6_whole_ttl(life: Life, lives: Lives, rules: Rules) -> Found:
    """No task is granted before the ttl of its last lease has passed, unless the holder ended that lease."""
    for lease in life.known:
        held_until = lease.surely_until(rules.drift) + rules.regrant_delay
        for end in lease.closed:
            if end.expired and end.at < lease.surely_until(rules.drift):
                why = f"fence {lease.fence} expired {held_until - end.at:.3f} s before its ttl had passed"
                yield why, [lease.grant, *lease.renewed[-1:], end]
    for before, after in pairwise(life.known):
        held_until = before.surely_until(rules.drift) + rules.regrant_delay
        if after.grant.at < held_until and not _was_ended(before, after.grant.at, lives):
            why = f"fence {after.fence} was granted {held_until - after.grant.at:.3f} s too early"
            yield why, [before.grant, *before.renewed[-1:], after.grant]


def _was_ended(lease: Lease, by: float, lives: Lives) -> bool:
    """Whether the holder or its supervisor may have ended a lease by then; true where the holder is unknown."""
    if any(not end.expired and end.at <= by for end in lease.closed) or any(ask.at <= by for ask in lease.settle_asked):
        return True
    if any(answer.verdict == "settled" and answer.at <= by for answer in lease.served):
        return True
    holder = lease.holder or (lease.issued[0].holder if lease.issued else "")
    return not holder or lives.has_ended(holder, by)


def _s7_repeats(life: Life, lives: Lives, rules: Rules) -> Found:
    """A repeat is answered like the first request, and changes nothing."""
    own = [answer for answer in life.acknowledged if answer.asked == life.task and answer.created]
    if len(own) > 1:
        yield "it was created more than once", own
    keyed = {asked.task for asked in life.asked if asked.dedupe_key is not None}
    for answer in life.acknowledged:
        if (
            answer.asked != answer.task
            and answer.asked not in keyed
            and not (
                answer.asked in lives.tasks and any(it.dedupe_key is not None for it in lives.tasks[answer.asked].asked)
            )
        ):
            yield f"a schedule of {answer.asked} without a dedupe key was answered with it", [answer]
    for lease in life.leases.values():
        yield from _s7_settlements(life.task, lease)


def _s7_settlements(task: str, lease: Lease) -> Found:
    settled = {(it.outcome, it.digest): it for it in lease.settle_answered[::-1] if it.verdict == "settled"}
    served = {(it.outcome, it.digest): it for it in lease.served[::-1] if it.verdict == "settled"}
    for accepted in (settled, served):
        if len(accepted) > 1:
            yield f"fence {lease.fence} was settled in more than one way", list(accepted.values())
    for again in lease.served:
        before = served.get((again.outcome, again.digest)) if again.what == "settle" else None
        if before is not None and again.verdict == "gone" and again.at > before.at:
            yield f"a settlement of fence {lease.fence} was accepted, and its repeat refused", [before, again]
    for answer in lease.settle_answered:
        first = settled.get((answer.outcome, answer.digest))
        if first is not None and answer.verdict == "gone" and answer.asked_at > first.at:
            yield f"a settlement of fence {lease.fence} was accepted, and its repeat refused", [first, answer]


def _s7_claims(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """The repeat of a claim gets the leases of the first answer that are still held, and no others."""
    issued: dict[tuple[str, str], log.Issued] = {}
    for lease in sorted(lives.leases, key=lambda lease: lease.grant.at) if rules.claims_once else ():
        for issue in lease.issued:
            first = issued.setdefault((issue.holder, issue.claim), issue) if issue.claim else issue
            if issue.at > first.at:
                why = f"claim {issue.claim} was granted tasks, and its repeat other ones"
                yield Violation(rule="S7", task=issue.task, why=why, events=[first, issue])
    claims: dict[tuple[str, str], list[log.Granted]] = {}
    for lease in lives.leases:
        for grant in lease.granted:
            if grant.claim:
                claims.setdefault((grant.who, grant.claim), []).append(grant)
    for (_, claim), grants in claims.items():
        first_at = min(grant.at for grant in grants)
        known = {(grant.task, grant.fence) for grant in grants if grant.at == first_at}
        for grant in grants:
            if (grant.task, grant.fence) not in known:
                why = f"claim {claim} was answered, and its repeat with other tasks"
                yield Violation(rule="S7", task=grant.task, why=why, events=[grants[0], grant])


def _s8_no_revival(life: Life, lives: Lives, rules: Rules) -> Found:
    """A lease that was over or refused is never renewed again."""
    for lease in life.known:
        closed_at = min([end.at for end in lease.closed], default=math.inf)
        refused_at = [answer.at for answer in lease.refused]
        refused_at += [answer.at for answer in lease.served if answer.verdict == "gone" and answer.what == "beat"]
        since = min([closed_at, *refused_at])
        revived: list[log.Event] = [beat for beat in lease.renewed if beat.asked_at > since]
        revived += [answer for answer in lease.served if answer.verdict == "renewed" and answer.at > since]
        revived += [extension for extension in lease.extended if extension.at > closed_at]
        if revived:
            yield f"fence {lease.fence} was over, and was renewed", [*lease.closed, *lease.refused, *revived]


def _s9_begun_late(life: Life, lives: Lives, rules: Rules) -> Found:
    """No handler begins without a lease, or after it."""
    for lease in life.leases.values():
        for start in lease.started:
            if not lease.is_known:
                yield f"its handler began under fence {lease.fence}, which was never granted", [start]
            elif any(grant.who != start.who for grant in lease.granted):
                why = f"its handler began in {start.who}, which was not granted fence {lease.fence}"
                yield why, [lease.grant, start]
            elif start.at > lease.at_most_until(rules.drift) and not lives.was_frozen(
                start.who, lease.asked_at, start.at
            ):
                yield f"its handler began after fence {lease.fence} was over", [lease.grant, *lease.renewed[-1:], start]


def _s10_bounded(life: Life, lives: Lives, rules: Rules) -> Found:
    """In each life, attempts and crashes stay within their limits, and a task past a limit is dead."""
    for one in life.lives:
        yield from _s10_of_one_life(one)


def _retries(life: Life) -> dict[int, log.Event]:
    """The accepted reports of *retry*, by fence."""
    return {
        answer.fence: answer
        for lease in life.leases.values()
        for answer in lease.settle_answered
        if answer.verdict == "settled" and answer.outcome == "retry"
    }


def _s10_of_one_life(life: Life) -> Found:
    if len({(asked.max_attempts, asked.max_crashes, asked.expiry) for asked in life.asked}) != 1:
        return  # no schedule, or several with different limits
    limits = life.asked[0]
    expired = {end.fence: end for lease in life.leases.values() for end in lease.closed[-1:] if end.expired}
    attempts, crashes = _retries(life), expired
    if limits.expiry == "retry":
        attempts, crashes = attempts | expired, {}
    if limits.max_attempts is not None and len(attempts) > limits.max_attempts:
        yield f"{len(attempts)} attempts have failed: at most {limits.max_attempts} may", [limits, *attempts.values()]
    final = life.final
    crashed = final.crashes if final is not None else 0
    if crashed > limits.max_crashes + 1 or (final is None and len(crashes) > limits.max_crashes + 1):
        why = f"it crashed {max(crashed, len(crashes))} times: at most {limits.max_crashes} may, and one more"
        yield why, [limits, *crashes.values()]
    if final is None:
        return
    reported = sum(any(ask.outcome == "crash" for ask in lease.settle_asked) for lease in life.leases.values())
    if limits.expiry == "retry" and crashed > reported:
        yield f"it counts {crashed} crashes, {reported} of them reported: its time-outs are attempts", [limits, final]
    is_past = (limits.max_attempts is not None and len(attempts) >= limits.max_attempts) or crashed > limits.max_crashes
    if is_past and final.status not in ("dead", "cancelled", *_ENDS.values()):
        yield f"it is past its limits, and its final status is {final.status}", [limits, final]
    may_be = len(life.leases) - crashed  # a retry whose answer was lost counts too
    if final.status == "dead" and crashed <= limits.max_crashes and may_be < (limits.max_attempts or may_be + 1):
        yield "it is dead within its limits", [limits, final]


def _s11_gated(life: Life, lives: Lives, rules: Rules) -> Found:
    """A task that was cancelled or is not due is not granted."""
    for answer in life.cancel_answered:
        is_known = bool(life.acknowledged) and life.acknowledged[0].at < life.cancel_asked[0].at
        if answer.verdict not in _CANCELS or (answer.verdict == "gone" and not is_known):
            continue
        after: list[log.Event] = [
            grant
            for lease in life.known
            for grant in (lease.issued or lease.granted)
            if (grant.at if isinstance(grant, log.Issued) else grant.asked_at) > answer.at
            # A task that had ended may have been redriven since.
            and not any(one.fence < lease.fence and one.at > life.cancel_asked[0].at for one in life.redriven)
        ]
        if after:
            yield f"its cancel was answered with {answer.verdict}, and it was granted after that", [answer, *after]
            break
    if rules.due_slack is None or not life.asked or life.reschedule_asked or (due_at := life.asked[0].due_at) is None:
        return
    if life.asked[0].debounce is not None:  # see A13
        return
    early = [lease.grant for lease in life.known if lease.grant.at < due_at - rules.due_slack]
    if early:
        yield "it was granted before it was due", [*life.asked, *early]


def _s11_order(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """The most urgent task of a kind is granted first; only fresh tasks count as waiting."""
    if not rules.ordered:
        return
    waiting: dict[str, dict[str, tuple[int, float, log.Event]]] = {}
    grants: list[log.Issued | log.Granted] = []
    # Without the tasks whose schedules differ in kind or priority: which of them was stored is unknown.
    about = {
        task: life.asked[0]
        for task, life in lives.tasks.items()
        if len({(asked.kind, asked.priority) for asked in life.asked}) == 1 and life.is_simple
    }

    gated = {change.name for change in lives.gates if change.scope == "collection"}  # their tasks may be put back late
    limited = {change.kind for change in lives.kinds if change.limits_keys}  # there, tasks with keys wait for their key
    for event in lives.events:
        if grants and event.at > grants[0].at:
            yield from _overtaken(grants, waiting, about)
            grants = []
        match event:
            case log.Acknowledged(created=True) if event.task in about and about[event.task].due_at is None:
                asked = about[event.task]
                waits_for_key = asked.key is not None and asked.kind in limited
                if (
                    asked.collection not in gated
                    and not (asked.requires or asked.prefers)  # the workers that claim may lack the labels
                    and not waits_for_key
                    and not _may_be_granted(lives, lives.of(event.task), event.at)
                ):
                    waiting.setdefault(asked.kind, {})[event.task] = (asked.priority, event.at, event)
            case log.CancelAsked() | log.Closed(ended=True) if event.task in about:
                waiting.get(about[event.task].kind, {}).pop(event.task, None)
            case log.Issued():
                grants.append(event)
            case log.Granted() if not lives.sees_store:
                grants.append(event)
            case _:
                pass
    yield from _overtaken(grants, waiting, about)


def _overtaken(
    grants: Sequence[log.Issued | log.Granted],
    waiting: dict[str, dict[str, tuple[int, float, log.Event]]],
    about: dict[str, log.Asked],
) -> Iterator[Violation]:
    """Take what was granted at one moment from what waits; judge it by what still does."""
    granted = [(grant, about[grant.task]) for grant in grants if grant.task in about]
    for grant, asked in granted:
        waiting.get(asked.kind, {}).pop(grant.task, None)
    for grant, asked in granted:
        since = grant.asked_at if isinstance(grant, log.Granted) else grant.at
        for task, (priority, ready_at, event) in waiting.get(asked.kind, {}).items():
            if priority < asked.priority and ready_at < since:
                why = f"it was granted while {task}, which is more urgent, had been waiting"
                yield Violation(rule="S11", task=grant.task, why=why, events=[asked, event, grant])


def _may_be_granted(lives: Lives, life: Life, by: float) -> bool:
    known = life.known
    if not known:
        return not lives.sees_store
    return known[0].grant.at <= by or known[0].fence > 1


def _s11_dedupe(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """A kind and a dedupe key have one task at a time, within the window of the key."""
    firsts: dict[tuple[str, str], tuple[log.Asked, log.Acknowledged]] = {}  # of each key, the last task that was made
    answers = (answer for life in lives.tasks.values() for answer in life.acknowledged if answer.created)
    for answer in sorted(answers, key=lambda answer: answer.at):
        asked = next(iter(lives.of(answer.asked).asked), None)
        if asked is None or asked.dedupe_key is None:
            continue
        key = (asked.kind, asked.dedupe_key)
        if key in firsts:
            first, answered = firsts[key]
            window = first.dedupe_window
            # A window ends by the clock of due times, which follows steps forward.
            is_open = rules.due_slack is not None and answer.at < first.at + (window or 0.0) * (1 - rules.drift)
            counts = (window is None or is_open) and _keeps_its_key(lives, answered, asked, answer)
            if counts and answered.task != answer.task:
                why = f"it was created although {answered.task} has its key"
                yield Violation(rule="S11", task=answer.task, why=why, events=[first, answered, asked, answer])
                continue
        firsts[key] = (asked, answer)


def _keeps_its_key(lives: Lives, first: log.Acknowledged, asked: log.Asked, answer: log.Acknowledged) -> bool:
    """Whether a task that was made surely has its key when another is: one that ended or was begun may lose it."""
    if asked.debounce is None and asked.dedupe_scope == "kept":
        return True
    life = lives.of(first.task)
    over = [end.at for lease in life.leases.values() for end in lease.closed if end.ended]
    if asked.debounce is not None:
        over += [issued.at for lease in life.known for issued in lease.issued]
    return lives.sees_store and first.at < asked.at and not any(at <= answer.at for at in over)


_OF_TASK: Sequence[tuple[str, Check]] = (
    ("S1", _s1_one_lease), ("S2", _s2_one_handler), ("S3", _s3_fenced), ("S4", _s4_one_outcome), ("S5", _s5_no_loss),
    ("S6", _s6_whole_ttl), ("S7", _s7_repeats), ("S8", _s8_no_revival), ("S9", _s9_begun_late), ("S10", _s10_bounded),
    ("S11", _s11_gated),
)  # fmt: skip
