"""Breaks on the side of the service: claims, heartbeats, results, the consumer, the frontend, the clock."""

from collections.abc import Sequence

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Mutant

__all__ = ["SERVICE"]


SERVICE: Sequence[Mutant] = (
    # Tokens and fences ----------------------------------------------------------------------------------------------
    Mutant(
        name="beat-without-token",
        breaks="Any token renews a lease, also one that has expired and whose task another holds.",
        edits=[
            Edit(
                "leasekit.server.roles.hsc:_judged",
                "is_held(row, beat.token, now)",
                "is_held(row, row.token or '', now)",
            )
        ],
        under="fencing",
        killed_by=["S3", "S8"],
    ),
    Mutant(
        name="gone-is-not-final",
        breaks="A lease of which it was said that it had ended gets more time with all others, and is renewed.",
        edits=[Edit("leasekit.server.roles.hsc:heartbeat", "_keep_ended(...)", "pass")],
        under="revivals",
        killed_by=["S8"],
        seeds=12,
    ),
    Mutant(
        name="result-without-token",
        breaks="Any token settles a lease.",
        edits=[Edit("leasekit.server.roles.hsc:_Desk.settle", "row.token != settlement.token", "row.token is None")],
        under="fencing",
        killed_by=["S3", "S4", "S7"],
    ),
    Mutant(
        name="fence-not-bumped",
        breaks="Every grant of a task has the same fence.",
        edits=[Edit("leasekit._lifecycle.transitions:grant", "row.fence + 1", "max(1, row.fence)")],
        under="deaths",
        killed_by=["S1"],
    ),
    Mutant(
        name="gone-told-as-renewed",
        breaks="A beat of a lease that is over is answered as if it were not.",
        edits=[
            Edit(
                "leasekit.server.roles.hsc:heartbeat",
                "past.gone(beats[at].id, ...)",
                'Verdict(id=beats[at].id, verdict="renewed")',
            )
        ],
        under="fencing",
        killed_by=["S3", "S8"],
    ),
    Mutant(
        name="expired-revived",
        breaks="A beat revives a lease that has run out, as long as nobody else got the task.",
        edits=[
            Edit("leasekit.server.roles.hsc:_judged", "is_held(row, beat.token, now)", "is_latest(row, beat.token)")
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
                "leasekit.server.roles.consumer:reap",
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
                "leasekit.server.roles.consumer:reap",
                "turn.tx.expired(now=turn.instant, limit=limit)",
                "turn.tx.expired(now=-1.0, limit=limit)",
            )
        ],
        under="deaths",
        killed_by=["L2", "L4"],
    ),
    Mutant(
        name="beat-shortens-the-lease",
        breaks="A beat brings the end nearer that the claim granted, and that its holder goes by.",
        edits=[Edit("leasekit._lifecycle.transitions:renewed", "max(until, ...)", "until")],
        under="unheard",
        killed_by=["S2", "S6"],
    ),
    Mutant(
        name="rebased-to-the-beats-ttl",
        breaks="After a restart a lease lasts for as long as a beat grants, though a claim granted more.",
        edits=[
            Edit(
                "leasekit.server.store.memory:_MemoryTx.rebase",
                "max(row.claim_timeout, row.heartbeat_timeout)",
                "row.heartbeat_timeout",
            )
        ],
        under="unequal",
        killed_by=["S6", "L6"],
    ),
    Mutant(
        name="leases-end-by-the-wall-clock",
        breaks="Leases end earlier by what the wall clock was stepped ahead.",
        edits=[
            Edit(
                "leasekit.server.clock:StoreClock.read",
                "Moment(instant + self._gained, instant, stalled > self._stall)",
                "Moment(instant + self._gained, instant + self._gained, stalled > self._stall)",
            )
        ],
        under="clocks",
        killed_by=["S6"],
    ),
    Mutant(
        name="clock-steps-back",
        breaks="The time of the store steps back with the wall clock.",
        edits=[
            Edit(
                "leasekit.server.clock:StoreClock.read",
                "max(self._gained, self._wall() - instant)",
                "self._wall() - instant",
            )
        ],
        under="clocks",
        killed_by=["L1", "L2", "L4"],
    ),
    Mutant(
        name="not-rebased-at-the-start",
        breaks="After a restart leases end as if their holders could have beaten meanwhile.",
        edits=[
            Edit(
                "leasekit.server.commit:GroupCommit.__init__", "self._is_after_gap = True", "self._is_after_gap = False"
            )
        ],
        under="restarts",
        killed_by=["L6"],
    ),
    Mutant(
        name="never-rebased",
        breaks="Neither a restart nor a stall of the server gives leases their time anew.",
        edits=[Edit("leasekit.server.roles.consumer:rebase", "turn.tx.rebase(...)", "pass")],
        under="restarts",
        killed_by=["L6"],
    ),
    Mutant(
        name="runtime-by-the-clock-of-old",
        breaks="After a restart runs end by what the clock of the earlier process meant.",
        edits=[
            Edit(
                "leasekit.server.roles.consumer:rebase",
                "turn.tx.rebase(now=turn.instant, shift=shift)",
                "turn.tx.rebase(now=turn.instant, shift=0.0)",
            )
        ],
        under="steps",
        killed_by=["L5"],
    ),
    Mutant(
        name="runtime-unbounded",
        breaks="Beats are accepted past the longest run of a task.",
        edits=[Edit("leasekit._lifecycle.transitions:is_overdue", "return ...", "return False")],
        under="endless",
        killed_by=["L5"],
    ),
    # Repeats --------------------------------------------------------------------------------------------------------
    Mutant(
        name="result-repeat-refused",
        breaks="A result that is reported again is told to be stale.",
        edits=[Edit("leasekit.server.roles.hsc:_Desk.settle", "run.digest == digest", "run.digest == b''")],
        under="slow",
        killed_by=["S7"],
    ),
    Mutant(
        name="schedule-repeat-makes-another",
        breaks="An id that is there already is accepted once more.",
        edits=[
            Edit(
                "leasekit.server.roles.frontend:_Intake.take",
                "known = self._known[task.id]",
                "return self._add(replace(task, id=f'{task.id}-{len(self._new)}-{self._turn.now}', dedupe_key=None))\n"
                "known = self._known[task.id]",
            )
        ],
        under="schedules",
        killed_by=["S7", "queue"],
    ),
    Mutant(
        name="claim-repeat-grants-anew",
        breaks="A claim that is repeated gets other tasks than the first time.",
        edits=[Edit("leasekit.server.roles.claims:claim", "(one.is_new or turn.is_repeated) and ...", "False")],
        under="slow",
        killed_by=["S7"],
    ),
    Mutant(
        name="ended-claim-granted-later",
        breaks="A claim that was ended is granted tasks when its request arrives once more.",
        edits=[Edit("leasekit.server.roles.claims:_ended", "turn.tx.remember(...)", "pass")],
        under="leaks",
        test="tests/server/test_claims.py::test_a_claim_that_was_ended_is_granted_nothing_for_a_day_and_through_restarts",
        why_test="it takes a request that arrives after the one that ended its claim",
    ),
    Mutant(
        name="ended-claim-still-waits",
        breaks="A claim that waits is answered when it is ended, and may be granted tasks later.",
        edits=[
            Edit(
                "leasekit.server.long_poll:LongPolls.claim",
                "poll is not None and poll.asked.limit and not limit",
                "poll is not None and limit < 0",
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
                "leasekit.server.roles.frontend:_Intake.take",
                "first and first.id in self._known and ...",
                "first and first.id == task.id",
            )
        ],
        under="schedules",
        killed_by=["S11"],
    ),
    # Ends ------------------------------------------------------------------------------------------------------------
    Mutant(
        name="cancel-ignored",
        breaks="A cancelled task that waits goes on waiting.",
        edits=[
            Edit(
                "leasekit._lifecycle.transitions:cancelled",
                "return end_run(row, event, limits=NO_LIMITS, now=now)",
                "return row",
            )
        ],
        under="schedules",
        killed_by=["S11"],
    ),
    Mutant(
        name="order-forgotten",
        breaks="A running task that is to be cancelled runs again after this run.",
        edits=[Edit("leasekit._lifecycle.transitions:end_run", "row.ordered", "False")],
        under="schedules",
        killed_by=["S11"],
    ),
    Mutant(
        name="order-not-told",
        breaks="The holder of a running task does not hear that it is to be cancelled.",
        edits=[Edit("leasekit.server.roles.hsc:_judged", '"cancel" if row.ordered else None', "None")],
        under="schedules",
        test="tests/server/test_frontend.py::test_a_running_task_is_told_with_its_next_beat_and_keeps_its_lease",
        why_test="a cancel of a running task promises no moment: it is cancelled when its lease ends, at the latest",
    ),
    Mutant(
        name="attempts-unlimited",
        breaks="A task that fails is tried again past its limit.",
        edits=[
            Edit("leasekit._lifecycle.transitions:_too_many_failures", "limits.max_attempts is None or ...", "True")
        ],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="crashes-unlimited",
        breaks="A task that takes its holders with it is handed out for ever.",
        edits=[Edit("leasekit._lifecycle.transitions:_too_many_crashes", "crashes <= limits.max_crashes", "True")],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="dead-too-soon",
        breaks="The last crash that is allowed is one too many.",
        edits=[
            Edit(
                "leasekit._lifecycle.transitions:_too_many_crashes",
                "crashes <= limits.max_crashes",
                "crashes < limits.max_crashes",
            )
        ],
        under="limits",
        killed_by=["S10"],
    ),
    Mutant(
        name="successors-lost",
        breaks="What a settlement schedules along with it is not scheduled.",
        edits=[Edit("leasekit.server.roles.hsc:_Desk._record", "settlement.then", "settlement.then[:0]")],
        under="calm",
        killed_by=["queue"],
    ),
    Mutant(
        name="progress-lost",
        breaks="What the last holder left is not given to the next.",
        edits=[Edit("leasekit.server.roles.hsc:_renew", "batch.progress.save(turn.tx)", "pass")],
        under="deaths",
        killed_by=["L7"],
    ),
    Mutant(
        name="progress-unordered",
        breaks="A beat that arrives late puts old progress over newer.",
        edits=[Edit("leasekit.server.progress:Progress.save", "own >= mark", "own >= (0, 0)")],
        under="fencing",
        killed_by=["L7"],
    ),
    # Order ----------------------------------------------------------------------------------------------------------
    Mutant(
        name="priority-inverted",
        breaks="The least urgent task is handed out first.",
        edits=[
            Edit(
                "leasekit.server.due_tasks:DueTasks.take",
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
        edits=[Edit("leasekit.server.roles.frontend:_due_at", "return ...", "return now")],
        under="calm",
        killed_by=["S11"],
    ),
)
