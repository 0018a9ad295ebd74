"""Mutants of what holds leases: keeper, cycle, watchdog, claims, outbox, controller."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant

HOLDER: Mapping[str, Mutant] = {
    # Trust ----------------------------------------------------------------------------------------------------------
    "beat-stamped-after-reply": Mutant(
        "Trust counts from the answer to a beat.",
        Edit(
            "_driver.keeping.renewal:Renewal._beat",
            "lost = cycle.answered(send, verdicts, asked_at=asked_at, now=now)",
            "asked_at = now\nlost = cycle.answered(send, verdicts, asked_at=asked_at, now=now)",
        ),
        test="tests/driver/keeping/test_keeper.py"
        "::test_trust_counts_from_when_a_beat_was_sent_however_late_its_answer_comes",
        why_test="a history has to lose all later heartbeats on their way, and keep a slot free for the next holder",
    ),
    "claim-stamped-after-reply": Mutant(
        "Trust counts from the answer to a claim.",
        Edit("_driver.keeping.pending_claims:Claims._claim", "claimed, asked_at", "claimed, self._context.clock.now()"),
        by=Histories("short", ["S2", "S9"]),
    ),
    "claim-retry-restamps": Mutant(
        "Trust counts from the last time that a repeated claim was sent.",
        Edit(
            "_driver.keeping.pending_claims:Claims._claim_until_answered.ask",
            "tries += 1",
            "tries += 1\nself._sent_at = self._context.clock.now()",
        ),
        Edit("_driver.keeping.pending_claims:Claims._claim", "claimed, asked_at", "claimed, self._sent_at"),
        by=Histories("repeats", ["S2", "S9"]),
    ),
    "waited-rounded-up": Mutant(
        "The time for which a claim has waited is rounded up to whole minutes.",
        Edit("_core.term:granted_at", "max(0.0, waited or 0.0) * ...", "-(-(waited or 0.0) // 60) * 60"),
        by=Histories("short", ["S2", "S9"]),
    ),
    "strikes-alone": Mutant(
        "Only three failed beats in a row end a lease.",
        Edit("config:Heartbeats.trust", "return ...", "return self.ttl * 100"),
        by=Histories("strikes", ["S2"]),
    ),
    "strikes-at-once": Mutant(
        "Three failed beats end a lease, however soon they come.",
        Edit("_core.term:Term.failed", "asked_at - since >= ...", "True"),
        by=Histories("outages", ["L3"]),
    ),
    "unconfirmed-judged-by-its-age": Mutant(
        "Three failed beats end a lease that came late, although it may have been granted just now.",
        Edit("_core.term:Term.failed", "self.granted_at if self.confirmed else self.failing_from", "self.granted_at"),
        test="tests/core/test_term.py::test_an_unconfirmed_lease_that_may_be_over_survives_the_outage_that_others_survive",
        why_test="L3 counts from when the claim was sent: where its answer came so late, the faults were as long",
    ),
    "no-margin": Mutant(
        "Nothing is left between the end of trust and the end of the lease.",
        Edit("config:Heartbeats.trust", "return ...", "return self.ttl * (1 - 2 * DRIFT)"),
        by=Histories("drift", ["S2"]),
    ),
    "drift-ignored": Mutant(
        "Clocks are taken to have no drift.",
        Edit("config:Heartbeats.trust", "return ...", "return self.ttl - self.margin"),
        by=Histories("exact", ["S2"], seeds=20),
    ),
    "trust-moves-back": Mutant(
        "An older answer that comes later shortens trust.",
        Edit("_core.term:Term.renewed", "max(self.granted_at, asked_at)", "asked_at"),
        test="tests/core/test_term.py::test_trust_never_moves_back_when_answers_overtake_one_another",
        why_test="a lease is in one call at a time, so no answer overtakes another; and less trust breaks no promise",
    ),
    "lost-judged-by-the-keeper-alone": Mutant(
        "A handler is not told that its lease is lost while its keeper gets no turn.",
        Edit("_driver.keeping.held_lease:HeldLease.lost", "return ...", "return self.reason is not None"),
        test="tests/test_lease.py::test_check_judges_by_the_clock_while_the_keeper_is_stuck",
        why_test="this check is the first guard: in a guarded process the kernel's timer is the last, and holds",
    ),
    # The cycle ------------------------------------------------------------------------------------------------------
    "failed-beats-rest": Mutant(
        "A failed beat is not retried before the next cycle.",
        Edit("_core.cycle:Cycle._failed", "self._rested if rests else self._waiting", "self._rested"),
        test="tests/core/test_cycle.py::test_a_lease_whose_trust_does_not_outlast_the_next_cycle_is_tried_on",
        why_test="progress brings early beats, and the first one that is answered ends the wait of all others",
    ),
    "retry-after-unbounded": Mutant(
        "Heartbeats pause for as long as a throttling service says.",
        Edit("_core.cycle:Cycle._throttled", "min(asked, self.heartbeats.cycle / 2, ...)", "asked"),
        Edit(
            "_core.cycle:Cycle._throttled",
            "min(max(self._paused_until, now + wait), ...)",
            "max(self._paused_until, now + wait)",
        ),
        by=Histories("storms", ["L3"], seeds=12),
    ),
    "throttling-is-a-strike": Mutant(
        "A throttled beat counts as a strike.",
        Edit("_core.cycle:Cycle.answered", '"throttled"', '"never"'),
        test="tests/core/test_cycle.py::test_throttling_is_no_strike",
        why_test="L3 counts the time in which something is wrong, and does not tell throttling from a cut line",
    ),
    "verdicts-by-position-unchecked": Mutant(
        "A verdict is believed whichever task it names.",
        Edit("_driver.keeping.renewal:Renewal._checked_verdicts", "verdict.id == beat.id", "True"),
        test="tests/driver/keeping/test_keeper.py::test_a_verdict_that_names_another_task_is_not_believed",
        why_test="this takes a garbled order of answers to a batch in which one lease is gone: 30 histories had none",
    ),
    "news-waits-for-the-cycle": Mutant(
        "New progress brings no early beat.",
        Edit("_core.cycle:Cycle.hasten", "self._news[term] = None", "pass"),
        by=Histories("deaths", ["L7"]),
    ),
    # The timer ------------------------------------------------------------------------------------------------------
    "no-timer": Mutant(
        "The kernel is never told to end the process.",
        Edit("_driver.guarding.watchdog:Watchdog._update_timer", "self._ends.earliest", "None"),
        by=Histories("guard", ["S2"]),
    ),
    "timer-late": Mutant(
        "The kernel is told to end the process too late.",
        Edit("_driver.guarding.watchdog:Watchdog._update_timer", "self._timer.arm(at)", "self._timer.arm(at + 30.0)"),
        by=Histories("guard", ["S2"]),
    ),
    "timer-never-earlier": Mutant(
        "The timer never moves to an earlier moment: a lease that ends before all others is not guarded.",
        Edit(
            "_driver.guarding.watchdog:Watchdog._update_timer",
            "at != self._armed_at",
            "at != self._armed_at and not (at and self._armed_at and at < self._armed_at)",
        ),
        by=Histories("uneven", ["S2"], seeds=20),
    ),
    "timer-ignores-loss": Mutant(
        "The timer does not move to the end of the grace of a lost lease.",
        Edit("_driver.guarding.watchdog:Watchdog.lost", "self._ends.fix(...)", "None"),
        test="tests/driver/guarding/test_watchdog.py::test_the_deadline_is_that_of[a lost one, before its trust ends]",
        why_test="the timer stays at the end of trust, which is enough for S2; the grace only spares other handlers",
    ),
    "timer-left-unnoted": Mutant(
        "The ledger shows a handler that has ended as one that the timer guards.",
        Edit("_driver.keeping.held_lease:HeldLease.unguard", "ledger.ends(...)", "pass"),
        test="tests/driver/guarding/test_guarded_in_ledger.py::test_no_lease_is_shown_as_guarded_that_the_timer_has_left[False-ends]",
        why_test="the simulated supervisor reads no ledger, and the simulated service refuses stale writes",
    ),
    "timer-never-moved": Mutant(
        "A renewal does not move the timer: the process is killed although its leases are held.",
        Edit("_driver.guarding.watchdog:Watchdog.renewed", "self._ends.move(...)", "None"),
        test="tests/driver/guarding/test_watchdog.py::test_it_does_not_kill[a body that was renewed]",
        why_test="no rule forbids to kill a process: its tasks crash, and run again",
    ),
    "timer-moved-by-failed-beats": Mutant(
        "A failed beat moves the timer like an acknowledged one.",
        Edit("_driver.keeping.renewal:Renewal._beat", "term.granted_at == asked_at and ...", "term.place is not None"),
        by=Histories("unrenewed", ["S2"]),
    ),
    "timer-stays-at-a-longer-ttl": Mutant(
        "The timer does not move when a beat grants a shorter ttl.",
        Edit("_driver.keeping.renewal:Renewal._regrant", "held.watchdog.renewed(...)", "pass"),
        test="tests/driver/keeping/test_keeper.py::test_the_timer_follows_a_ttl_that_a_beat_is_granted_shorter",
        why_test="the next beat repairs this: a process would have to be stopped between the first two beats of a run",
    ),
    # Handlers -------------------------------------------------------------------------------------------------------
    "late-start": Mutant(
        "A handler begins although its lease is over by the clock.",
        Edit("_driver.keeping.held_lease:HeldLease._refuse_lost", "self.lost", "self.reason is not None"),
        test="tests/driver/keeping/test_keeper.py::test_a_body_does_not_begin_when_its_lease_is_over_by_the_clock_alone",
        why_test="a late handler arms the timer in the past, or ends at its first check; where a task waits for a "
        "slot, the timer of others ends the process sooner (`unconfirmed-begun` shows that S9 is checked)",
    ),
    "unconfirmed-begun": Mutant(
        "A task is begun before the first acknowledged beat where trust requires one.",
        Edit("_worker.controller:Controller._deliver", "held.confirmed is None", "held is not None"),
        by=Histories("short", ["S2", "S9"]),
    ),
    "settled-before-the-end": Mutant(
        "A cancelled task is settled when its handler is told, not when the handler has ended.",
        Edit(
            "_driver.keeping.keeper:Keeper._cancel_requested",
            "held.tell(Cancelled)",
            "held.tell(Cancelled)\n"
            "self.settle(held, Delivery(Settlement(id=held.task.id, token=held.task.token, outcome='cancelled')))",
        ),
        by=Histories("cancels", ["S2"]),
    ),
    "released-while-it-runs": Mutant(
        "A worker that stops releases tasks whose handlers run.",
        Edit("_driver.keeping.held_lease:HeldLease.withdraw", "self._takers or self.settling or ...", "self.settling"),
        Edit("_worker.controller:Controller.stop", "self._unconfirmed", "self._works.values()"),
        by=Histories("deaths", ["S2"]),
    ),
    "idle-result-accepted": Mutant(
        "A result is reported although the lease was lost by the idle timeout.",
        Edit(
            "_driver.keeping.held_lease:HeldLease.reportable",
            "(None, ...)",
            '(None, "expired", "strikes", "overdue", "idle")',
        ),
        test="tests/test_lease.py::test_what_an_idle_body_ends_with_after_its_lease_was_lost_is_not_reported",
        why_test="no other run has the task by then, and no rule forbids the result of a hung handler",
    ),
    "idle-never-told": Mutant(
        "A handler that reports no progress keeps its lease for ever.",
        Edit("_driver.keeping.held_lease:HeldLease.touch", "self.clock.now() + ...", "self.clock.now() + 1e6"),
        by=Histories("endless", ["L5"]),
    ),
    "runtime-by-regular-beats": Mutant(
        "The end of a task's `max_runtime` brings no heartbeat.",
        Edit("_driver.keeping.renewal:Renewal._limit", "self._limited[held] = None", "pass"),
        by=Histories("endless", ["L5"]),
    ),
    "cancel-hint-ignored": Mutant(
        "A hint of a cancel request brings no heartbeat.",
        Edit("_driver.keeping.keeper:Keeper._hear_cancels", "self._renewal.hasten(held)", "pass"),
        test="tests/test_lease.py"
        "::test_code_that_reports_nothing_hears_of_a_cancel_without_waiting_for_its_next_heartbeat",
        why_test="the next regular heartbeat tells of the request too, and no rule says how soon it must come",
    ),
    # Claims and reports ---------------------------------------------------------------------------------------------
    "claim-retry-under-a-new-id": Mutant(
        "The repeat of a claim whose answer was lost has a new id.",
        Edit(
            "_driver.keeping.pending_claims:Claims._claim_until_answered.ask",
            "call(claim.claim_id) if remembered else ...",
            "call(f'{self._context.chance.getrandbits(128):032x}')",
        ),
        test="tests/driver/keeping/test_pending_claims.py::test_the_wait_of_a_long_poll_is_not_taken_from_the_time_for_repeats",
        why_test="L4 shows this in one history of some thirty: the lost answer has to have tasks in it",
    ),
    "first-failed-claim-is-the-last": Mutant(
        "A claim that fails for good is the worker's last.",
        Edit("_worker.controller:Controller._take_answer", "now + self._backoff.wait()", "math.inf"),
        by=Histories("outages", ["L1", "L2", "L4"]),
    ),
    "outbox-drops-the-unanswered": Mutant(
        "A settlement whose report failed is not reported again.",
        Edit("_driver.reporting.outbox:Outbox._put_back", "self._pending.extend(batch)", "pass"),
        by=Histories("outages", ["L4"], seeds=20),
    ),
    "works-on-after-the-stop": Mutant(
        "A worker that was asked to stop goes on claiming.",
        Edit(
            "_worker.controller:Controller._once",
            "self._stopping or not self._can_keep_more(now)",
            "not self._can_keep_more(now)",
        ),
        Edit("_worker.controller:Controller._deliver", "self._stopping or handler is None", "handler is None"),
        by=Histories("stops", ["L2"]),
    ),
    "late-claim-kept-when-cancelled": Mutant(
        "A claim that is cancelled as its answer comes keeps its tasks.",
        Edit("_driver.keeping.pending_claims:Claims._claim", "self._release(waiting.result().tasks)", "pass"),
        test="tests/driver/keeping/test_pending_claims.py::test_a_claim_that_is_cancelled_as_its_answer_comes_gives_back_its_tasks",
        why_test="the answer has to come in the very turn of the loop in which the claim ends",
    ),
    "late-claim-kept-when-closed": Mutant(
        "A claim whose client is closed as its answer comes keeps its tasks.",
        Edit("_driver.keeping.pending_claims:Claims._claim", "self._release(claimed.tasks)", "pass"),
        test="tests/driver/keeping/test_pending_claims.py::test_a_claim_whose_client_is_closed_as_its_answer_comes_gives_back_its_tasks",
        why_test="the answer has to come in the very turn of the loop in which the claim ends",
    ),
    "late-claim-ended-and-kept": Mutant(
        "A claim that was given up is ended, and keeps the tasks of that answer.",
        Edit("_driver.keeping.pending_claims:Claims._end.give_back", "self._release(ended.tasks)", "pass"),
        test="tests/driver/keeping/test_pending_claims.py::test_a_claim_that_is_given_up_is_ended_and_gives_back_its_tasks",
        why_test="a worker that stops seldom has a claim that is granted at this moment",
    ),
    "late-claim-not-ended": Mutant(
        "A claim that was given up is not ended.",
        Edit("_driver.keeping.pending_claims:Claims._end", "spawn(...)", "pass"),
        test="tests/driver/keeping/test_pending_claims.py::test_a_claim_that_is_given_up_is_ended_and_gives_back_its_tasks",
        why_test="a worker that stops seldom has a claim that is granted at this moment",
    ),
    "dead-workers-claim-not-ended": Mutant(
        "The supervisor asks for the tasks of a dead worker's claim, and does not end the claim.",
        Edit(
            "_worker.handback:_end_claim_in_time.end",
            "partial(backend.claim, kinds, limit=0, wait=0, claim_id=claim.claim_id)",
            "partial(backend.claim, kinds, limit=1, wait=0, claim_id=claim.claim_id)",
        ),
        test="tests/worker/test_handback.py::test_a_claim_that_arrives_after_it_was_handed_back_is_granted_nothing",
        why_test="no worker of a history has a supervisor that asks for its claims",
    ),
    "late-claim-not-awaited": Mutant(
        "Tasks that arrive after their claim was given up are kept, where the service remembers no claims.",
        Edit("_driver.keeping.pending_claims:Claims._ask_once", "spawn(...)", "pass"),
        test="tests/driver/keeping/test_pending_claims.py::test_a_claim_that_no_service_remembers_gives_back_its_tasks_when_its_own_answer_comes",
        why_test="the simulated service remembers claims",
    ),
    # Answers of other services --------------------------------------------------------------------------------------
    "foreign-answer-refuses": Mutant(
        "Each answer with a status of 4xx counts as the service's refusal.",
        Edit("leasekit_http.transport:failure", "ProtocolError(says)", "Refused(says)"),
        by=Histories("strangers", ["S4"]),
    ),
}
