"""Breaks on the side of those who hold leases: keeper, cycle, watchdog, claims, outbox, controller."""

from collections.abc import Sequence

from simulation.mutants.mutant import Edit, Mutant

__all__ = ["HOLDER"]

_TERM = "leasekit/_core/term.py"
_CYCLE = "leasekit/_core/cycle.py"
_CONFIG = "leasekit/config.py"
_KEEPER = "leasekit/_driver/keeper.py"
_CLAIMS = "leasekit/_driver/claims.py"
_HOLDING = "leasekit/_driver/holding.py"
_OUTBOX = "leasekit/_driver/outbox.py"
_WATCHDOG = "leasekit/_driver/watchdog.py"
_CONTROLLER = "leasekit/worker/controller.py"
_HANDBACK = "leasekit/worker/handback.py"
_TRANSPORT = "adapters/leasekit_http/transport.py"

_TRUST = "return self.ttl * (1 - 2 * DRIFT) - self.margin"

HOLDER: Sequence[Mutant] = (
    # Trust ----------------------------------------------------------------------------------------------------------
    Mutant(
        name="beat-stamped-after-reply",
        breaks="A renewal counts from when its answer came.",
        edits=[
            Edit(
                _KEEPER,
                "        now = self._clock.now()\n        self._recorder.answered(",
                "        now = asked_at = self._clock.now()\n        self._recorder.answered(",
            )
        ],
        under="tight",
        killed_by=["S2", "S9"],
        seeds=12,
    ),
    Mutant(
        name="claim-stamped-after-reply",
        breaks="A grant counts from when the claim was answered.",
        edits=[Edit(_CLAIMS, "return claimed, asked_at", "return claimed, self._clock.now()")],
        under="short",
        killed_by=["S2", "S9"],
    ),
    Mutant(
        name="claim-retry-restamps",
        breaks="A claim that is sent again counts from the last time it was sent.",
        edits=[
            Edit(
                _CLAIMS,
                "        async def call() -> Claimed:\n",
                "        async def call() -> Claimed:\n            self._sent_at = self._clock.now()\n",
            ),
            Edit(_CLAIMS, "return claimed, asked_at", "return claimed, self._sent_at"),
        ],
        under="short",
        killed_by=["S2", "S9"],
    ),
    Mutant(
        name="waited-rounded-up",
        breaks="How long a claim had waited is taken in whole minutes.",
        edits=[Edit(_TERM, "max(0.0, waited or 0.0) * (1 - 2 * DRIFT)", "-(-(waited or 0.0) // 60) * 60")],
        under="short",
        killed_by=["S2", "S9"],
    ),
    Mutant(
        name="strikes-alone",
        breaks="A lease ends after three failed beats in a row, and by nothing else.",
        edits=[Edit(_CONFIG, _TRUST, "return self.ttl * 100")],
        under="strikes",
        killed_by=["S2"],
    ),
    Mutant(
        name="strikes-at-once",
        breaks="Three failed beats end a lease, however soon they come.",
        edits=[
            Edit(
                _TERM,
                "return not self.confirmed or asked_at - self.granted_at >= self.beats.strikes_from",
                "return True",
            )
        ],
        under="outages",
        killed_by=["L3"],
    ),
    Mutant(
        name="no-margin",
        breaks="Nothing is left between the end of trust and the end of the lease.",
        edits=[Edit(_CONFIG, _TRUST, "return self.ttl * (1 - 2 * DRIFT)")],
        under="drift",
        killed_by=["S2"],
    ),
    Mutant(
        name="drift-ignored",
        breaks="Two clocks are taken to run alike.",
        edits=[Edit(_CONFIG, _TRUST, "return self.ttl - self.margin")],
        under="exact",
        killed_by=["S2"],
    ),
    Mutant(
        name="trust-moves-back",
        breaks="An older answer that comes later shortens the trust.",
        edits=[Edit(_TERM, "self.granted_at = max(self.granted_at, asked_at)", "self.granted_at = asked_at")],
        under="slow",
        test="tests/core/test_term.py::test_trust_never_moves_back_when_answers_overtake_one_another",
        why_test="a lease is in one call at a time, so no answer overtakes another; and less trust breaks no promise",
    ),
    Mutant(
        name="lost-judged-by-the-keeper-alone",
        breaks="A body whose keeper gets no turn is not told that its lease is over.",
        edits=[
            Edit(
                _HOLDING,
                "return self.reason is not None or (self.term.confirmed and self.clock.now() >= self.term.lost_at)",
                "return self.reason is not None",
            )
        ],
        under="guard",
        test="tests/test_lease.py::test_check_judges_by_the_clock_while_the_keeper_is_stuck",
        why_test="it is the first rung of the ladder: in a guarded process the kernel's timer is the last, and holds",
    ),
    # The cycle ------------------------------------------------------------------------------------------------------
    Mutant(
        name="failed-beats-rest",
        breaks="A beat that failed is not tried again before the next cycle.",
        edits=[
            Edit(
                _CYCLE,
                "rests = term.retries > self.beats.retries_per_cycle and can_wait and term.confirmed",
                "rests = True",
            )
        ],
        under="outages",
        test="tests/core/test_cycle.py::test_a_lease_whose_trust_does_not_outlast_the_next_cycle_is_tried_on",
        why_test="bodies that report progress bring early beats, and the first that is answered ends the rest of all",
    ),
    Mutant(
        name="retry-after-unbounded",
        breaks="Beats pause for as long as a throttling service says.",
        edits=[
            Edit(_CYCLE, "wait = min(asked, self.beats.cycle / 2, left / _TRIES_AS_ASKED)", "wait = asked"),
            Edit(
                _CYCLE,
                "self._paused_until = min(max(self._paused_until, now + wait), now + left / _TRIES_AS_ASKED)",
                "self._paused_until = max(self._paused_until, now + wait)",
            ),
        ],
        under="storms",
        killed_by=["L3"],
        seeds=12,
    ),
    Mutant(
        name="throttling-is-a-strike",
        breaks="A throttled beat counts as a failed one.",
        edits=[
            Edit(
                _CYCLE,
                "                    throttled.append((term, verdict))\n",
                '                    self._failed(term, "throttled", asked_at, now, effects)\n',
            )
        ],
        under="storms",
        test="tests/core/test_cycle.py::test_throttling_is_no_strike",
        why_test="L3 counts the time in which something is wrong, and does not tell throttling from a cut line",
    ),
    Mutant(
        name="verdicts-by-position-unchecked",
        breaks="A verdict is believed whomever it names.",
        edits=[
            Edit(_KEEPER, "verdict if verdict.id == beat.id and _sensible(verdict)", "verdict if _sensible(verdict)")
        ],
        under="storms",
        test="tests/driver/test_keeper.py::test_a_verdict_that_names_another_task_is_not_believed",
        why_test="it takes a garbled order of answers to a batch in which one lease is gone: 30 histories had none",
    ),
    Mutant(
        name="news-waits-for-the-cycle",
        breaks="Progress goes with the next beat, however long that takes.",
        edits=[
            Edit(_CYCLE, "            self._news[term] = None\n        else:\n", "            pass\n        else:\n")
        ],
        under="deaths",
        killed_by=["L7"],
    ),
    # The timer ------------------------------------------------------------------------------------------------------
    Mutant(
        name="no-timer",
        breaks="The kernel is never told to end the process.",
        edits=[
            Edit(
                _WATCHDOG,
                "        at = self._ends.earliest\n",
                "        at: float | None = None\n",
            )
        ],
        under="guard",
        killed_by=["S2"],
    ),
    Mutant(
        name="timer-late",
        breaks="The kernel is told a moment after the end of trust.",
        edits=[Edit(_WATCHDOG, "self._timer.arm(at)", "self._timer.arm(at + 30.0)")],
        under="guard",
        killed_by=["S2"],
    ),
    Mutant(
        name="timer-never-earlier",
        breaks="The timer is moved to later moments only: a body that ends before all others is not guarded.",
        edits=[
            Edit(
                _WATCHDOG,
                "if at != self._armed_at:",
                "if at != self._armed_at and not (at and self._armed_at and at < self._armed_at):",
            )
        ],
        under="uneven",
        killed_by=["S2"],
        seeds=20,
    ),
    Mutant(
        name="timer-ignores-loss",
        breaks="The timer is not moved to the end of the grace of a lost lease.",
        edits=[Edit(_WATCHDOG, "                self._ends.fix(term, until)\n", "")],
        under="deaths",
        test="tests/driver/test_watchdog.py::test_the_deadline_is_that_of[a lost one, before its trust ends]",
        why_test="the timer stays where trust ends, which is what S2 rests on; a grace is a courtesy to others",
    ),
    Mutant(
        name="timer-never-moved",
        breaks="A renewal does not move the timer: the process is killed although its leases are held.",
        edits=[Edit(_WATCHDOG, "                self._ends.move(terms, until)\n", "")],
        under="guard",
        test="tests/driver/test_watchdog.py::test_it_does_not_kill[a body that was renewed]",
        why_test="no rule of a history says that a process may not be killed: its tasks crash, and run again",
    ),
    Mutant(
        name="timer-moved-by-failed-beats",
        breaks="A beat that failed moves the timer as if it had been acknowledged.",
        edits=[
            Edit(_KEEPER, "if term.granted_at == asked_at and term.place is not None]", "if term.place is not None]")
        ],
        under="unrenewed",
        killed_by=["S2"],
    ),
    Mutant(
        name="timer-stays-at-a-longer-ttl",
        breaks="The timer stays where a longer ttl ends when a beat grants a shorter one.",
        edits=[Edit(_KEEPER, "effect.term.key.watchdog.renewed([effect.term], effect.term.trusted_until)", "pass")],
        under="guard",
        test="tests/driver/test_keeper.py::test_the_timer_follows_a_ttl_that_a_beat_is_granted_shorter",
        why_test="the next beat sets it right: a process has to be stopped between the first two beats of a run",
    ),
    # Bodies ---------------------------------------------------------------------------------------------------------
    Mutant(
        name="late-start",
        breaks="A body begins although its lease is over by the clock.",
        edits=[
            Edit(
                _HOLDING,
                "    def _refuse_lost(self) -> None:\n        if self.lost:",
                "    def _refuse_lost(self) -> None:\n        if self.reason is not None:",
            )
        ],
        under="uneven",
        test="tests/driver/test_keeper.py::test_a_body_does_not_begin_when_its_lease_is_over_by_the_clock_alone",
        why_test="who begins late arms the timer in the past, or ends at its first look; where a task waits for a "
        "slot, others run whose timer ends the process sooner (that S9 is looked at shows `unconfirmed-begun`)",
    ),
    Mutant(
        name="unconfirmed-begun",
        breaks="A task is begun before the service has acknowledged that its lease is still there.",
        edits=[Edit(_CONTROLLER, "if holding.confirmed is None:", "if holding is not None:")],
        under="short",
        killed_by=["S2", "S9"],
    ),
    Mutant(
        name="settled-before-the-end",
        breaks="A task that is to be cancelled is settled when its body is told, not when it has ended.",
        edits=[
            Edit(
                _KEEPER,
                "        holding.tell(Cancelled)\n",
                "        holding.tell(Cancelled)\n"
                "        told = Settlement(id=holding.task.id, token=holding.task.token, outcome='cancelled')\n"
                "        self.settle(holding, Delivery(told))\n",
            )
        ],
        under="cancels",
        killed_by=["S2"],
    ),
    Mutant(
        name="released-while-it-runs",
        breaks="A worker that stops gives back what runs.",
        edits=[
            Edit(
                _HOLDING,
                "if self._takers or self.settling or not self._take(_NOBODY):",
                "if self.settling:",
            ),
            Edit(
                _CONTROLLER,
                "        for work in list(self._unconfirmed):\n            self._keeper",
                "        for work in list(self._works.values()):\n            self._keeper",
            ),
        ],
        under="deaths",
        killed_by=["S2"],
    ),
    Mutant(
        name="idle-result-accepted",
        breaks="What a body ends with is reported although its lease was lost because it was idle.",
        edits=[Edit(_HOLDING, '(None, "expired", "strikes")', '(None, "expired", "strikes", "idle")')],
        under="endless",
        test="tests/test_lease.py::test_what_an_idle_body_ends_with_after_its_lease_was_lost_is_not_reported",
        why_test="nobody else has the task by then: that a hung body has had its say is no rule of a history",
    ),
    Mutant(
        name="idle-never-told",
        breaks="A body that reports no progress is beaten for ever.",
        edits=[
            Edit(
                _HOLDING, "self.idle_at = self.clock.now() + self.idle_timeout", "self.idle_at = self.clock.now() + 1e6"
            )
        ],
        under="endless",
        killed_by=["L5"],
    ),
    # Claims and reports ---------------------------------------------------------------------------------------------
    Mutant(
        name="claim-retry-under-a-new-id",
        breaks="A claim whose answer was lost is sent again as another claim.",
        edits=[
            Edit(
                _CLAIMS,
                "ask = partial(self._backend.claim, kinds, limit=limit, claim_id=claim_id)\n",
                "claim = partial(self._backend.claim, kinds)\n"
                "        new = lambda: f'{self._chance.getrandbits(128):032x}'\n"
                "        ask = lambda wait, limit=limit: claim(wait=wait, limit=limit, claim_id=new())\n",
            )
        ],
        under="leaks",
        test="tests/driver/test_claims.py::test_the_wait_of_a_long_poll_is_not_taken_from_the_time_for_repeats",
        why_test="L4 shows it in one history of some thirty: the answer that is lost has to have tasks in it",
    ),
    Mutant(
        name="first-failed-claim-is-the-last",
        breaks="A claim that fails for good ends all claiming.",
        edits=[
            Edit(
                _CONTROLLER,
                "            self._not_before = now + self._backoff.wait()\n            return\n",
                "            self._not_before = math.inf\n            return\n",
            )
        ],
        under="outages",
        killed_by=["L1", "L2", "L4"],
    ),
    Mutant(
        name="outbox-drops-the-unanswered",
        breaks="A result whose report failed is not reported again.",
        edits=[Edit(_OUTBOX, "        self._pending.extend(batch)\n", "")],
        under="outages",
        killed_by=["L4"],
        seeds=20,
    ),
    Mutant(
        name="works-on-after-the-stop",
        breaks="A worker that was asked to stop claims on.",
        edits=[
            Edit(
                _CONTROLLER, "self._claim is None and not self._stopping and now >=", "self._claim is None and now >="
            ),
            Edit(_CONTROLLER, "if self._stopping or handler is None:", "if handler is None:"),
        ],
        under="stops",
        killed_by=["L2"],
    ),
    Mutant(
        name="late-claim-kept-when-cancelled",
        breaks="A claim that is cancelled as its answer comes keeps its tasks.",
        edits=[Edit(_CLAIMS, "                self._release(waiting.result())\n", "                pass\n")],
        under="leaks",
        test="tests/driver/test_claims.py::test_a_claim_that_is_cancelled_as_its_answer_comes_gives_back_its_tasks",
        why_test="the answer has to come in the very turn of the loop in which the claim ends",
    ),
    Mutant(
        name="late-claim-kept-when-closed",
        breaks="A claim whose client is closed as its answer comes keeps its tasks.",
        edits=[Edit(_CLAIMS, "            self._release(claimed)\n", "")],
        under="leaks",
        test="tests/driver/test_claims.py::test_a_claim_whose_client_is_closed_as_its_answer_comes_gives_back_its_tasks",
        why_test="the answer has to come in the very turn of the loop in which the claim ends",
    ),
    Mutant(
        name="late-claim-ended-and-kept",
        breaks="A claim that was given up is ended, and keeps the tasks of that answer.",
        edits=[Edit(_CLAIMS, "            self._release(await ask())\n", "            await ask()\n")],
        under="leaks",
        test="tests/driver/test_claims.py::test_a_claim_that_is_given_up_is_ended_and_gives_back_its_tasks",
        why_test="a worker that stops seldom has a claim that is granted at this moment",
    ),
    Mutant(
        name="late-claim-not-ended",
        breaks="A claim that was given up is not ended.",
        edits=[
            Edit(
                _CLAIMS,
                "spawn(self._give_back(lambda: call_once(end, within=_SPARE), noted), self._returning)",
                "pass",
            )
        ],
        under="leaks",
        test="tests/driver/test_claims.py::test_a_claim_that_is_given_up_is_ended_and_gives_back_its_tasks",
        why_test="a worker that stops seldom has a claim that is granted at this moment",
    ),
    Mutant(
        name="dead-workers-claim-not-ended",
        breaks="What a dead worker's claim was granted is asked for, and the claim goes on.",
        edits=[Edit(_HANDBACK, "limit=0, wait=0", "limit=1, wait=0")],
        under="leaks",
        test="tests/worker/test_handback.py::test_a_claim_that_arrives_after_it_was_handed_back_is_granted_nothing",
        why_test="no worker of a history has a supervisor that asks for its claims",
    ),
    Mutant(
        name="late-claim-not-awaited",
        breaks="What a call brings after its claim was given up is kept, where the service remembers no claims.",
        edits=[
            Edit(
                _CLAIMS,
                "                    spawn(self._give_back(lambda: asking), self._returning)\n",
                "                    pass\n",
            )
        ],
        under="leaks",
        test="tests/driver/test_claims.py::test_a_claim_that_no_service_remembers_gives_back_its_tasks_when_its_own_answer_comes",
        why_test="the simulated service remembers claims",
    ),
    # Answers of somebody else ---------------------------------------------------------------------------------------
    Mutant(
        name="foreign-answer-refuses",
        breaks="Whatever is answered with a status of 4xx counts as a refusal of what was sent.",
        edits=[Edit(_TRANSPORT, "    return ProtocolError(says)\n", "    return Refused(says)\n")],
        under="strangers",
        killed_by=["S4"],
    ),
)
