"""What runs in an executor: one body at a time, in the main thread, under a lease that the worker keeps.

The worker beats, counts idleness, and kills; what a handler is given is a real `Lease`, over a holding that is told by
the worker how the lease stands. Its clock is the same, so it is lost here in time whoever is held up.
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
from functools import partial
from types import FrameType
from typing import Any, cast

import anyio
import msgspec

from leasekit._driver.bridge import call_soon_here
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding, Owner
from leasekit._driver.recorder import Story
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError, LeasekitError, LeaseLost
from leasekit.hooks import Hooks
from leasekit.lease import Lease
from leasekit.worker import linux
from leasekit.worker.executor import run_here
from leasekit.worker.handlers import Handler, declare, is_async
from leasekit.worker.jobs import count_in
from leasekit.worker.process import handler_import, here
from leasekit.worker.process.messages import (
    SHOW_STACKS,
    Address,
    Ended,
    Facts,
    Frames,
    FromExecutor,
    FromWorker,
    Moved,
    Progress,
    Ready,
    Refused,
    Run,
    Setup,
    packed,
)

__all__ = ["Channel", "main"]

_CHILD_CAME_BACK = 70  # EX_SOFTWARE
_DEAF = 71  # EX_OSERR: it cannot hear its worker any more
_STOPS = {stop.__name__: stop for stop in (Cancelled, IdleTimeout, Draining)}
_CHUNK = 64 * 1024
_LOOK = 1.0  # seconds: how long a handler that has changed its user may outlive its guard


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket, until that is closed."""
    os.set_inheritable(fd, False)  # noqa: FBT003
    guard = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Who stops a service tells all its processes. A handler: what is ignored would be so in child processes too.
        signal.signal(number, partial(_leave_it_to_the_worker, os.getpid()))
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no usable stderr
        faulthandler.enable()
        faulthandler.register(SHOW_STACKS, all_threads=True)
    linux.expendable()  # rather than its worker, where memory runs out
    channel = Channel(socket.socket(fileno=fd))
    setup = channel.first()
    here.executing = True
    try:
        handler_import.prepare(setup)
        handlers = {address.kind: _declared(address) for address in setup.handlers}
    except BaseException as error:  # noqa: BLE001 - a module's sys.exit() too has to be told to who waits
        channel.send(Refused(why="".join(traceback.format_exception(error))))
        return
    if setup.log_level is not None and not logging.getLogger().handlers:
        logging.basicConfig(level=setup.log_level, format=setup.log_format or logging.BASIC_FORMAT)
    executor = _Executor(channel, handlers, _Connection(setup), guard=guard)
    threading.Thread(target=executor.listen, name="leasekit-executor", daemon=True).start()
    channel.send(Ready())
    executor.serve()


def _leave_it_to_the_worker(executor: int, number: int, frame: FrameType | None) -> None:
    """The worker says when an executor ends. A child that a handler forked ends when it is told to."""
    if os.getpid() != executor:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _declared(address: Address) -> Handler:
    return declare(address.kind, handler_import.find(address), run="process", idle_timeout=address.idle_timeout)


class Channel:
    """The socket to the worker. For any thread, as far as it does not say otherwise."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._decoder = msgspec.json.Decoder(FromWorker)
        self._frames = Frames()
        self.gone = False  # the worker

    def send(self, message: FromExecutor) -> None:
        data = packed(message)
        with self._sending:
            self._sock.sendall(data)

    def first(self) -> Setup:
        """What the worker says before all else, and nothing after that before it is answered."""
        while not self.gone:
            self.wait()
            for message in self.arrived():
                assert isinstance(message, Setup)  # noqa: S101 - so it does
                return message
        sys.exit("the worker is gone")

    def wait(self, seconds: float | None = None) -> None:
        """Wait until there is something to be read, be it that the worker is gone, at most for so many seconds."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)

    def arrived(self) -> Iterator[FromWorker]:
        """All that the worker has said by now. Not for two threads at once."""
        while not self.gone:
            try:
                data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # a body has closed it
                data = b""
            self.gone = not data
            yield from map(self._decoder.decode, self._frames.feed(data))


class _Connection:
    """What a lease asks of its connection, where that is another process's."""

    forked = False

    def __init__(self, setup: Setup) -> None:
        self.hooks = Hooks()
        self.max_progress = setup.max_progress
        self.max_result = setup.max_result
        self._accepts_work = setup.accepts_work

    def check_accepts_work(self) -> None:
        if not self._accepts_work:
            raise LeasekitError("the worker's service accepts no work: schedule what follows elsewhere")


class _Holding(Holding):
    """A lease that the worker holds."""

    __slots__ = ("_executor", "number")

    def __init__(self, executor: "_Executor", run: Run | Moved, number: int, idle_timeout: float | None) -> None:
        facts = run.facts
        super().__init__(run.task, facts.beats, BOOT_CLOCK, granted_at=facts.granted_at, confirmed=True, started=True)
        self._executor = executor
        self.number = number  # of the run
        self.idle_timeout = idle_timeout
        self.learn(facts)

    @property
    def lost(self) -> bool:
        """Not only by the clock: that it was renewed may be said already, and nobody had the time to hear it."""
        is_lost = super().lost
        if is_lost and self.reason is None and self.body_runs and self.pid == os.getpid():
            self._executor.catch_up()
            return super().lost
        return is_lost

    def begin(self, idle_timeout: float | None, owner: Owner | None = None) -> None:
        super().begin(self.idle_timeout, owner)  # counted by the worker, and told here

    def report(self, progress: Any) -> None:
        super().report(progress)
        self._executor.channel.send(Progress(run=self.number, value=progress))

    def learn(self, facts: Facts) -> None:
        """The worker says how it stands. Under the executor's lock."""
        self.term.granted_at, self.term.beats = facts.granted_at, facts.beats
        if facts.reason is not None:
            self.lose(facts.reason, Story(facts.why), self.clock.now())
        elif facts.stop is not None:
            self.tell(_STOPS[facts.stop])


class _Executor:
    """Runs what comes in, one after another."""

    def __init__(self, channel: Channel, handlers: dict[str, Handler], connection: _Connection, *, guard: int) -> None:
        self.channel = channel
        self._handlers = handlers
        self._connection = connection
        self._todo: queue.SimpleQueue[Handler | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._guard = guard
        self._lock = threading.Lock()  # between what comes in, and a body's begin and end
        self._holding: _Holding | None = None  # from when a run has come in until it has ended
        self._lease: Lease | None = None  # while its body runs

    def listen(self) -> None:
        """Take in what the worker says, while bodies run."""
        try:
            while not self.channel.gone:
                # Again and again: the kernel forgets it when a handler changes its user.
                linux.end_with(self._guard)
                self.channel.wait(_LOOK)
                self.catch_up()
            self._todo.put(None)
        except BaseException:  # noqa: BLE001 - a body may have used up all memory: not even a log can be written then
            os._exit(_DEAF)  # else the next task would wait for ever to be begun, and its lease be kept all the while

    def catch_up(self) -> None:
        """Take in what the worker has said by now. From any thread: the one that listens may not have its turn."""
        with self._lock:
            for message in self.channel.arrived():
                self._heed(message)

    def _heed(self, message: FromWorker) -> None:
        holding = self._holding
        match message:
            case Run():
                handler = self._handlers[message.task.kind]
                self._holding = _Holding(self, message, message.number, handler.idle_timeout)
                self._todo.put(handler)
            case Facts() if holding is not None:  # else its body has ended meanwhile
                holding.learn(message)
            case Moved() if holding is not None:
                self._holding = _Holding(self, message, holding.number, holding.idle_timeout)
                if self._lease is not None:
                    self._lease.move(self._holding)
            case _:
                pass

    def serve(self) -> None:
        """Until the worker is gone."""
        while (handler := self._todo.get()) is not None:
            self.channel.send(self._run(handler))

    def _run(self, handler: Handler) -> Ended:
        # Again for each: a handler, or what it was imported from, may have changed the user, and the kernel forgets
        # then that this process is to end with its guard, whose timer guards this body.
        linux.end_with(self._guard)
        self.catch_up()
        try:
            lease = self._begin()
        except LeaseError as error:
            return Ended(raised=True, stopped=str(error))
        raised = self._body(handler, lease)
        if os.getpid() != self._pid:
            # A child that the handler forked has come back from it: it must not be a second executor.
            os._exit(0 if raised is None else _CHILD_CAME_BACK)
        stopped = str(raised) if isinstance(raised, LeaseLost | Cancelled | IdleTimeout | Draining) else None
        ended = self._ended(lease, raised, stopped)
        with self._lock:
            self._lease = self._holding = None
        return ended

    def _begin(self) -> Lease:
        with self._lock:
            assert self._holding is not None  # noqa: S101 - it came with the run
            lease = Lease(self._holding.task)
            lease.begin(cast("Connection", self._connection), self._holding)
            self._lease = lease
            return lease

    def _body(self, handler: Handler, lease: Lease) -> BaseException | None:
        body: Callable[..., Any] = _run_async if is_async(handler.function) else Handler.call
        try:
            contextvars.copy_context().run(body, handler, lease)
        except BaseException as error:  # noqa: BLE001 - a handler's sys.exit() is a failure like any other
            return error
        return None

    def _ended(self, lease: Lease, error: BaseException | None, stopped: str | None) -> Ended:
        try:
            settlement = lease.ended(error, interrupted="retry")
        except Exception as unreportable:  # noqa: BLE001 - whatever its error does when it is looked at
            error = RuntimeError(f"its error cannot be reported: {type(unreportable).__qualname__}")
            settlement = lease.ended(error)
        for stream in (sys.stdout, sys.stderr):  # who kills this process later must not take along what was said
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        return Ended.said(settlement, raised=error is not None, stopped=stopped)


def _run_async(handler: Handler, lease: Lease) -> None:
    async def body() -> None:
        count_in(asyncio.get_running_loop())
        if (error := await run_here(handler, lease, call_soon_here())) is not None:
            raise error

    anyio.run(body)
