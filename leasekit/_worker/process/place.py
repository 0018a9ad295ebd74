"""Place: where one executor after another runs tasks of one kind, each up to its settlement.

Rule 1: no handler begins before the guard is armed with the end of its lease.
Rule 2: no task is settled before its handler has ended, or its executor is known to be dead.
Rule 3: the end of an executor, of whatever cause, affects the tasks in it alone, and all of these at once.
"""

import logging
import os
import random
import select
import threading
from collections.abc import Callable

from leasekit._core.backoff import Backoff
from leasekit._worker.claimed_task import ClaimedTask
from leasekit._worker.process import messages
from leasekit._worker.process.guarded_process import GuardedProcess
from leasekit._worker.process.process_run import ProcessRun
from leasekit.errors import ConfigError

logger = logging.getLogger("leasekit")

_LOOK = 1.0  # seconds: check at least this often
_ANSWER = 10.0  # seconds for a guard to do what it was told
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between executors that die before they are ready
_GOODBYE = 5.0  # seconds for an executor without a task to end by itself, with its shutdowns


class Bell:
    """A file descriptor that wakes a place.

    Any thread may `ring`, also after `close`; the rest is for the place's thread.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        with self._lock:  # a descriptor that is closed may soon be another file
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float | None = None) -> None:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if poll.poll(None if seconds is None else seconds * 1000):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


class Place:
    """Run tasks in one executor process, as many at once as `setup` says that it has threads.

    The place itself has one thread, which calls its methods. `take` returns the next task, or None if there is none,
    and `filled` is called when no more fits. Any thread may call `ring`, `close` and
    `end`, and read the properties.
    """

    def __init__(
        self,
        setup: messages.Setup,
        now: Callable[[], float],
        *,
        take: Callable[[], ClaimedTask | None],
        filled: Callable[[], None],
    ) -> None:
        self._setup = setup
        self._now = now
        self._take = take
        self._filled = filled
        self._bell = Bell()
        self._executor: GuardedProcess | None = None
        self._runs: dict[int, ProcessRun] = {}
        self._culprit: ProcessRun | None = None  # the run for which the executor was killed
        self._failing = False  # the last executor was never ready, or died without a task
        self._ends_at: float | None = None  # of all handlers, set by the worker
        self._closed = False
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, random=random.SystemRandom().random)
        self.ring = self._bell.ring

    def close(self) -> None:
        """Stop running tasks, and let the executor end."""
        self._closed = True
        self.ring()

    def end(self, at: float) -> None:
        """Kill the executor at `at` if a handler runs in it, and give its tasks back with the latest progress."""
        self._ends_at = at
        self.ring()

    @property
    def over(self) -> bool:
        return self._closed and not self._runs

    @property
    def busy(self) -> bool:
        return bool(self._runs)

    @property
    def has_executor(self) -> bool:
        return self._executor is not None

    @property
    def slots(self) -> int:
        """The number of tasks that can run at once at present: 0 without an executor that lives."""
        return self._setup.threads if (executor := self._executor) is not None and executor.usable else 0

    @property
    def free(self) -> int:
        return max(0, self.slots - len(self._runs))

    @property
    def full(self) -> bool:
        """Whether no task can begin here until one ends, or an executor can be started again."""
        return self._failing or 0 < self.slots <= len(self._runs)

    def wait(self) -> None:
        """Wait for a ring."""
        self._bell.wait()

    def start(self) -> bool:
        """Start an executor; False: try again later. Raises `ConfigError` if none will ever start."""
        try:
            executor = GuardedProcess(self.ring, self._bell.fd, self._now)
        except OSError as error:
            logger.error("no executor can be started, it is tried again: %s", error)
            self.pause()
            return False
        if not self._becomes_ready(executor):
            how = _end_executor(executor, within=0)
            if not self._closed:
                logger.error("an executor %s before it was ready; it is tried again", how)
                self.pause()
            return False
        self._executor = executor
        self._failing = False
        return True

    def _becomes_ready(self, executor: GuardedProcess) -> bool:
        try:
            executor.wait_started()
            executor.send(self._setup)
            return self._wait_until_ready(executor)
        except OSError as error:
            logger.error("no executor can be started, it is tried again: %s", error)
            return False
        except BaseException:
            _end_executor(executor, within=0)
            raise

    def _wait_until_ready(self, executor: GuardedProcess) -> bool:
        while not self._closed and not executor.over:
            for message in executor.step(_LOOK):
                match message:
                    case messages.Ready():
                        return True
                    case messages.StartupFailed(why=why):
                        raise ConfigError(
                            f"run='process': an executor for {self._setup.handler.kind!r} cannot start:\n{why}"
                        )
                    case _:
                        pass
        return False

    def pause(self) -> None:
        """Wait until an executor may be started again, while other places take the tasks."""
        self._failing = True
        self._filled()
        self.sleep(self._backoff.wait())

    def sleep(self, seconds: float) -> None:
        """Wait whatever rings, unless this place is closed."""
        until = self._now() + seconds
        while not self._closed and (left := until - self._now()) > 0:
            self._bell.wait(left)

    def end_executor(self) -> None:
        """End an executor without a task."""
        if self._executor is not None:
            executor, self._executor = self._executor, None
            _end_executor(executor, within=_GOODBYE)

    def finish(self) -> None:
        """End the executor and close the place. Call this in its thread."""
        if self._executor is not None and self._runs:
            self._lose_executor(self._executor)
        self.end_executor()
        self._bell.close()

    def step(self) -> None:
        """Begin tasks, and serve those that run, up to the next message, deadline or ring. Needs an executor."""
        executor = self._executor
        assert executor is not None  # noqa: S101 - the caller has looked
        try:
            self._serve(executor)
        except Exception:
            logger.exception("error at the executor of %s", ", ".join(self._task_ids) or "no task")
            executor.shutdown(0)
        if executor.over:
            self._lose_executor(executor)

    @property
    def _task_ids(self) -> list[str]:
        return [run.task_id for run in self._runs.values()]

    def _serve(self, executor: GuardedProcess) -> None:
        now = self._now()
        while self.free and (work := self._take()) is not None:
            self._add(executor, work, now)
        if not self.free:
            self._filled()
        until = now + _LOOK
        for number, run in list(self._runs.items()):
            if run.begun or self._begins(executor, run, now):
                until = min(until, run.step(now, self._ends_at))
                if run.executed is not None:
                    self._culprit = run
            elif number in self._runs:
                until = min(until, run.asked_at + _ANSWER)
        for message in executor.step(until - now):
            match message:
                case messages.Progress(run=number, value=value) if number in self._runs:
                    self._runs[number].report(value)
                case messages.Ended(run=number) if number in self._runs:
                    self._runs.pop(number).settle(message)
                case _:
                    pass

    def _add(self, executor: GuardedProcess, work: ClaimedTask, now: float) -> None:
        work.held.watchdog = executor.watchdog
        if (leased := work.begin()) is not None:
            run = ProcessRun(executor, work, leased, now)
            self._runs[run.number] = run

    def _begins(self, executor: GuardedProcess, run: ProcessRun, now: float) -> bool:
        """Begin a run once the guard has confirmed its deadline; give it back if the worker ends meanwhile."""
        if self._ends_at is not None:
            self._runs.pop(run.number).give_back()
        elif run.number <= executor.confirmed:
            self._backoff.reset()  # not when it was ready: an executor that dies soon after that is no better
            if run.begin():
                return True
            del self._runs[run.number]
        elif now - run.asked_at >= _ANSWER and executor.usable:
            logger.error("the guard of an executor does not answer: task %s is given back", run.task_id)
            executor.kill()
        return False

    def _lose_executor(self, executor: GuardedProcess) -> None:
        """Settle the tasks of an executor that is dead or must die; those that have not begun are given back."""
        self._executor = None
        how = _end_executor(executor, within=0)
        culprit, self._culprit = self._culprit, None
        if not self._runs and not self._closed:
            logger.warning("an executor without a task %s; there will be another", how)
            self.pause()
        while self._runs:
            _, run = self._runs.popitem()
            if run.begun:
                run.settle_crash(how, culprit)
            else:
                run.give_back()


def _end_executor(executor: GuardedProcess, *, within: float) -> str:
    executor.shutdown(within)
    return executor.reap()
