"""The rules of safety, S1-S11, each a function of a history."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Rules, Violation

__all__ = ["safety"]

_ENDS = {"success": "success", "fatal": "fatal_failure", "cancelled": "cancelled"}
"""Outcomes after which a task does not run again, and the status that it has then."""

_CANCELS = frozenset({"cancelled", "ordered", "gone"})
"""Answers to a cancel after which the task does not run again: what is none of these says nothing."""

Found = Iterator[Violation]


def safety(lives: Lives, rules: Rules) -> list[Violation]:
    """What breaks S1-S11."""
    found: list[Violation] = []
    for life in lives.tasks.values():
        for of_task in _OF_TASK:
            found += of_task(life, lives, rules)
    for of_all in (_s7_claims, _s11_order, _s11_dedupe):
        found += of_all(lives, rules)
    return found


def _s1_one_lease(life: Life, lives: Lives, rules: Rules) -> Found:
    """At most one unexpired lease; every fence is greater than all before, and stands for one token."""
    for lease in life.known:
        grants: list[log.Issued | log.Granted] = [*lease.issued, *lease.granted]
        if len({grant.token for grant in grants}) > 1 or not _has_one_holder(lease, lives):
            yield Violation(rule="S1", task=life.task, why=f"fence {lease.fence} was granted twice", events=grants)
        elif len(lease.issued) > 1:
            why = f"fence {lease.fence} was issued twice"
            yield Violation(rule="S1", task=life.task, why=why, events=lease.issued)
    for before, after in pairwise(life.known):
        if after.grant.at < before.asked_at:
            why = f"fence {after.fence} was granted before fence {before.fence}"
            yield Violation(rule="S1", task=life.task, why=why, events=[before.grant, after.grant])
        if before.issued and after.issued and not any(end.at <= after.grant.at for end in before.closed):
            why = f"fence {after.fence} was granted while fence {before.fence} was held"
            yield Violation(rule="S1", task=life.task, why=why, events=[before.grant, after.grant, *before.closed])


def _has_one_holder(lease: Lease, lives: Lives) -> bool:
    """Whoever asks for a dead process' claim again, to give back what it was granted, is no second holder."""
    for before, after in pairwise(lease.granted):
        ended = lives.process(before.who).ended
        is_dead = ended is not None and ended.at <= after.asked_at
        if before.who != after.who and not (is_dead and after.claim and after.claim == before.claim):
            return False
    return True


def _s2_one_body(life: Life, lives: Lives, rules: Rules) -> Found:
    """Nothing of an attempt runs once the next may have been granted, unless the machine was frozen."""
    for position, lease in enumerate(life.known):
        over: list[log.Event] = [grant.grant for grant in life.known[position + 1 : position + 2]]
        over += [body for later in life.known[position + 1 :] for body in later.started[:1]]
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
            yield Violation(rule="S2", task=life.task, why=why, events=[lease.grant, ends, last])
        elif lease.started and last.at > (until := lease.at_most_until(rules.drift)):
            why = f"fence {lease.fence} acted {last.at - until:.3f} s after its ttl, when another may have been granted"
            yield Violation(rule="S2", task=life.task, why=why, events=[lease.grant, *lease.renewed[-1:], last])


def _s3_fenced(life: Life, lives: Lives, rules: Rules) -> Found:
    """Only the holder of the last fence writes."""
    known = life.known
    if (unknown := life.leases.get(0)) is not None and not unknown.is_known:
        nobodys = [one for one in unknown.served if one.verdict in ("renewed", "settled")]
        if nobodys:
            yield Violation(rule="S3", task=life.task, why="a token that nobody was granted wrote", events=nobodys)
    for before, after in pairwise(known):
        stale: list[log.Event] = [beat for beat in before.renewed if beat.asked_at > after.grant.at]
        stale += [one for one in before.served if one.verdict == "renewed" and one.at > after.grant.at]
        for digest in {one.digest for one in before.settle_answered if one.verdict == "settled"}:
            asked = [one for one in before.settle_asked if one.digest == digest]
            if asked and asked[0].at > after.grant.at:
                stale.append(asked[0])
        first: dict[tuple[str, str], log.Served] = {}
        for one in before.served:
            if one.verdict == "settled":
                first.setdefault((one.outcome, one.digest), one)
        # A repeat of what had ended it is answered like the first, whose answer may not have been seen by anybody.
        if not any(not end.expired and end.at <= after.grant.at for end in before.closed):
            stale += [one for one in first.values() if one.at > after.grant.at]
        if stale:
            why = f"fence {before.fence} wrote after fence {after.fence} was granted"
            yield Violation(rule="S3", task=life.task, why=why, events=[before.grant, after.grant, *stale])


def _s4_one_outcome(life: Life, lives: Lives, rules: Rules) -> Found:
    """At most one end, and nothing after it."""
    ends = [end for lease in life.leases.values() for end in lease.closed if end.ended]
    told = {
        (one.fence, one.outcome, one.digest): one
        for lease in life.leases.values()
        for one in lease.settle_answered
        if one.verdict == "settled" and one.outcome in _ENDS
    }
    if len(ends) > 1:
        yield Violation(rule="S4", task=life.task, why="it ended more than once", events=ends)
    if len(told) > 1:
        yield Violation(rule="S4", task=life.task, why="more than one end was accepted", events=list(told.values()))
    for one in told.values():
        success = next((said for said in life.leases[one.fence].settle_asked if said.outcome == "success"), None)
        if success is not None and one.outcome == "fatal":
            why = "its result was thrown away, and a fatal failure reported instead"
            yield Violation(rule="S4", task=life.task, why=why, events=[success, one])
    ended: list[log.Event] = [*ends, *told.values()]
    if not ended:
        return
    first = min(ended, key=lambda end: end.at)
    later: list[log.Event] = [one for lease in life.known for one in lease.issued if one.at > first.at]
    later += [one for lease in life.known for one in lease.granted if one.asked_at > first.at and not lease.issued]
    if later:
        yield Violation(rule="S4", task=life.task, why="it was granted after its end", events=[first, *later])
    if life.final is not None:
        wanted = {_ENDS[one.outcome] for one in told.values()} | {end.status for end in ends}
        if life.final.status not in wanted:
            why = f"it ended as {', '.join(sorted(wanted))}, and stands as {life.final.status}"
            yield Violation(rule="S4", task=life.task, why=why, events=[first, life.final])


def _s5_no_loss(life: Life, lives: Lives, rules: Rules) -> Found:
    """What was acknowledged is still there at the end."""
    if life.final is None and life.acknowledged and any(one.final is not None for one in lives.tasks.values()):
        yield Violation(rule="S5", task=life.task, why="it was acknowledged, and is lost", events=life.acknowledged)


def _s6_whole_ttl(life: Life, lives: Lives, rules: Rules) -> Found:
    """Nobody gets a task before the ttl of an earlier lease has passed, unless its holder ended it."""
    for lease in life.known:
        held_until = lease.surely_until(rules.drift) + rules.regrant_delay
        for end in lease.closed:
            if end.expired and end.at < lease.surely_until(rules.drift):
                why = f"fence {lease.fence} ran out {held_until - end.at:.3f} s before its ttl had passed"
                yield Violation(rule="S6", task=life.task, why=why, events=[lease.grant, *lease.renewed[-1:], end])
    for before, after in pairwise(life.known):
        held_until = before.surely_until(rules.drift) + rules.regrant_delay
        if after.grant.at < held_until and not _was_ended(before, after.grant.at, lives):
            why = f"fence {after.fence} was granted {held_until - after.grant.at:.3f} s too early"
            yield Violation(
                rule="S6", task=life.task, why=why, events=[before.grant, *before.renewed[-1:], after.grant]
            )


def _was_ended(lease: Lease, by: float, lives: Lives) -> bool:
    """Its holder may have ended it by then, or whoever saw its holder end; or nobody knows who that was."""
    if any(not end.expired and end.at <= by for end in lease.closed) or any(one.at <= by for one in lease.settle_asked):
        return True
    if any(one.verdict == "settled" and one.at <= by for one in lease.served):
        return True
    holder = lease.holder or (lease.issued[0].holder if lease.issued else "")
    ended = lives.processes[holder].ended if holder in lives.processes else None
    return not holder or (ended is not None and ended.at <= by)


def _s7_repeats(life: Life, lives: Lives, rules: Rules) -> Found:
    """A repeat is answered like the first, and makes nothing anew."""
    own = [answer for answer in life.acknowledged if answer.asked == life.task and answer.created]
    if len(own) > 1:
        yield Violation(rule="S7", task=life.task, why="it was created more than once", events=own)
    keyed = {asked.task for asked in life.asked if asked.dedupe_key is not None}
    for answer in life.acknowledged:
        if answer.asked != answer.task and answer.asked not in keyed and not _has_key(lives, answer.asked):
            why = f"a schedule of {answer.asked} without a dedupe key was answered with it"
            yield Violation(rule="S7", task=life.task, why=why, events=[answer])
    for lease in life.leases.values():
        yield from _s7_settlements(life.task, lease)


def _has_key(lives: Lives, task: str) -> bool:
    return task in lives.tasks and any(asked.dedupe_key is not None for asked in lives.tasks[task].asked)


def _s7_settlements(task: str, lease: Lease) -> Found:
    settled = {(one.outcome, one.digest): one for one in lease.settle_answered[::-1] if one.verdict == "settled"}
    served = {(one.outcome, one.digest): one for one in lease.served[::-1] if one.verdict == "settled"}
    for accepted in (settled, served):
        if len(accepted) > 1:
            why = f"fence {lease.fence} was settled in more than one way"
            yield Violation(rule="S7", task=task, why=why, events=list(accepted.values()))
    for again in lease.served:
        before = served.get((again.outcome, again.digest)) if again.what == "settle" else None
        if before is not None and again.verdict == "gone" and again.at > before.at:
            why = f"a settlement of fence {lease.fence} was accepted, and its repeat refused"
            yield Violation(rule="S7", task=task, why=why, events=[before, again])
    for one in lease.settle_answered:
        first = settled.get((one.outcome, one.digest))
        if first is not None and one.verdict == "gone" and one.asked_at > first.at:
            why = f"a settlement of fence {lease.fence} was accepted, and its repeat refused"
            yield Violation(rule="S7", task=task, why=why, events=[first, one])


def _s7_claims(lives: Lives, rules: Rules) -> Found:
    """A claim that is repeated gets what it got, as far as that is still held, and nothing else is granted for it."""
    issued: dict[tuple[str, str], log.Issued] = {}
    for lease in sorted(lives.leases, key=lambda lease: lease.grant.at) if rules.claims_once else ():
        for one in lease.issued:
            first = issued.setdefault((one.holder, one.claim), one) if one.claim else one
            if one.at > first.at:
                why = f"claim {one.claim} was granted tasks, and its repeat other ones"
                yield Violation(rule="S7", task=one.task, why=why, events=[first, one])
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
                why = f"claim {claim} was answered, and its repeat with something else"
                yield Violation(rule="S7", task=grant.task, why=why, events=[grants[0], grant])


def _s8_no_revival(life: Life, lives: Lives, rules: Rules) -> Found:
    """A lease that was over or refused is never renewed again."""
    for lease in life.known:
        closed_at = min([end.at for end in lease.closed], default=math.inf)
        told_at = [one.at for one in lease.refused]
        told_at += [one.at for one in lease.served if one.verdict == "gone" and one.what == "beat"]
        since = min([closed_at, *told_at])
        revived: list[log.Event] = [beat for beat in lease.renewed if beat.asked_at > since]
        revived += [one for one in lease.served if one.verdict == "renewed" and one.at > since]
        revived += [more for more in lease.extended if more.at > closed_at]
        if revived:
            why = f"fence {lease.fence} was over, and renewed all the same"
            yield Violation(rule="S8", task=life.task, why=why, events=[*lease.closed, *lease.refused, *revived])


def _s9_begun_late(life: Life, lives: Lives, rules: Rules) -> Found:
    """No body begins without a lease, or after it."""
    for lease in life.leases.values():
        for body in lease.started:
            if not lease.is_known:
                why = f"its body began under fence {lease.fence}, which nobody was granted"
                yield Violation(rule="S9", task=life.task, why=why, events=[body])
            elif any(grant.who != body.who for grant in lease.granted):
                why = f"its body began in {body.who}, which was not granted fence {lease.fence}"
                yield Violation(rule="S9", task=life.task, why=why, events=[lease.grant, body])
            elif body.at > lease.at_most_until(rules.drift) and not lives.was_frozen(body.who, lease.asked_at, body.at):
                why = f"its body began after fence {lease.fence} was over"
                yield Violation(rule="S9", task=life.task, why=why, events=[lease.grant, *lease.renewed[-1:], body])


def _s10_bounded(life: Life, lives: Lives, rules: Rules) -> Found:
    """Attempts and crashes keep to their limits, and who is past them is dead."""
    if len({(asked.max_attempts, asked.max_crashes) for asked in life.asked}) != 1:
        return  # nobody scheduled it, or in more than one way
    limits = life.asked[0]
    retries = {
        one.fence: one
        for lease in life.leases.values()
        for one in lease.settle_answered
        if one.verdict == "settled" and one.outcome == "retry"
    }
    if limits.max_attempts is not None and len(retries) > limits.max_attempts:
        why = f"{len(retries)} attempts ended in retry: at most {limits.max_attempts} may"
        yield Violation(rule="S10", task=life.task, why=why, events=[limits, *retries.values()])
    final = life.final
    crashed = final.crashes if final is not None else 0
    expired = [end for lease in life.leases.values() for end in lease.closed if end.expired]
    if crashed > limits.max_crashes + 1 or (final is None and len(expired) > limits.max_crashes + 1):
        why = f"it crashed {max(crashed, len(expired))} times: at most {limits.max_crashes} may, and one more"
        yield Violation(rule="S10", task=life.task, why=why, events=[limits, *expired])
    if final is None:
        return
    is_past = (limits.max_attempts is not None and len(retries) >= limits.max_attempts) or crashed > limits.max_crashes
    if is_past and final.status not in ("dead", "cancelled", *_ENDS.values()):
        why = f"it is past its limits, and stands as {final.status}"
        yield Violation(rule="S10", task=life.task, why=why, events=[limits, final])
    may_be = len(life.leases) - crashed  # a retry whose answer was lost counts too
    if final.status == "dead" and crashed <= limits.max_crashes and may_be < (limits.max_attempts or may_be + 1):
        yield Violation(rule="S10", task=life.task, why="it is dead within its limits", events=[limits, final])


def _s11_gated(life: Life, lives: Lives, rules: Rules) -> Found:
    """What was cancelled, or is not due, is not granted."""
    for answer in life.cancel_answered:
        is_known = bool(life.acknowledged) and life.acknowledged[0].at < life.cancel_asked[0].at
        if answer.verdict not in _CANCELS or (answer.verdict == "gone" and not is_known):
            continue
        after: list[log.Event] = [
            grant
            for lease in life.known
            for grant in (lease.issued or lease.granted)
            if (grant.at if isinstance(grant, log.Issued) else grant.asked_at) > answer.at
        ]
        if after:
            why = f"its cancel was answered with {answer.verdict}, and it was granted after that"
            yield Violation(rule="S11", task=life.task, why=why, events=[answer, *after])
            break
    if rules.due_slack is None or not life.asked or (due_at := life.asked[0].due_at) is None:
        return
    early = [lease.grant for lease in life.known if lease.grant.at < due_at - rules.due_slack]
    if early:
        yield Violation(
            rule="S11", task=life.task, why="it was granted before it was due", events=[*life.asked, *early]
        )


def _s11_order(lives: Lives, rules: Rules) -> Found:
    """The most urgent first: nobody gets a less urgent task of a kind while a fresh one has been waiting."""
    if not rules.ordered:
        return
    waiting: dict[str, dict[str, tuple[int, float, log.Event]]] = {}
    grants: list[log.Issued | log.Granted] = []
    # A task that was asked for in more than one way is one of these, and nobody knows which.
    about = {
        task: life.asked[0]
        for task, life in lives.tasks.items()
        if len({(asked.kind, asked.priority) for asked in life.asked}) == 1
    }

    def judge() -> Found:
        for grant in grants:
            if grant.task in about:
                waiting.get(about[grant.task].kind, {}).pop(grant.task, None)
        for grant in grants:
            if (asked := about.get(grant.task)) is None:
                continue
            since = grant.asked_at if isinstance(grant, log.Granted) else grant.at
            for task, (priority, ready_at, event) in waiting.get(asked.kind, {}).items():
                if priority < asked.priority and ready_at < since:
                    why = f"it was granted while {task}, which is more urgent, had been waiting"
                    yield Violation(rule="S11", task=grant.task, why=why, events=[asked, event, grant])

    for event in lives.events:
        if grants and event.at > grants[0].at:
            yield from judge()
            grants = []
        match event:
            case log.Acknowledged(created=True) if event.task in about and about[event.task].due_at is None:
                if not _may_be_granted(lives, lives.of(event.task), event.at):
                    asked = about[event.task]
                    waiting.setdefault(asked.kind, {})[event.task] = (asked.priority, event.at, event)
            case log.CancelAsked() if event.task in about:
                waiting.get(about[event.task].kind, {}).pop(event.task, None)
            case log.Issued():
                grants.append(event)
            case log.Granted() if not lives.sees_store:
                grants.append(event)
            case _:
                pass
    yield from judge()


def _may_be_granted(lives: Lives, life: Life, by: float) -> bool:
    """It was granted by then, or may have been to somebody of whom nobody knows."""
    known = life.known
    if not known:
        return not lives.sees_store
    return known[0].grant.at <= by or known[0].fence > 1


def _s11_dedupe(lives: Lives, rules: Rules) -> Found:
    """One task for a kind and key, as long as the first counts."""
    firsts: dict[tuple[str, str], tuple[log.Asked, log.Acknowledged]] = {}
    answers = (answer for life in lives.tasks.values() for answer in life.acknowledged if answer.created)
    for answer in sorted(answers, key=lambda one: one.at):
        asked = next(iter(lives.of(answer.asked).asked), None)
        if asked is None or asked.dedupe_key is None:
            continue
        key = (asked.kind, asked.dedupe_key)
        if key in firsts:
            first, answered = firsts[key]
            window = first.dedupe_window
            counts = window is None or answer.at < first.at + window * (1 - rules.drift)
            if counts and answered.task != answer.task:
                why = f"it was created although {answered.task} has its key"
                yield Violation(rule="S11", task=answer.task, why=why, events=[first, answered, asked, answer])
                continue
        firsts[key] = (asked, answer)


_OF_TASK: Sequence[Callable[[Life, Lives, Rules], Found]] = (
    _s1_one_lease, _s2_one_body, _s3_fenced, _s4_one_outcome, _s5_no_loss, _s6_whole_ttl, _s7_repeats, _s8_no_revival,
    _s9_begun_late, _s10_bounded, _s11_gated,
)  # fmt: skip
