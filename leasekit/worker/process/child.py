"""What runs in an executor: one body at a time, in the main thread, under a lease that the worker keeps.

The worker beats, counts idleness, and kills; what a handler is given is a real `Lease`, over a holding that is told by
the worker how the lease stands. Its clock is the same, so it is lost here in time whoever is held up.
"""

import contextlib
import contextvars
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import anyio
import msgspec

from leasekit._driver.bridge import call_soon_here
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.connection import Connection
from leasekit._driver.holding import Holding
from leasekit._driver.recorder import Story
from leasekit.errors import Cancelled, Draining, IdleTimeout, LeaseError, LeasekitError, LeaseLost
from leasekit.hooks import Hooks
from leasekit.lease import Lease
from leasekit.worker import kernel
from leasekit.worker.handlers import Handler, declare, is_async
from leasekit.worker.process import here, names
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
_STOPS = {stop.__name__: stop for stop in (Cancelled, IdleTimeout, Draining)}
_CHUNK = 64 * 1024


def main(fd: int) -> None:
    """Serve the worker at the other end of this socket, until that is closed."""
    os.set_inheritable(fd, False)  # noqa: FBT003
    for number in (signal.SIGTERM, signal.SIGINT):
        # Who stops a service tells all its processes. A handler: what is ignored would be so in child processes too.
        signal.signal(number, _leave_it_to_the_worker)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no usable stderr
        faulthandler.enable()
        faulthandler.register(SHOW_STACKS, all_threads=True)
    kernel.expendable()  # rather than its worker, where memory runs out
    channel = Channel(socket.socket(fileno=fd))
    said = channel.messages()
    setup = next(said)
    assert isinstance(setup, Setup)  # noqa: S101 - the worker says so first
    here.executing = True
    try:
        names.prepare(setup)
        handlers = {address.kind: _declared(address) for address in setup.handlers}
    except BaseException as error:  # noqa: BLE001 - a module's sys.exit() too has to be told to who waits
        channel.send(Refused(why="".join(traceback.format_exception(error))))
        return
    if setup.log_level is not None and not logging.getLogger().handlers:
        logging.basicConfig(level=setup.log_level, format=setup.log_format or logging.BASIC_FORMAT)
    executor = _Executor(channel, handlers, _Connection(setup))
    threading.Thread(target=executor.listen, args=[said], name="leasekit-executor", daemon=True).start()
    channel.send(Ready())
    executor.serve()


def _leave_it_to_the_worker(number: int, frame: FrameType | None) -> None:
    """The worker says when an executor ends."""


def _declared(address: Address) -> Handler:
    return declare(address.kind, names.find(address), run="process", idle_timeout=address.idle_timeout)


class Channel:
    """The socket to the worker. Messages are sent from any thread, and received in one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._decoder = msgspec.json.Decoder(FromWorker)

    def send(self, message: FromExecutor) -> None:
        data = packed(message)
        with self._sending:
            self._sock.sendall(data)

    def messages(self) -> Iterator[FromWorker]:
        """What the worker says, until it is gone."""
        frames = Frames()
        while data := self._sock.recv(_CHUNK):
            yield from map(self._decoder.decode, frames.feed(data))


class _Connection:
    """What a lease asks of its connection, where that is another process's."""

    forked = False

    def __init__(self, setup: Setup) -> None:
        self.hooks = Hooks()
        self.max_progress = setup.max_progress
        self._accepts_work = setup.accepts_work

    def check_accepts_work(self) -> None:
        if not self._accepts_work:
            raise LeasekitError("the worker's service accepts no work: schedule what follows elsewhere")


class _Holding(Holding):
    """A lease that the worker holds."""

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel, run: "Run | Moved", idle_timeout: float | None) -> None:
        facts = run.facts
        super().__init__(run.task, facts.beats, BOOT_CLOCK, granted_at=facts.granted_at, confirmed=True, started=True)
        self._channel = channel
        self.idle_timeout = idle_timeout
        self.learn(facts)

    def report(self, progress: Any) -> None:
        super().report(progress)
        self._channel.send(Progress(value=progress))

    def learn(self, facts: Facts) -> None:
        """The worker says how it stands. In the listening thread."""
        self.term.granted_at, self.term.beats = facts.granted_at, facts.beats
        if facts.reason is not None:
            self.lose(facts.reason, Story(facts.why), self.clock.now())
        elif facts.stop is not None:
            self.tell(_STOPS[facts.stop])


class _Executor:
    """Runs what comes in, one after another."""

    def __init__(self, channel: Channel, handlers: dict[str, Handler], connection: _Connection) -> None:
        self._channel = channel
        self._handlers = handlers
        self._connection = connection
        self._todo: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # between a body's begin and end, and what comes in for it
        self._lease: Lease | None = None
        self._holding: _Holding | None = None

    def listen(self, said: Iterator[FromWorker]) -> None:
        """Take in what the worker says, while bodies run."""
        with contextlib.suppress(OSError):
            for message in said:
                if isinstance(message, Run):
                    self._todo.put(message)
                else:
                    self._heed(message)
        self._todo.put(None)

    def _heed(self, message: FromWorker) -> None:
        with self._lock:
            lease, holding = self._lease, self._holding
            if lease is None or holding is None:
                return  # its body has ended meanwhile
            match message:
                case Facts():
                    holding.learn(message)
                case Moved():
                    self._holding = _Holding(self._channel, message, holding.idle_timeout)
                    lease.move(self._holding)
                case _:
                    pass

    def serve(self) -> None:
        """Until the worker is gone."""
        while (run := self._todo.get()) is not None:
            self._channel.send(self._run(run))

    def _run(self, run: Run) -> Ended:
        handler = self._handlers[run.task.kind]
        holding = _Holding(self._channel, run, handler.idle_timeout)
        lease = Lease(run.task)
        try:
            lease.begin(cast("Connection", self._connection), holding)
        except LeaseError as error:
            return Ended(raised=True, stopped=str(error))
        holding.idle_timeout = handler.idle_timeout  # counted by the worker: nobody watches it here
        with self._lock:
            self._lease, self._holding = lease, holding
        raised = self._body(handler, lease)
        if os.getpid() != self._pid:
            # A child that the handler forked has come back from it: it must not be a second executor.
            os._exit(0 if raised is None else _CHILD_CAME_BACK)
        with self._lock:
            self._lease = self._holding = None
        stopped = str(raised) if isinstance(raised, LeaseLost | Cancelled | IdleTimeout | Draining) else None
        return self._ended(lease, raised, stopped)

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
        error: BaseException | None = None
        lease.enter(call_soon_here())
        try:
            await handler.acall(lease)
        except BaseException as raised:  # noqa: BLE001 - raised again below
            error = raised
        if (error := lease.leave(error)) is not None:
            raise error

    anyio.run(body)
