"""Notes of pool processes, in memory that they share with their main process: the lease that each of them holds.

A pool process runs one task at a time, so it has one note. It removes the note once it has ended its lease itself.

The note says when the lease is lost unless another heartbeat is acknowledged. The kernel ends a pool process soon after
that, even if it is stopped, or its code holds the interpreter: then the process cannot say why.
"""

# pyright: basic, reportMissingTypeStubs=false
# Celery has no type annotations.

import math
import mmap
import os
import struct
import time
from enum import IntEnum

import msgspec
from billiard.process import current_process

from leasekit import Lease, Task
from leasekit.hooks import Event, Lost, Renewed

_MANY = 1024  # pool processes that have a note
_SIZE = 1024  # bytes of a note
_HEAD = struct.Struct("=dHB")  # when the lease is lost; the length of the rest; how far the run is (`Stage`)
_MOMENT = struct.Struct("=d")
_AT_STAGE = struct.calcsize("=dH")
TOLD = 0.0  # this moment: the lease was lost, and the pool process has said why
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the kernel's timer counts by it


class Stage(IntEnum):
    """How far the run of a pool process is."""

    BEGUN = 0
    ENDED = 1
    """Celery has done all that follows, and only the lease is still to be settled."""
    FOLLOWED = 2
    """The run has sent a retry, or its replacement: the task goes on, whatever becomes of this run."""
    REPLACED = 3
    """The same, and what follows may have the number of a run that has ended."""

    @property
    def has_successor(self) -> bool:
        """Whether another message of the task was sent, which needs the lease."""
        return self in (Stage.FOLLOWED, Stage.REPLACED)


class Note(msgspec.Struct, frozen=True):
    """The lease that a pool process holds, as its main process must know it."""

    pid: int
    task_id: str
    token: str
    ttl: float

    def task(self) -> Task:
        return Task(id=self.task_id, kind=self.task_id, token=self.token, ttl=self.ttl)


class Notes:
    """Memory that a main process and its pool processes share. Only this pool process writes its own note."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _MANY * _SIZE)
        self._held: Lease | None = None  # of this process

    def write(self, held: Lease) -> None:
        """Note that this pool process holds this lease."""
        task = held.task
        data = msgspec.json.encode(Note(os.getpid(), task.id, task.token, task.ttl))
        if (at := self._own()) is not None and len(data) <= _SIZE - _HEAD.size:
            self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
            _HEAD.pack_into(self._memory, at, _lost_at(held), len(data), 0)
            self._held = held

    def clear(self) -> None:
        """Remove the note of this pool process."""
        self._held = None
        if (at := self._own()) is not None:
            _HEAD.pack_into(self._memory, at, TOLD, 0, 0)

    def leave(self) -> None:
        """Remove the note of this pool process: its lease has ended. That it has a successor stays known."""
        at = self._own()
        if self._held is None or at is None or not Stage(self._memory[at + _AT_STAGE]).has_successor:
            self.clear()
        else:
            self._held = None
            _MOMENT.pack_into(self._memory, at, math.inf)

    def note_stage(self, stage: Stage) -> None:
        """Note how far the run of this pool process is."""
        if self._held is not None and (at := self._own()) is not None:
            self._memory[at + _AT_STAGE] = stage

    def hear(self, event: Event) -> None:
        """Note when the lease of this pool process is lost: a hook of its client."""
        held, at = self._held, self._own()
        if held is None or at is None:
            return
        if isinstance(event, Renewed) and held.task.id in event.task_ids:
            _MOMENT.pack_into(self._memory, at, _lost_at(held))
        elif isinstance(event, Lost) and event.token == held.task.token:
            _MOMENT.pack_into(self._memory, at, TOLD)

    def find(self, pid: int | None, task_id: str) -> tuple[Note, float, Stage] | None:
        """Return what a pool process has noted of this task's lease, when that is lost, and how far the run is."""
        for at in range(0, _MANY * _SIZE, _SIZE):
            lost_at, length, stage = _HEAD.unpack_from(self._memory, at)
            if length:
                note = msgspec.json.decode(self._memory[at + _HEAD.size : at + _HEAD.size + length], type=Note)
                if (note.pid, note.task_id) == (pid, task_id):
                    return note, lost_at, Stage(stage)
        return None

    def _own(self) -> int | None:
        index = getattr(current_process(), "index", _MANY)
        return index * _SIZE if index < _MANY else None


def _lost_at(held: Lease) -> float:
    return time.clock_gettime(CLOCK) + held.remaining()
