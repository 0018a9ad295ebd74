"""What a worker and an executor say to one another, as JSON with its length before it.

worker → executor    Setup, once; Run for each task; Facts and Moved while its body runs
executor → worker    Ready or Refused, once; Progress while a body runs, and Ended for each Run
"""

import signal
import struct
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from leasekit.config import Beats
from leasekit.task import NewTask, Outcome, Settlement, Task

__all__ = [
    "SHOW_STACKS", "Address", "Ended", "Facts", "Frames", "FromExecutor", "FromWorker", "Moved", "Progress", "Ready",
    "Refused", "Run", "Setup", "packed",
]  # fmt: skip

SHOW_STACKS = signal.SIGRTMIN + 7  # said by a signal, before it is killed: all stacks go to stderr
_LENGTH = struct.Struct(">I")


class Address(Struct, frozen=True, kw_only=True):
    """Where an executor finds a handler."""

    kind: str
    module: str
    name: str
    idle_timeout: float | None = None


class Setup(Struct, frozen=True, kw_only=True, tag=True):
    """What an executor has to know of its worker, so that it finds the handlers, and they what they are used to."""

    handlers: list[Address]
    main: dict[str, str]  # how to make the worker's main module, where a handler is in it
    argv: list[str]
    accepts_work: bool  # of the service …
    max_progress: int  # … and how much it keeps
    max_result: int | None = None
    log_level: int | None = None
    log_format: str | None = None


class Facts(Struct, frozen=True, kw_only=True, tag=True):
    """How it stands with the lease of the body that runs."""

    granted_at: float
    beats: Beats
    stop: str | None = None  # the name of the error that the body was told
    reason: str | None = None  # why the lease was lost, in one word, and in one sentence
    why: str = ""


class Run(Struct, frozen=True, kw_only=True, tag=True):
    """Run a task."""

    number: int  # of the runs in this executor
    task: Task
    facts: Facts


class Moved(Struct, frozen=True, kw_only=True, tag=True):
    """The task that runs was delivered again: go on under this lease."""

    task: Task
    facts: Facts


class Ready(Struct, frozen=True, tag=True):
    """All handlers are found."""


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """No task can be run here."""

    why: str


class Progress(Struct, frozen=True, kw_only=True, tag=True):
    """The latest checkpoint."""

    run: int  # a thread that outlives its body must not speak for the next one
    value: Raw


_NOTHING = Raw(b"null")


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """How a body ended; no outcome: it was stopped because its lease was lost."""

    outcome: Outcome | None = None
    result: Raw = _NOTHING
    error: Raw = _NOTHING
    retry_after: float | None = None
    progress: Raw | UnsetType = UNSET
    then: list[NewTask] = []
    raised: bool = False
    stopped: str | None = None  # what it raised, where that is what it was told

    @classmethod
    def said(cls, settlement: Settlement | None, *, raised: bool, stopped: str | None) -> "Ended":
        if settlement is None:
            return cls(raised=raised, stopped=stopped)
        return cls(
            outcome=settlement.outcome,
            result=_raw(settlement.result),
            error=_raw(settlement.error),
            retry_after=settlement.retry_after,
            progress=settlement.progress,
            then=settlement.then,
            raised=raised,
            stopped=stopped,
        )

    def settlement(self, task: Task) -> Settlement | None:
        if self.outcome is None:
            return None
        return Settlement(
            id=task.id,
            token=task.token,
            outcome=self.outcome,
            result=None if self.result == _NOTHING else self.result,
            error=None if self.error == _NOTHING else self.error,
            retry_after=self.retry_after,
            progress=self.progress,
            then=self.then,
        )


FromWorker = Setup | Run | Facts | Moved
FromExecutor = Ready | Refused | Progress | Ended


def _raw(value: object) -> Raw:
    return value if isinstance(value, Raw) else Raw(msgspec.json.encode(value))


def packed(message: FromWorker | FromExecutor) -> bytes:
    """A message as it travels. TypeError, ValueError where something in it is no JSON."""
    body = msgspec.json.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what arrives into messages again."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete now."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            message = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield message
