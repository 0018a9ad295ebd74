"""Executor process: run the handler of one kind, for one task at a time or several, under leases that the worker keeps.

The worker renews leases, watches idleness, and kills. A handler gets a real `Lease` over a held lease whose state the
worker sends. Both processes have the same clock: the lease is lost here in time, even if the worker stands still.
Handlers run in the main thread, and in others if there are several tasks at once.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, cast

import anyio
import msgspec

from leasekit._driver.bridge import call_soon_here
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.coding import CLEAR
from leasekit._driver.connection import Connection
from leasekit._driver.explaining.recorder import Story
from leasekit._driver.keeping.held_lease import HeldLease, Owner
from leasekit._driver.locks import taken
from leasekit._driver.reporting.encoding import RawSettlement
from leasekit._leased_run import LeasedRun
from leasekit._worker import linux
from leasekit._worker.around import CHILD_CAME_BACK, living
from leasekit._worker.executor import run_here
from leasekit._worker.handlers import Handler, declare, is_async
from leasekit._worker.jobs import count_in
from leasekit._worker.json_log import formatter
from leasekit._worker.process import handler_import, here, messages
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError, LeasekitError, LeaseLost
from leasekit.hooks import Hooks
from leasekit.task import NewTask, Task

_CANNOT_SERVE = 1
_DEAF = 71  # EX_OSERR: messages of the worker can no longer be received
_STOPS = {stop.__name__: stop for stop in (Cancelled, IdleTimeout, Draining)}
_CHUNK = 64 * 1024
_LOOK = 1.0  # seconds: how long a handler that has changed its user may outlive its guard


def _prepare_process() -> None:
    """Set what holds for the whole process: its signals, its stacks on request, its place if memory runs out."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # A stopped service gets signals in all its processes. Not SIG_IGN: child processes would inherit that.
        signal.signal(number, partial(_leave_it_to_the_worker, os.getpid()))
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no usable stderr
        faulthandler.enable()
        faulthandler.register(messages.SHOW_STACKS, all_threads=True)
    linux.expendable()  # before its worker, if memory runs out


def _imported(setup: messages.Setup) -> Handler:
    """Import the handler, and the code around its runs."""
    handler_import.prepare(setup)
    address, function = setup.handler, handler_import.find(setup.handler)
    handler = declare(address.kind, function, run="process", idle_timeout=address.idle_timeout)
    return replace(handler, around=tuple(map(handler_import.find, setup.around)))


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket, until the worker closes it."""
    os.set_inheritable(fd, False)  # noqa: FBT003
    guard = os.getppid()
    _prepare_process()
    channel = Channel(socket.socket(fileno=fd))
    setup = channel.first()
    here.executing = True
    life = ExitStack()
    try:
        handler = _imported(setup)
        _log_to_stderr(setup)
        life.enter_context(living([handler_import.find(lifespan) for lifespan in setup.lifespans]))
    except BaseException as error:  # noqa: BLE001 - even a module's sys.exit() must be reported to the worker
        channel.send(messages.StartupFailed(why="".join(traceback.format_exception(error))))
        return
    executor = _Executor(channel, handler, _Connection(setup), guard=guard, threads=setup.threads)
    threads = _start_threads(executor, setup.threads)
    channel.send(messages.Ready())
    executor.serve()
    if setup.lifespans:
        for thread in threads:  # no handler may run when what it uses is shut down
            thread.join()
    life.close()


def _start_threads(executor: "_Executor", count: int) -> list[threading.Thread]:
    """Start the thread that listens, and those that run handlers beside the main thread; return these."""
    threading.Thread(target=executor.listen, name="leasekit-executor", daemon=True).start()
    threads = [
        threading.Thread(target=executor.serve, name=f"leasekit-handler-{index}", daemon=True)
        for index in range(1, count)
    ]
    for thread in threads:
        thread.start()
    return threads


def _log_to_stderr(setup: messages.Setup) -> None:
    """Log as the worker does, unless the handlers' module has arranged its own log."""
    if setup.log_level is not None and not logging.getLogger().handlers:
        stderr = logging.StreamHandler()
        stderr.setFormatter(formatter(setup.log_format))
        logging.basicConfig(level=setup.log_level, handlers=[stderr])


def _leave_it_to_the_worker(executor: int, number: int, frame: FrameType | None) -> None:
    """Ignore a signal, because the worker ends executors. A child that a handler forked ends by it."""
    if os.getpid() != executor:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Channel:
    """The socket to the worker. For any thread, unless a method says otherwise."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._decoder = msgspec.json.Decoder(messages.FromWorker)
        self._frames = messages.Frames()
        self.gone = False  # the worker has closed its end

    def send(self, message: messages.FromExecutor) -> None:
        data = messages.packed(message)
        for _ in taken(self._sending):
            try:
                self._sock.sendall(data)
            finally:
                self._sending.release()

    def first(self) -> messages.Setup:
        """Return the worker's first message, `Setup`; the worker sends no other before the answer."""
        while not self.gone:
            self.wait()
            for message in self.arrived():
                assert isinstance(message, messages.Setup)  # noqa: S101 - the protocol says so
                return message
        sys.exit("the worker is gone")

    def wait(self, seconds: float | None = None) -> None:
        """Wait until there is something to read, or the worker is gone, for at most `seconds`."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)

    def arrived(self) -> Iterator[messages.FromWorker]:
        """Yield all messages of the worker that have arrived. Not for two threads at once."""
        while not self.gone:
            try:
                data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # a handler has closed the socket
                data = b""
            self.gone = not data
            yield from map(self._decoder.decode, self._frames.feed(data))


class _Connection:
    """The connection of a lease, as far as an executor has one: the real one is in the worker's process."""

    forked = False

    def __init__(self, setup: messages.Setup) -> None:
        self.hooks = Hooks()
        self.coding = CLEAR  # the worker has the codecs
        self.max_progress = setup.max_progress
        self.max_result = setup.max_result
        self._accepts_work = setup.accepts_work
        self._dependencies = setup.dependencies

    def check_accepts_work(self) -> None:
        if not self._accepts_work:
            raise LeasekitError("the worker's service accepts no work: schedule what follows elsewhere")

    def check_dependencies(self, task: NewTask) -> None:
        if task.after and not self._dependencies:
            raise LeasekitError("the worker's service has no dependencies (`after`): schedule the task without them")


class _HeldLease(HeldLease):
    """A lease that the worker holds."""

    __slots__ = ("_executor", "executions", "number")

    def __init__(
        self, executor: "_Executor", number: int, task: Task, state: messages.LeaseState, *, executions: int
    ) -> None:
        super().__init__(task, state.heartbeats, BOOT_CLOCK, granted_at=state.granted_at, confirmed=True, started=True)
        self._executor = executor
        self.number = number  # number of the run
        self.executions = executions
        self.idle_timeout = executor.handler.idle_timeout
        self.learn(state)

    @property
    def lost(self) -> bool:
        """Whether the lease is lost. The clock alone does not decide: a renewal may have arrived, still unread."""
        is_lost = super().lost
        if is_lost and self.reason is None and self.handler_runs and self.pid == os.getpid():
            self._executor.catch_up()
            return super().lost
        return is_lost

    def begin(self, idle_timeout: float | None, owner: Owner | None = None) -> None:
        super().begin(self.idle_timeout, owner)  # idleness is watched by the worker, and only reported here

    def report(self, progress: Any) -> None:
        super().report(progress)
        self._executor.channel.send(messages.Progress(run=self.number, value=progress))

    def learn(self, state: messages.LeaseState) -> None:
        """Accept the worker's state of the lease. The caller holds the executor's lock."""
        self.term.granted_at, self.term.heartbeats = state.granted_at, state.heartbeats
        self.run_until = state.run_until
        if state.reason is not None:
            self.lose(state.reason, Story(state.why), self.clock.now())
        elif state.stop is not None:
            self.tell(_STOPS[state.stop])


class _Executor:
    """Run the tasks that come in, in the threads that call `serve`."""

    def __init__(
        self, channel: Channel, handler: Handler, connection: _Connection, *, guard: int, threads: int
    ) -> None:
        self.channel = channel
        self.handler = handler
        self._connection = connection
        self._threads = threads
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # numbers of runs
        self._pid = os.getpid()
        self._guard = guard
        # Guards incoming messages against a run's begin and end. A begin that finds its lease over takes it once more.
        self._lock = threading.RLock()
        self._holding: dict[int, _HeldLease] = {}  # from the arrival of a run until its end
        self._leased_runs: dict[int, LeasedRun] = {}  # while its handler runs

    def listen(self) -> None:
        """Receive messages of the worker until its socket is closed, then end the threads in `serve`.

        An error ends the process.
        """
        try:
            while not self.channel.gone:
                # Repeated, because the kernel forgets it when a handler changes its user.
                linux.end_with(self._guard)
                self.channel.wait(_LOOK)
                self.catch_up()
            for _ in range(self._threads):
                self._todo.put(None)
        except BaseException:  # noqa: BLE001 - handlers may have used up all memory: not even a log can be written then
            os._exit(_DEAF)  # else the next task would never begin, while the worker keeps its lease

    def catch_up(self) -> None:
        """Receive the messages that have arrived. Any thread: the thread that listens may not have its turn."""
        for _ in taken(self._lock):
            try:
                for message in self.channel.arrived():
                    self._handle(message)
            finally:
                self._lock.release()

    def _handle(self, message: messages.FromWorker) -> None:
        match message:
            case messages.Run(number=number, executions=executions, task=task, state=state):
                self._holding[number] = _HeldLease(self, number, task, state, executions=executions)
                self._todo.put(number)
            case messages.LeaseChanged(run=number) if number in self._holding:  # else its handler has ended meanwhile
                self._change_lease(number, message)
            case _:
                pass

    def _change_lease(self, number: int, change: messages.LeaseChanged) -> None:
        if change.task is None:
            self._holding[number].learn(change.state)
            return
        executions = self._holding[number].executions
        held = self._holding[number] = _HeldLease(self, number, change.task, change.state, executions=executions)
        if (run := self._leased_runs.get(number)) is not None:
            run.move(held)

    def serve(self) -> None:
        """Run tasks until the worker is gone. Several threads may call this; one that fails ends the process."""
        try:
            while (number := self._todo.get()) is not None:
                self.channel.send(self._run(number))
        except BaseException:  # noqa: BLE001 - else its run would never end, while the worker keeps the lease
            with contextlib.suppress(BaseException):
                traceback.print_exc()
            os._exit(_CANNOT_SERVE)

    def _run(self, number: int) -> messages.Ended:
        # Repeated for each run: a handler, or a module that it imports, may have changed the user, and then the kernel
        # forgets that this process must end with its guard, whose timer guards this handler.
        linux.end_with(self._guard)
        self.catch_up()
        try:
            run = self._begin(number)
        except LeaseError as error:
            with self._lock:
                del self._holding[number]
            return messages.Ended(run=number, raised=True, stopped=str(error))
        raised = self._call_handler(run)
        if os.getpid() != self._pid:
            # A child process that the handler forked came back from the handler: it must not be a second executor.
            os._exit(0 if raised is None else CHILD_CAME_BACK)
        stopped = str(raised) if isinstance(raised, LeaseLost | Cancelled | IdleTimeout | Draining) else None
        ended = self._end_run(number, run, raised, stopped)
        with self._lock:
            del self._leased_runs[number], self._holding[number]
        return ended

    def _begin(self, number: int) -> LeasedRun:
        with self._lock:
            held = self._holding[number]
            run = LeasedRun(held.task)
            run.begin(cast("Connection", self._connection), held)
            run.executions = held.executions  # of which the worker knows the earlier ones
            self._leased_runs[number] = run
            return run

    def _call_handler(self, run: LeasedRun) -> BaseException | None:
        call: Callable[..., Any] = _run_async if is_async(self.handler.function) else Handler.call
        try:
            contextvars.copy_context().run(call, self.handler, run)
        except BaseException as error:  # noqa: BLE001 - a handler's sys.exit() is a failure like any other
            return error
        return None

    def _end_run(self, number: int, run: LeasedRun, error: BaseException | None, stopped: str | None) -> messages.Ended:
        """End a run, or pause it after `NotYet`; return the message that tells the worker."""
        if error is not None and (after := run.wait_for(error)) is not None:
            run.paused(error)
            _flush()
            return messages.Ended(run=number, raised=True, not_yet=(str(error), after))
        try:
            settlement = run.ended(error, interrupted="retry")
        except BaseException as unreportable:  # noqa: BLE001 - the error's own methods may raise anything
            error = RuntimeError(f"its error cannot be reported: {type(unreportable).__qualname__}")
            settlement = run.ended(error)
        _flush()
        sent = cast("RawSettlement | None", settlement)
        return messages.Ended(run=number, settlement=sent, raised=error is not None, stopped=stopped)


def _flush() -> None:
    """Write what the handler has printed: if this process is killed later, that must not be lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _run_async(handler: Handler, run: LeasedRun) -> None:
    async def main() -> None:
        count_in(asyncio.get_running_loop())
        if (error := await run_here(handler, run, call_soon_here())) is not None:
            raise error

    anyio.run(main)
