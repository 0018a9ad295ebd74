"""The leases of pool processes: the main process of a prefork worker ends those of killed pool processes.

    pool process ── notes its lease in shared memory ──▶ main process, if the pool process was killed:
                                                           Celery acknowledges the message ── settled, as failed
                                                           Celery delivers it again ───────── crashed, ready at once
                                                           it has sent a retry ────────────── released to that

What a pool process notes is in `notes.py`.
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import asyncio
import logging
import math
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from billiard.common import REMAP_SIGTERM
from billiard.einfo import ExceptionInfo
from celery import states
from celery.exceptions import Ignore, Reject, TaskPredicate, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import Request
from kombu.utils import encoding

import leasekit
from leasekit import Client, LeasekitError
from leasekit.backend import Backend
from leasekit.named import kind_of
from leasekit.registry import open_backend
from leasekit.task import Settlement
from leasekit_celery.notes import CLOCK, TOLD, Note, Notes, Stage
from leasekit_celery.task_lease import TaskLease, attempt_number, lease_name, takes_lease

logger = logging.getLogger("leasekit.celery")

REVOKED = "leasekit_revoked"  # in a request: why the task is revoked, unless a run of it is alive or has ended
DISMISSED = "its task has rejected it before"  # the reason of a `Reject`: of another delivery of that message
PUT_OFF = "leasekit_put_off"  # header of a message: how often it was put off
_BY_SIGNAL = range(-255, -191)  # exit codes of pool processes: 256 less than the signal's number
_IGNORED = signal.SIGTERM if REMAP_SIGTERM else None  # by pool processes
safe_repr: Any = encoding.safe_repr  # the repr of an exception may raise
_PATIENCE = 2.0  # seconds for which the main process waits for an answer, in which it does nothing else

notes: Notes | None = None  # only in a prefork worker: in its main process, and in its pool processes


def share_notes() -> Notes:
    """Share memory with the pool processes that this process forks from now on."""
    global notes  # noqa: PLW0603 - one for each worker
    notes = Notes()
    return notes


def end_process() -> None:
    """End this pool process, whose task goes on after its lease: where there is no kernel timer, nothing else does."""
    os.kill(os.getpid(), signal.SIGKILL)


def is_for_main(error: BaseException | None) -> bool:
    """Return whether a task has ended its pool process itself, as by `sys.exit`: then its main process ends the lease.

    Celery decides there whether the task runs again. What a signal ends (a shutdown) gives its lease back itself.
    """
    if notes is None or not isinstance(error, (SystemExit, KeyboardInterrupt)):
        return False
    code = getattr(error, "code", None)
    return not (isinstance(code, int) and code in _BY_SIGNAL)


class LeasedRequest(Request):  # type: ignore[misc]  # celery has no types
    """A message in the main process of a worker: it ends the lease of a run whose pool process was killed.

    A message that came again may be a copy of one whose run is alive, or has ended. So the main process neither revokes
    nor expires the task of such a message: that is decided under the task's lease (`REVOKED`).
    """

    _note: Note | None = None  # of the pool process whose end Celery deals with just now
    # That pool process: SIGTERM has ended it, and its lease with it, or its task has failed with no `Exception`.
    _has_given_back = False
    _is_dying = False  # that pool process: its time limit is over
    _has_ended = False  # the run whose time limit is over: its result is stored, what follows is sent
    _is_acknowledged = False  # the message; one that is rejected is not
    _stores_failure = False  # Celery acknowledges a failure before it stores it: the lease is settled after that
    _stage = Stage.BEGUN  # of the killed run
    _ended_by = ""  # what has ended that pool process

    @property
    def _is_leased(self) -> bool:
        return takes_lease(self.task, self.delivery_info)

    def revoked(self) -> bool:
        """Return whether the task was revoked, or has expired, and no run of it has begun before."""
        return super().revoked() and REVOKED not in self.request_dict

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:  # noqa: FBT001 - Celery's
        came_again = self.delivery_info.get("redelivered") or PUT_OFF in self.request_dict
        if self._is_leased and came_again and not terminated:
            self.request_dict[REVOKED] = reason
        else:
            super()._announce_revoked(reason, terminated, signum, expired)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Terminate the run of the task, which may be that of another message than this one."""
        if signal is not None and signal == _IGNORED:
            what = "its process ignores SIGTERM because of REMAP_SIGTERM: revoke it with signal='SIGQUIT'"
            logger.warning("task %s goes on, though Celery calls it revoked: %s", self.id, what)
        runs = [request for request in state.active_requests if request.id == self.id]
        for request in runs or [self]:
            theirs: Any = super(LeasedRequest, request)
            theirs.terminate(pool, signal)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001 - Celery's signature
        """Deal with a time limit as Celery does, unless the task has ended, or is delivered again: see `on_failure`."""
        if soft or not (self._has_ended or self._outlives_limit()):
            super().on_timeout(soft, timeout)

    def on_failure(self, exc_info: Any, *, return_ok: bool = False, **options: Any) -> Any:
        """Deal with a failure as Celery does, and end the lease in the same way if its pool process cannot."""
        if self._is_dismissed(exc_info):
            state.task_ready(self)
            return self.reject(requeue=False)
        if not return_ok and notes is not None:  # else the pool process has reported the failure, and ended its lease
            exc_info = self._judged(exc_info)
        self._stores_failure, is_stored = True, False
        try:
            answer = super().on_failure(exc_info, return_ok=return_ok, **options)
            is_stored = True
            return answer
        finally:
            self._stores_failure = False
            if self._already_revoked and self._is_leased:
                self._report(failed=True)
            else:
                self._end_lease(failed=self._is_over(is_stored=is_stored))
            for request in state.active_requests:  # Celery has forgotten the run whose copy this message was
                if request.id == self.id:
                    state.requests[self.id] = request

    def _is_dismissed(self, exc_info: Any) -> bool:
        """Return whether another delivery of this message was rejected before, and Celery has stored the failure."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)  # it may be wrapped
        if not (isinstance(error, Reject) and error.reason == DISMISSED):
            return False
        if not self.store_errors:
            return True
        try:
            return self.task.backend.get_state(self.id) in states.READY_STATES
        except NotImplementedError:  # there is no result backend
            return True
        except Exception:  # noqa: BLE001 - whatever its result backend raises
            return False

    def _judged(self, exc_info: Any) -> Any:
        """Note what has ended the pool process; return the failure, or what Celery must deal with in its place."""
        self._note, lost_at, self._stage = self._find_note() or (None, math.inf, Stage.BEGUN)
        error = getattr(exc_info.exception, "exc", exc_info.exception)  # it may be wrapped
        self._ended_by = safe_repr(error)
        self._is_dead = not isinstance(error, TimeLimitExceeded)  # at a time limit it is killed just after this
        if isinstance(error, TimeLimitExceeded) and self._stage is Stage.ENDED:
            what = "has ended, and its time limit was over before its lease was settled: it may run again"
            logger.warning("task %s %s", self.id, what)
            self._has_ended = True
            return _as_raised(Ignore())
        if isinstance(error, TimeLimitExceeded) and self._outlives_limit():
            what = "while its worker was shut down" if state.should_terminate else "before it had a lease"
            logger.warning("task %s is delivered again: its time limit was over %s", self.id, what)
            return _as_raised(Reject(f"its time limit was over {what}", requeue=True))
        if isinstance(error, WorkerLostError) and (why := self._explain_loss(lost_at)) is not None:
            what = "is delivered again" if self.task.acks_late else "has failed"
            logger.warning("task %s %s: %s", self.id, what, why)
            self._note = None  # the lease is no longer this worker's
            return _as_raised(Reject("its lease was lost", requeue=True)) if self.task.acks_late else exc_info
        if isinstance(error, WorkerLostError) or not isinstance(error, Exception):
            self._has_given_back = self._note is None and self._is_leased
        return exc_info

    def _outlives_limit(self) -> bool:
        """Return whether the message of this task is delivered again after a hard time limit.

        Either the task has not begun, for lack of a lease, or the worker is being shut down: then Celery would
        acknowledge the message, and store no result.
        """
        can_come_again = notes is not None and self._is_leased and self.task.acks_late
        return can_come_again and (bool(state.should_terminate) or self._find_note() is None)

    def _find_note(self) -> tuple[Note, float, Stage] | None:
        assert notes is not None  # noqa: S101 - callers look
        return notes.find(self.worker_pid or 0, kind_of(lease_name(self.id), "once:"))

    def _explain_loss(self, lost_at: float) -> str | None:
        """Return why the pool process was ended, if the lease was lost by then; else None."""
        if self._note is None:
            return None
        kills_lost = self.task.app.Task.kills_lost
        ended = "its process was ended by leasekit, because" if kills_lost else "its process has ended, and"
        if lost_at == TOLD:
            return f"{ended} its lease was lost"
        heartbeats = self.task.app.Task.leases.heartbeats.for_ttl(self._note.ttl)
        if self._found_dead_at() < lost_at + heartbeats.grace:  # before that, no timer ends a process
            return None
        silence = f"no heartbeat was acknowledged for {heartbeats.trust:.0f} s"
        return f"{ended} {silence} (the process was stopped, or code held the interpreter)"

    def _found_dead_at(self) -> float:
        """Return when Celery saw that the process was dead: within 5 s. Without an event loop it waits 10 s more."""
        job: Any = self._apply_result and self._apply_result()
        found = getattr(job, "_worker_lost", None)
        return time.clock_gettime(CLOCK) - (time.monotonic() - found[0] if found else 0.0)

    def acknowledge(self) -> None:
        """Acknowledge the message; the lease of a killed run is settled."""
        super().acknowledge()
        self._is_acknowledged = True
        if not self._stores_failure:
            self._end_lease(failed=self._is_over())

    def _is_over(self, *, is_stored: bool = True) -> bool:
        """Return whether the task has ended with this run. Without `acks_late` its message never comes again."""
        if self._stage.has_successor or not self.task.acks_late:
            return not self._stage.has_successor
        # A shutdown puts all messages back.
        return self._is_acknowledged and is_stored and not state.should_terminate

    def _retry_worker_lost(self, *args: Any) -> Any:
        """Retry a killed run (`retry_on_worker_lost`): Celery sends the retry, and acknowledges this message."""
        before, self._stage = self._stage, Stage.FOLLOWED
        is_retried = bool(super()._retry_worker_lost(*args))
        if not is_retried:
            self._stage = before
        return is_retried

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - Celery's signature
        """Reject the message; the lease of a killed run is released before, because the message comes at once."""
        self._end_lease(failed=False)
        super().reject(requeue)

    def _end_lease(self, *, failed: bool) -> None:
        """End the lease of a killed run, once: settle it as failed for good, or release it if the run is over."""
        if self._note is not None:
            if failed or self._is_dead:
                self._report(failed=failed)
            elif not self._is_dying:
                self._is_dying = True
                threading.Thread(target=self._report_once_dead, args=(self.worker_pid,), daemon=True).start()
        elif self._has_given_back and (failed or self._stage.has_successor):
            self._has_given_back = False
            self._report(failed=failed)

    def _report_once_dead(self, pid: int) -> None:
        """Release the lease when a pool process whose time limit is over has ended, unless that has done so itself."""
        with suppress(ChildProcessError):  # it has been reaped
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        _, lost_at, self._stage = self._find_note() or (None, math.inf, Stage.BEGUN)
        if lost_at not in (TOLD, math.inf) and self._note is not None:
            self._report(failed=False)

    def _report(self, *, failed: bool) -> None:
        note, self._note = self._note, None
        # Without waiting the main process would kill a run first that then releases the lease itself.
        why = "it was revoked" if self._already_revoked else self._ended_by
        leases = self.task.app.Task.leases
        has_crashed = note is not None and not (failed or self._stage.has_successor or state.should_terminate)
        report: tuple[Any, ...] = (_report_crash, leases, note, why)
        if not has_crashed:
            run = str(self.task.name), attempt_number(self._context), self._stage
            report = (_report, leases, lease_name(self.id), note, why if failed else None, run)
        reporter = threading.Thread(target=report[0], args=report[1:], daemon=True)
        reporter.start()
        reporter.join(_PATIENCE)


def _report(
    leases: Client, name: str, note: Note | None, failed: str | None, run: tuple[str, list[int], Stage]
) -> None:
    """End a lease that another process has held, or has released. Best effort: otherwise it expires.

    `failed`: what has ended that process, if the task does not run again.
    `run`: the task's name, the number of the run, and how far it was.
    """
    assert leases.url is not None  # noqa: S101 - `install` has connected by URL
    # A client of its own, so that no thread is left when the main process forks the next pool process.
    with (
        suppress(LeasekitError),
        leasekit.connect(leases.url, heartbeats=leases.heartbeats, retry_for=_PATIENCE) as client,
        leasekit.lease(client.once(name, wait=_PATIENCE) if note is None else client.adopt(note.task())) as held,
    ):
        _, _, stage = run
        if stage.has_successor:
            known = client.get(held.task.id)
            _note_successor(TaskLease(held, known and known.progress), *run)
        if failed is None:
            held.release()
        else:
            held.fail(f"the pool process was ended ({failed}), and Celery has acknowledged the message", retry=False)


def _note_successor(lease: TaskLease, name: str, number: list[int], stage: Stage) -> None:
    """Record in the lease that the run of this number has sent another in its own place."""
    if stage is Stage.FOLLOWED:
        lease.note_end(name, number)
    elif stage is Stage.REPLACED:
        lease.forget_ends()


def _report_crash(leases: Client, note: Note, why: str) -> None:
    """End the lease of a process that was killed, so that its task may run again. Best effort, as above."""
    assert leases.url is not None  # noqa: S101 - `install` has connected by URL
    crash = Settlement(id=note.task_id, token=note.token, outcome="crash", error=why)

    async def settle(backend: Backend) -> None:
        try:
            await backend.settle([crash])
        finally:
            await backend.aclose()

    with suppress(LeasekitError):
        asyncio.run(settle(open_backend(leases.url, worker=leases.worker)))


def _as_raised(error: TaskPredicate) -> ExceptionInfo:
    """Return what Celery is told when a task raises this."""
    try:
        raise error
    except TaskPredicate:
        return ExceptionInfo()
