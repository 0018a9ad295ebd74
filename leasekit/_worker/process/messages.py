"""Messages between a worker and an executor, as JSON, each after its length.

worker → executor    Setup, once; Run for each task; LeaseChanged while its handler runs
executor → worker    Ready or StartupFailed, once; Progress while a handler runs, and Ended for each Run
"""

import signal
import struct
from collections.abc import Iterator

import msgspec
from msgspec import Raw, Struct

from leasekit._driver.reporting.encoding import RawSettlement
from leasekit.config import Heartbeats
from leasekit.task import Task

SHOW_STACKS = signal.SIGRTMIN + 7  # a signal, sent before a kill: all stacks go to stderr
_LENGTH = struct.Struct(">I")
_LONGEST = 128 * 2**20  # bytes of a message: more than any, and less than the beginning of a text says as a length


class FunctionAddress(Struct, frozen=True, kw_only=True):
    """The place where an executor finds a function."""

    module: str
    name: str


class Address(FunctionAddress, frozen=True, kw_only=True):
    """The place where an executor finds a handler."""

    kind: str
    idle_timeout: float | None = None


class Setup(Struct, frozen=True, kw_only=True, tag=True):
    """The worker's settings, by which an executor finds its handler and gives it the worker's environment."""

    handler: Address
    around: list[FunctionAddress] = []  # code around each run, the outermost first
    lifespans: list[FunctionAddress] = []  # code around the life of the executor
    main: dict[str, str]  # how to import the worker's main module, if it has the handler
    argv: list[str]
    threads: int = 1  # tasks that run at once
    accepts_work: bool  # capabilities of the service …
    dependencies: bool = False
    max_progress: int  # … and the bytes that it keeps
    max_result: int | None = None
    log_level: int | None = None
    log_format: str | None = None


class LeaseState(Struct, frozen=True, kw_only=True):
    """The state of the lease of a task."""

    granted_at: float
    heartbeats: Heartbeats
    run_until: float | None = None
    stop: str | None = None  # the name of the error that the handler was told
    reason: str | None = None  # why the lease was lost, in one word, and in one sentence
    why: str = ""


class Run(Struct, frozen=True, kw_only=True, tag=True):
    """Run a task."""

    number: int  # counts the runs in this executor
    executions: int = 1  # calls of the handler under this lease, this one included
    task: Task
    state: LeaseState


class LeaseChanged(Struct, frozen=True, kw_only=True, tag=True):
    """The lease of a run has changed."""

    run: int
    state: LeaseState
    task: Task | None = None  # delivered again: go on under this lease


class Ready(Struct, frozen=True, tag=True):
    """The executor has found its handler."""


class StartupFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The executor cannot run tasks."""

    why: str


class Progress(Struct, frozen=True, kw_only=True, tag=True):
    """The latest checkpoint."""

    run: int  # a thread that outlives its run must not report for another one
    value: Raw


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """The end of a run, or of a call of its handler. No settlement: its lease was lost, or it waits (`not_yet`)."""

    run: int
    settlement: RawSettlement | None = None  # as the worker reads it: the executor sends any settlement
    raised: bool = False
    stopped: str | None = None  # its error, if that is what it was told
    not_yet: tuple[str, float] | None = None  # what it said, and after how many seconds it is to be called again


FromWorker = Setup | Run | LeaseChanged
FromExecutor = Ready | StartupFailed | Progress | Ended


def packed(message: FromWorker | FromExecutor) -> bytes:
    """Return a message as bytes to send. Raises TypeError or ValueError if a value in it is not JSON."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Split received bytes into messages. Raises `msgspec.DecodeError` if other code has written text between them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > _LONGEST:
                raise msgspec.DecodeError(f"a message of {length} bytes: this is none of leasekit")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            message = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield message
