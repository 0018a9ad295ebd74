"""Mutants of the service: claims, heartbeats, results, the consumer, the frontend, the clock."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant

_NO_FOLLOWERS = "the tasks of the simulation come from no others, and wait for none"

SERVICE: Mapping[str, Mutant] = {
    # Tokens and fences ----------------------------------------------------------------------------------------------
    "beat-without-token": Mutant(
        "Any token renews a lease, also one that has expired and whose task another holds.",
        Edit("server.roles.hsc:_judged", "is_held(row, beat.token, now)", "is_held(row, row.token or '', now)"),
        by=Histories("fencing", ["S3", "S8"]),
    ),
    "gone-is-not-final": Mutant(
        "A lease that was answered *gone* gets a new ttl after a restart, and is renewed.",
        Edit("server.roles.hsc:_renew", "_keep_ended(...)", "{}"),
        by=Histories("revivals", ["S8"], seeds=12),
    ),
    "result-without-token": Mutant(
        "Any token settles a lease.",
        Edit("server.roles.hsc:_Desk.settle", "not is_token_of(row, settlement.token)", "row.token is None"),
        by=Histories("fencing", ["S3", "S4", "S7"]),
    ),
    "fence-not-bumped": Mutant(
        "All grants of a task have the same fence.",
        Edit("_lifecycle.transitions:grant", "row.fence + 1", "max(1, row.fence)"),
        by=Histories("deaths", ["S1"]),
    ),
    "gone-told-as-renewed": Mutant(
        "A beat of an expired lease is answered *renewed*.",
        Edit("server.roles.hsc:_renew", "past.gone(beats[at].id, ...)", 'Verdict(id=beats[at].id, verdict="renewed")'),
        by=Histories("fencing", ["S3", "S8"]),
    ),
    "expired-revived": Mutant(
        "A beat renews an expired lease while its task is not granted again.",
        Edit("server.roles.hsc:_judged", "is_held(row, beat.token, now)", "is_latest(row, beat.token)"),
        test="tests/server/roles/test_hsc.py::test_a_beat_at_the_very_end_is_too_late",
        why_test="the holder trusts this lease no longer, and there is no other yet: the task only waits longer",
    ),
    # Expiry ---------------------------------------------------------------------------------------------------------
    "reaped-early": Mutant(
        "A lease is expired a minute before its ttl has passed.",
        Edit("server.roles.consumer:reap", "turn.instant", "turn.instant + 60.0"),
        by=Histories("outages", ["S6"]),
    ),
    "never-reaped": Mutant(
        "The task of a dead holder is never ready again.",
        Edit("server.roles.consumer:reap", "turn.instant", "-1.0"),
        by=Histories("deaths", ["L2", "L4"]),
    ),
    "beat-shortens-the-lease": Mutant(
        "A beat moves the end of a lease before the end that the claim granted.",
        Edit("_lifecycle.transitions:renewed", "max(until, ...)", "until"),
        by=Histories("unheard", ["S2", "S6"]),
    ),
    "restarted-for-the-beats-ttl": Mutant(
        "After a restart a lease lasts for the ttl of its beats, even if the claim granted a longer one.",
        Edit(
            "server.store.memory.leases:MemoryLeases.restart_leases",
            "max(row.claim_timeout, ...)",
            "row.heartbeat_timeout",
        ),
        by=Histories("unequal", ["S6", "L6"]),
    ),
    "leases-end-by-the-wall-clock": Mutant(
        "A step of the wall clock ahead shortens leases by as much.",
        Edit(
            "server.clock:StoreClock.read",
            "Moment(instant + self._gained, instant, is_after_gap)",
            "Moment(instant + self._gained, instant + self._gained, is_after_gap)",
        ),
        by=Histories("clocks", ["S6"]),
    ),
    "clock-steps-back": Mutant(
        "The store's time goes back with the wall clock.",
        Edit("server.clock:StoreClock.read", "max(self._gained, self._ahead)", "self._ahead"),
        by=Histories("set_back", ["L1", "L2", "L4", "S11"]),
    ),
    "leases-not-restarted-at-the-start": Mutant(
        "After a restart leases end as if they could have been renewed while the server was down.",
        Edit("server.clock:StoreClock.__init__", "self._is_after_gap = True", "self._is_after_gap = False"),
        by=Histories("restarts", ["L6"]),
    ),
    "leases-never-restarted": Mutant(
        "Leases get no new ttl after a restart or a stall of the server.",
        Edit("server.roles.consumer:restart_leases", "turn.tx.restart_leases(...)", "pass"),
        by=Histories("restarts", ["L6"]),
    ),
    "extended-by-every-restart": Mutant(
        "Every restart gives a lease its whole ttl again, though its holder was not heard since the last one.",
        Edit(
            "server.store.memory.leases:MemoryLeases.restart_leases", "row.was_extended and shift is not None", "False"
        ),
        test="tests/server/roles/test_consumer.py"
        "::test_a_lease_that_nobody_holds_ends_though_no_server_is_up_for_its_ttl[memory-0.0]",
        why_test="the faults of a history end, and with them the restarts: its leases then end too",
    ),
    "runtime-by-the-clock-of-old": Mutant(
        "After a restart the longest runtime counts by the clock of the earlier process.",
        Edit(
            "server.roles.consumer:restart_leases",
            "turn.tx.restart_leases(now=turn.instant, shift=shift)",
            "turn.tx.restart_leases(now=turn.instant, shift=0.0)",
        ),
        by=Histories("steps", ["L5"]),
    ),
    "runtime-unbounded": Mutant(
        "Beats are accepted past a task's `max_runtime`.",
        Edit("_lifecycle.transitions:is_overdue", "return ...", "return False"),
        by=Histories("endless", ["L5"]),
    ),
    # Repeats --------------------------------------------------------------------------------------------------------
    "result-repeat-refused": Mutant(
        "The repeat of a result is refused as stale.",
        Edit("server.roles.hsc:_Desk.settle", "run.digest == digest", "run.digest == b''"),
        by=Histories("slow", ["S7"]),
    ),
    "schedule-repeat-makes-another": Mutant(
        "A task whose id exists is created again.",
        Edit(
            "server.roles.frontend:_Intake.take",
            "known = self._known[task.id]",
            "return self._add(replace(task, id=f'{task.id}-{len(self._new)}-{self._turn.now}', dedupe_key=None))\n"
            "known = self._known[task.id]",
        ),
        by=Histories("schedules", ["S7", "queue"]),
    ),
    "claim-repeat-grants-anew": Mutant(
        "The repeat of a claim is granted other tasks.",
        Edit("server.roles.claims:claim", "(item.is_new or turn.is_repeated) and ...", "False"),
        by=Histories("slow", ["S7"]),
    ),
    "ended-claim-granted-later": Mutant(
        "A claim that was ended is granted tasks when its request arrives again.",
        Edit("server.roles.claims:_ended", "turn.tx.remember_claims(...)", "pass"),
        test="tests/server/roles/test_claims.py::test_a_claim_that_was_ended_is_granted_nothing_for_a_day_and_through_restarts",
        why_test="this takes a request that arrives after the one that ended its claim",
    ),
    "ended-claim-still-waits": Mutant(
        "A waiting claim is not given up when it is ended, and may be granted tasks.",
        Edit(
            "server.long_poll:LongPolls.claim",
            "poll is not None and poll.claim.limit and not limit",
            "poll is not None and limit < 0",
        ),
        test="tests/server/roles/test_claims.py::"
        "test_a_claim_that_waits_is_answered_with_nothing_when_it_is_ended_and_granted_nothing_after",
        why_test="this takes a request that arrives after the one that ended its claim",
    ),
    "dedupe-ignored": Mutant(
        "A dedupe key is ignored.",
        Edit(
            "server.roles.frontend:_Intake.take",
            "first and first.id in self._known and ...",
            "first and first.id == task.id",
        ),
        by=Histories("schedules", ["S11"]),
    ),
    # Ends ------------------------------------------------------------------------------------------------------------
    "cancel-ignored": Mutant(
        "The cancel of a waiting task is ignored.",
        Edit("_lifecycle.transitions:cancelled", "return end_run(row, event, limits=NO_LIMITS, now=now)", "return row"),
        by=Histories("schedules", ["S11"]),
    ),
    "cancel-request-forgotten": Mutant(
        "A running task whose cancel was requested runs again after this run.",
        Edit("_lifecycle.transitions:end_run", "row.cancel_requested", "False"),
        by=Histories("cancels", ["S11"]),
    ),
    "cancel-request-not-told": Mutant(
        "The holder of a running task does not hear that its cancel was requested.",
        Edit("server.roles.hsc:_judged", "row.cancel_requested", "False"),
        test="tests/server/roles/test_frontend.py::test_a_running_task_is_told_with_its_next_beat_and_keeps_its_lease",
        why_test="a cancel of a running task promises no moment: its end is when its lease ends, at the latest",
    ),
    "attempts-unlimited": Mutant(
        "A failing task is retried past its `max_attempts`.",
        Edit("_lifecycle.transitions:_why_dead_by_failures", "limits.max_attempts is None or ...", "True"),
        by=Histories("limits", ["S10"]),
    ),
    "crashes-unlimited": Mutant(
        "A task that kills its holders is granted for ever.",
        Edit("_lifecycle.transitions:_why_dead_by_crashes", "crashes <= limits.max_crashes", "True"),
        by=Histories("limits", ["S10"]),
    ),
    "dead-too-soon": Mutant(
        "A task is dead one crash too early.",
        Edit("_lifecycle.transitions:_why_dead_by_crashes", "crashes <= ...", "crashes < limits.max_crashes"),
        by=Histories("limits", ["S10"]),
    ),
    "time-outs-crash": Mutant(
        "A time-out of a task that counts its time-outs as attempts counts as a crash.",
        Edit("_lifecycle.transitions:counted_as", "limits.expiry != 'retry'", "True"),
        by=Histories("limits", ["S10"]),
    ),
    "time-out-at-once": Mutant(
        "A task that counts its time-outs as attempts runs again without the wait of its retry policy.",
        Edit("server.roles.consumer:lapse", "retry_wait(...)", "0.0"),
        test="tests/server/roles/test_consumer.py::test_an_expiry_that_counts_as_an_attempt_waits_by_the_retry_policy",
        why_test="the checker knows no retry policy: a task that waits longer may do so",
    ),
    "late-report-counts-twice": Mutant(
        "A late report leaves the attempt that its expiry counted.",
        Edit("_lifecycle.transitions:unexpired", "row.failures - 1", "row.failures"),
        test="tests/lifecycle/test_transitions.py::test_a_late_report_takes_back_what_the_expiry_counted",
        why_test="a retry whose answer was lost may be counted too, so the checker blames no task that is dead early",
    ),
    "successors-lost": Mutant(
        "The successors of a settlement are not scheduled.",
        Edit("server.roles.hsc:_Desk._end_run", "settlement.then", "settlement.then[:0]"),
        by=Histories("calm", ["queue"]),
    ),
    "progress-lost": Mutant(
        "The next holder does not get the progress of the last one.",
        Edit("server.roles.hsc:_save_beats", "batch.progress.save(...)", "pass"),
        by=Histories("deaths", ["L7"]),
    ),
    "progress-unordered": Mutant(
        "A beat that arrives late overwrites newer progress.",
        Edit("server.progress:Progress.save", "own >= mark", "own >= (0, 0)"),
        by=Histories("fencing", ["L7"]),
    ),
    # Order ----------------------------------------------------------------------------------------------------------
    "priority-inverted": Mutant(
        "The least urgent task is granted first.",
        Edit("server.kind_queue:levels", "sorted(found.items())", "sorted(found.items(), reverse=True)"),
        by=Histories("deaths", ["S11"]),
    ),
    "not-before-ignored": Mutant(
        "A task is granted before it is due.",
        Edit("server.roles.frontend:due_at", "return ...", "return now"),
        by=Histories("calm", ["S11"]),
    ),
    # Settings of kinds ----------------------------------------------------------------------------------------------
    "changed-settings-not-read": Mutant(
        "A node goes on with the settings of kinds that it has read first.",
        Edit("server.store.kind_defaults:KindDefaults.read", "last != self._change", "not self._change"),
        test="tests/server/roles/test_kinds.py::test_a_node_reads_what_has_changed_and_nothing_else",
        why_test="the tasks of the simulation have all options of their own",
    ),
    "kind-wins-over-submission": Mutant(
        "What a submission gives has no effect if its kind has settings.",
        Edit(
            "server.roles.frontend:_Intake._add",
            "effective(task, ...)",
            "self._kinds.get(task.kind) or effective(task)",
        ),
        test="tests/server/roles/test_kinds.py::test_a_task_takes_from_its_kind_what_it_does_not_say",
        why_test="the kinds of the simulation have no settings",
    ),
    "retention-of-a-kind-for-all": Mutant(
        "Tasks of all kinds go by the retention of one.",
        Edit("server.roles.retention:OldTasks.step", "group.others", "True"),
        test="tests/server/roles/test_retention.py::"
        "test_a_kind_keeps_its_tasks_for_a_shorter_or_a_longer_time_than_the_store",
        why_test="no task of the simulation is as old as that",
    ),
    # Tasks after others, and chains --------------------------------------------------------------------------------
    "follower-does-not-wait": Mutant(
        "A task can be claimed before the tasks that it was to run after have ended.",
        Edit("server.roles.following:_begun", "replace(row, next_trigger_at=AWAITING_AT)", "row"),
        test="tests/server/roles/test_following.py::test_a_diamond_is_no_circle",
        why_test=_NO_FOLLOWERS,
    ),
    "follower-of-one-of-two": Mutant(
        "A task is ready once the first of the tasks that it waits for has succeeded.",
        Edit("server.roles.following:_told", "ready.difference_update(...)", "pass"),
        test="tests/server/roles/test_following.py::test_a_diamond_is_no_circle",
        why_test=_NO_FOLLOWERS,
    ),
    "failure-keeps-followers": Mutant(
        "A task waits for ever if a task that it was to run after has failed.",
        Edit("server.roles.following:_told", "ended[name].status is not Status.SUCCESS", "False"),
        test="tests/server/roles/test_following.py::test_each_end_of_a_task_is_told_to_those_that_wait_for_it",
        why_test=_NO_FOLLOWERS,
    ),
    "later-followers-forgotten": Mutant(
        "Only the first followers of a task are told of its end.",
        Edit("server.roles.following:follow", "len(waits) > most", "False"),
        test="tests/server/roles/test_following.py::"
        "test_many_followers_are_told_in_steps_and_the_end_is_kept_until_all_know",
        why_test=_NO_FOLLOWERS,
    ),
    "untold-end-removed": Mutant(
        "A purge removes a task whose end some of its followers do not know.",
        Edit("server.roles.retention:_removed", "row.id not in untold", "True"),
        test="tests/server/roles/test_following.py::"
        "test_many_followers_are_told_in_steps_and_the_end_is_kept_until_all_know",
        why_test=_NO_FOLLOWERS,
    ),
    "circle-accepted": Mutant(
        "Tasks that wait for one another are accepted.",
        Edit("server.roles.circles:refuse", "[name for name in _circle(graph) if name in items]", "[]"),
        test="tests/server/roles/test_following.py::test_a_circle_is_refused_and_its_way_is_told",
        why_test=_NO_FOLLOWERS,
    ),
    "circle-through-older-tasks-accepted": Mutant(
        "A task is accepted that closes a circle of tasks which wait for it already.",
        Edit("server.roles.circles:refuse", "tx.awaited(items) if items and tx.has_waits() else ()", "()"),
        test="tests/server/roles/test_circles.py::test_what_closes_a_circle_is_refused_and_nothing_else_is",
        why_test=_NO_FOLLOWERS,
    ),
    "too-wide-graph-accepted": Mutant(
        "What is too much to be searched for a circle counts as one without a circle.",
        Edit("server.roles.circles:_behind", "None if waits else graph", "graph"),
        test="tests/server/http/test_http_circles.py::"
        "test_a_search_reads_ten_thousand_waits_at_most_and_more_are_refused",
        why_test=_NO_FOLLOWERS,
    ),
    "search-for-circles-without-bound": Mutant(
        "The search for a circle reads all that new tasks wait for, however much it is.",
        Edit("server.roles.circles:_behind", "room -= len(waits)", "pass"),
        test="tests/server/http/test_http_circles.py::"
        "test_a_search_reads_ten_thousand_waits_at_most_and_more_are_refused",
        why_test=_NO_FOLLOWERS,
    ),
    "circles-left-unlooked": Mutant(
        "A step that has no room to look for a circle behind a task forgets to look for it later.",
        Edit("server.roles.following:keep", "del changed[name]", "pass"),
        test="tests/server/roles/test_circles.py::"
        "test_circles_of_two_writers_are_looked_for_in_steps_that_read_so_many_waits",
        why_test=_NO_FOLLOWERS,
    ),
    "late-spawn-lives": Mutant(
        "What comes from a cancelled chain by a run that goes on is started.",
        Edit("server.roles.chains:add", "turn.tx.cancelled_chains(...)", "set()"),
        test="tests/server/roles/test_chains.py::test_what_comes_late_from_a_cancelled_chain_is_cancelled_too",
        why_test=_NO_FOLLOWERS,
    ),
}
