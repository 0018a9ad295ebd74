"""Breaks on the side of the service: claims, heartbeats, results, the consumer, the frontend, the clock."""

from collections.abc import Sequence

from simulation.mutants.mutant import Edit, Mutant

__all__ = ["SERVICE"]

_CLAIMS = "leasekit/server/claims.py"
_CLOCK = "leasekit/server/clock.py"
_COMMIT = "leasekit/server/commit.py"
_CONSUMER = "leasekit/server/consumer.py"
_ENDINGS = "leasekit/server/transitions.py"
_FRONTEND = "leasekit/server/frontend.py"
_HSC = "leasekit/server/hsc.py"
_MEMORY = "leasekit/server/store/memory.py"
_PROGRESS = "leasekit/server/progress.py"
_STOCK = "leasekit/server/due_tasks.py"
_STORE = "leasekit/server/store/__init__.py"
_WAITING = "leasekit/server/long_poll.py"

SERVICE: Sequence[Mutant] = (
    # Tokens and fences ----------------------------------------------------------------------------------------------
    Mutant(
        name="beat-without-token",
        breaks="Any token renews a lease, also one that has expired and whose task another holds.",
        edits=[Edit(_HSC, "return row.token == token and row.status in LEASED", "return row.status in LEASED")],
        under="fencing",
        killed_by=["S3", "S8"],
    ),
    Mutant(
        name="gone-is-not-final",
        breaks="A lease of which it was said that it had ended gets more time with all others, and is renewed.",
        edits=[Edit(_HSC, "        _keep_ended(turn, list(ended.values()))\n", "        pass\n")],
        under="revivals",
        killed_by=["S8"],
        seeds=12,
    ),
    Mutant(
        name="result-without-token",
        breaks="Any token settles a lease.",
        edits=[
            Edit(
                _HSC,
                "if row is None or row.token != settlement.token:\n            run",
                "if row is None or row.token is None:\n            run",
            )
        ],
        under="fencing",
        killed_by=["S3", "S4", "S7"],
    ),
    Mutant(
        name="fence-not-bumped",
        breaks="Every grant of a task has the same fence.",
        edits=[Edit(_CLAIMS, "fence=row.fence + 1,", "fence=max(1, row.fence),")],
        under="deaths",
        killed_by=["S1"],
    ),
    Mutant(
        name="gone-told-as-renewed",
        breaks="A beat of a lease that is over is answered as if it were not.",
        edits=[
            Edit(
                _HSC,
                "verdicts[at] = past.gone(beats[at].id, rows.get(beats[at].id), beats[at].token)",
                'verdicts[at] = Verdict(id=beats[at].id, verdict="renewed")',
            )
        ],
        under="fencing",
        killed_by=["S3", "S8"],
    ),
    Mutant(
        name="expired-revived",
        breaks="A beat revives a lease that has run out, as long as nobody else got the task.",
        edits=[
            Edit(
                _HSC,
                "return _is_latest(row, token) and row.next_trigger_at is not None and row.next_trigger_at > now",
                "return _is_latest(row, token)",
            )
        ],
        under="fencing",
        test="tests/server/test_hsc.py::test_a_beat_at_the_very_end_is_too_late",
        why_test="its holder does not believe in it any more, and nobody else does yet: the task only waits longer",
    ),
    # Expiry ---------------------------------------------------------------------------------------------------------
    Mutant(
        name="reaped-early",
        breaks="A lease is taken back a minute before it ends.",
        edits=[
            Edit(
                _CONSUMER,
                "turn.tx.expired(now=turn.instant, limit=limit)",
                "turn.tx.expired(now=turn.instant + 60.0, limit=limit)",
            )
        ],
        under="outages",
        killed_by=["S6"],
    ),
    Mutant(
        name="never-reaped",
        breaks="The task of a holder that is gone stays his.",
        edits=[
            Edit(
                _CONSUMER,
                "expired = turn.tx.expired(now=turn.instant, limit=limit)",
                "expired = turn.tx.expired(now=-1.0, limit=limit)",
            )
        ],
        under="deaths",
        killed_by=["L2", "L4"],
    ),
    Mutant(
        name="beat-shortens-the-lease",
        breaks="A beat brings the end nearer that the claim granted, and that its holder goes by.",
        edits=[Edit(_STORE, "next_trigger_at=max(until, row.next_trigger_at or until)", "next_trigger_at=until")],
        under="unheard",
        killed_by=["S2", "S6"],
    ),
    Mutant(
        name="rebased-to-the-beats-ttl",
        breaks="After a restart a lease lasts for as long as a beat grants, though a claim granted more.",
        edits=[Edit(_MEMORY, "max(row.claim_timeout, row.heartbeat_timeout)", "row.heartbeat_timeout")],
        under="unequal",
        killed_by=["S6", "L6"],
    ),
    Mutant(
        name="leases-end-by-the-wall-clock",
        breaks="Leases end earlier by what the wall clock was stepped ahead.",
        edits=[
            Edit(
                _CLOCK,
                "return Moment(instant + self._gained, instant,",
                "return Moment(instant + self._gained, instant + self._gained,",
            )
        ],
        under="clocks",
        killed_by=["S6"],
    ),
    Mutant(
        name="clock-steps-back",
        breaks="The time of the store steps back with the wall clock.",
        edits=[Edit(_CLOCK, "max(self._gained, self._wall() - instant)", "self._wall() - instant")],
        under="clocks",
        killed_by=["L1", "L2", "L4"],
    ),
    Mutant(
        name="not-rebased-at-the-start",
        breaks="After a restart leases end as if their holders could have beaten meanwhile.",
        edits=[Edit(_COMMIT, "self._is_after_gap = True", "self._is_after_gap = False")],
        under="restarts",
        killed_by=["L6"],
    ),
    Mutant(
        name="never-rebased",
        breaks="Neither a restart nor a stall of the server gives leases their time anew.",
        edits=[Edit(_CONSUMER, "    turn.tx.rebase(now=turn.instant, shift=shift)\n", "    return\n")],
        under="restarts",
        killed_by=["L6"],
    ),
    Mutant(
        name="runtime-by-the-clock-of-old",
        breaks="After a restart runs end by what the clock of the earlier process meant.",
        edits=[Edit(_CONSUMER, "rebase(now=turn.instant, shift=shift)", "rebase(now=turn.instant, shift=0.0)")],
        under="steps",
        killed_by=["L5"],
    ),
    Mutant(
        name="runtime-unbounded",
        breaks="Beats are accepted past the longest run of a task.",
        edits=[Edit(_HSC, "return row.run_until is not None and row.run_until <= now", "return False")],
        under="endless",
        killed_by=["L5"],
    ),
    # Repeats --------------------------------------------------------------------------------------------------------
    Mutant(
        name="result-repeat-refused",
        breaks="A result that is reported again is told to be stale.",
        edits=[Edit(_HSC, "if run is not None and run.digest == digest:", "if run is not None and run.digest == b'':")],
        under="slow",
        killed_by=["S7"],
    ),
    Mutant(
        name="schedule-repeat-makes-another",
        breaks="An id that is there already is accepted once more.",
        edits=[
            Edit(
                _FRONTEND,
                "            known = self._known[task.id]\n",
                "            other = f'{task.id}-{len(self._new)}-{self._turn.now}'\n"
                "            return self._add(replace(task, id=other, dedupe_key=None))\n"
                "            known = self._known[task.id]\n",
            )
        ],
        under="schedules",
        killed_by=["S7", "queue"],
    ),
    Mutant(
        name="claim-repeat-grants-anew",
        breaks="A claim that is repeated gets other tasks than the first time.",
        edits=[
            Edit(
                _CLAIMS,
                "if (one.is_new or turn.is_repeated) and not one.is_gone])",
                "if False])",
            )
        ],
        under="slow",
        killed_by=["S7"],
    ),
    Mutant(
        name="ended-claim-granted-later",
        breaks="A claim that was ended is granted tasks when its request arrives once more.",
        edits=[
            Edit(
                _CLAIMS,
                "    turn.tx.remember([ClaimMemory(one.worker, one.claim_id, turn.now, 0.0, ()) for one in asked])\n",
                "",
            )
        ],
        under="leaks",
        test="tests/server/test_claims.py::test_a_claim_that_was_ended_is_granted_nothing_for_a_day_and_through_restarts",
        why_test="it takes a request that arrives after the one that ended its claim",
    ),
    Mutant(
        name="ended-claim-still-waits",
        breaks="A claim that waits is answered when it is ended, and may be granted tasks later.",
        edits=[
            Edit(
                _WAITING,
                "if poll is not None and poll.asked.limit and not limit:",
                "if poll is not None and limit < 0:",
            )
        ],
        under="leaks",
        test="tests/server/test_claims.py::"
        "test_a_claim_that_waits_is_answered_with_nothing_when_it_is_ended_and_granted_nothing_after",
        why_test="it takes a request that arrives after the one that ended its claim",
    ),
    Mutant(
        name="dedupe-ignored",
        breaks="A dedupe key keeps nobody out.",
        edits=[
            Edit(
                _FRONTEND,
                "if first and first.id in self._known and (first.until is None or first.until > self._turn.now):",
                "if first and first.id == task.id:",
            )
        ],
        under="schedules",
        killed_by=["S11"],
    ),
    # Ends ------------------------------------------------------------------------------------------------------------
    Mutant(
        name="cancel-ignored",
        breaks="A cancelled task that waits goes on waiting.",
        edits=[Edit(_FRONTEND, "return end_run(row, event, limits=NO_LIMITS, now=now)", "return row")],
        under="schedules",
        killed_by=["S11"],
    ),
    Mutant(
        name="order-forgotten",
        breaks="A running task that is to be cancelled runs again after this run.",
        edits=[Edit(_ENDINGS, "        if row.ordered:\n", "        if row.ordered and row.kind is None:\n")],
        under="schedules",
        killed_by=["S11"],
    ),
    Mutant(
        name="order-not-told",
        breaks="The holder of a running task does not hear that it is to be cancelled.",
        edits=[Edit(_HSC, '"cancel" if row.ordered else None', "None")],
        under="schedules",
        test="tests/server/test_frontend.py::test_a_running_task_is_told_with_its_next_beat_and_keeps_its_lease",
        why_test="a cancel of a running task promises no moment: it is cancelled when its lease ends, at the latest",
    ),
    Mutant(
        name="attempts-unlimited",
        breaks="A task that fails is tried again past its limit.",
        edits=[
            Edit(_ENDINGS, "if limits.max_attempts is None or failures < limits.max_attempts:", "if failures >= 0:")
        ],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="crashes-unlimited",
        breaks="A task that takes its holders with it is handed out for ever.",
        edits=[Edit(_ENDINGS, "if crashes <= limits.max_crashes:", "if crashes >= 0:")],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="dead-too-soon",
        breaks="The last crash that is allowed is one too many.",
        edits=[Edit(_ENDINGS, "if crashes <= limits.max_crashes:", "if crashes < limits.max_crashes:")],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="successors-lost",
        breaks="What a settlement schedules along with it is not scheduled.",
        edits=[Edit(_HSC, "enumerate(settlement.then):", "enumerate(settlement.then[:0]):")],
        under="calm",
        killed_by=["queue"],
    ),
    Mutant(
        name="progress-lost",
        breaks="What the last holder left is not given to the next.",
        edits=[Edit(_HSC, "    progress.save(turn.tx)\n", "")],
        under="deaths",
        killed_by=["L7"],
    ),
    Mutant(
        name="progress-unordered",
        breaks="A beat that arrives late puts old progress over newer.",
        edits=[Edit(_PROGRESS, "if own >= mark:", "if own >= (0, 0):")],
        under="fencing",
        killed_by=["L7"],
    ),
    # Order ----------------------------------------------------------------------------------------------------------
    Mutant(
        name="priority-inverted",
        breaks="The least urgent task is handed out first.",
        edits=[
            Edit(
                _STOCK,
                "readers.sort(key=lambda reader: reader.priority)",
                "readers.sort(key=lambda reader: -reader.priority)",
            )
        ],
        under="deaths",
        killed_by=["S11"],
    ),
    Mutant(
        name="not-before-ignored",
        breaks="A task is handed out before it is due.",
        edits=[
            Edit(
                _FRONTEND,
                "return now if task.at is None else min(max(task.at.timestamp(), 0.0), _LAST_MOMENT)",
                "return now",
            )
        ],
        under="calm",
        killed_by=["S11"],
    ),
)
