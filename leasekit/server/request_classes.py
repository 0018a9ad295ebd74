"""The classes of requests that the writer of an engine serves: what applies each, its size, and its rank under load."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Raw

from leasekit.server.commit import RequestClass
from leasekit.server.enqueuer import ENQUEUEING
from leasekit.server.history import write as write_minutes
from leasekit.server.inbox import SET_ASIDE, TAKE_IN
from leasekit.server.roles import (
    bulk,
    chains,
    claims,
    consumer,
    drains,
    firing,
    following,
    frontend,
    gates,
    hsc,
    kinds,
    periodic,
    redrive,
    rescheduling,
    tokens,
)
from leasekit.server.roles.audit import Counted, together
from leasekit.server.store.routes import route_of
from leasekit.server.sweeper import SWEEPING
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Beat, NewTask, Settlement

_T = TypeVar("_T")
_V = TypeVar("_V")

# The size of a request, which the bounds of the group commit count ---------------------------------------------

_BLOCK = 1024  # bytes of a value that cost about as much as a task
KINDS_OF_A_TASK = 8  # kinds of a claim that cost about as much as a task


def work_of_task(task: NewTask) -> int:
    """Return how much work a task is: a wait costs about as much as a task, and so does a tag."""
    return 1 + _blocks(task.payload) + len(task.after) + len(task.tags)


def work_of_beat(beat: Beat) -> int:
    return 1 + _blocks(beat.progress)


def work_of_settlement(settlement: Settlement) -> int:
    values = (settlement.result, settlement.error, settlement.progress)
    return 1 + sum(map(_blocks, values)) + sum(map(work_of_task, settlement.then))


def lane_of(task: NewTask) -> str:
    """Return the name of the lanes of a task: its kind, or its route."""
    return route_of(task) or task.kind


def _blocks(value: Any) -> int:
    return memoryview(value).nbytes // _BLOCK if type(value) is Raw else 0


def _itemwise(
    role: Callable[[UnitOfWork, Sequence[_T]], list[_V]],
) -> Callable[[UnitOfWork, Sequence[Any]], Sequence[Any]]:
    def apply(turn: UnitOfWork, requests: Sequence[Sequence[_T]]) -> list[list[_V]]:
        if len(requests) == 1:
            return [role(turn, requests[0])]
        answers = iter(role(turn, [item for request in requests for item in request]))
        return [[next(answers) for _ in request] for request in requests]

    return apply


def _each(role: Callable[[UnitOfWork], _V]) -> Callable[[UnitOfWork, Sequence[Any]], Sequence[Any]]:
    """Make a role without a batch run once for each request."""
    return lambda turn, requests: [role(turn) for _ in requests]


def _cancel(turn: UnitOfWork, requests: Sequence[Sequence[frontend.Cancel]]) -> list[Counted[Any]]:
    return [together(parts) for parts in _itemwise(frontend.cancel)(turn, requests)]


HEARTBEAT = RequestClass("heartbeats", _itemwise(hsc.heartbeat), 100_000, weight=0.5)  # a third of a claim, or less
RELEASE = RequestClass("releases", _itemwise(hsc.results), 100_000)
RESULTS = RequestClass("results", _itemwise(hsc.results), 50_000)
REAP = RequestClass("reapings", _each(consumer.look), 10)
CANCEL = RequestClass("cancels", _cancel, 10_000, is_act=True)
CLAIM = RequestClass("claims", claims.claim, 20_000, is_last=True)  # last: claims get what the others make ready
SCHEDULE = RequestClass("schedules", _itemwise(frontend.schedule), 20_000)
REDRIVE = RequestClass(
    "redrives", lambda turn, plans: [redrive.redrive(turn, plan) for plan in plans], 10_000, is_act=True
)
RESCHEDULE = RequestClass("reschedules", rescheduling.reschedule, 10_000, is_act=True)
CANCEL_MATCHING = RequestClass("bulk cancels", bulk.cancel, 1000, is_act=True)
RESCHEDULE_MATCHING = RequestClass("bulk reschedules", bulk.reschedule, 1000, is_act=True)
SET_KIND = RequestClass("kinds", kinds.change, 1000, is_last=True, is_act=True)  # last: see `KindDefaults`
SET_GATE = RequestClass("gates", gates.change, 1000, is_last=True, is_act=True)  # last: see `KindDefaults`
SET_DRAIN = RequestClass("drains", drains.change, 1000, is_last=True, is_act=True)  # last: as above
KEEP_GATES = RequestClass(
    "gatekeepings", lambda turn, asked: [gates.keep(turn, most=gates.STEP)] * len(asked), 10_000, is_last=True
)
CANCEL_CHAIN = RequestClass("chains", chains.mark, 1000, is_last=True)  # last: it waits for the other writers
KEEP_FOLLOWERS = RequestClass("followings", _each(following.keep), 10_000)
FIRE = RequestClass("firings", lambda turn, asked: [firing.fire(turn, names) for names in asked], 10_000)
MINUTES = RequestClass("minutes", write_minutes, 50_000)
SET_PERIODIC = RequestClass("periodic tasks", periodic.change, 1000, is_act=True)
SET_TOKEN = RequestClass("access tokens", tokens.change, 1000, is_last=True, is_act=True)  # last: as above
USE_TOKENS = RequestClass("uses of access tokens", tokens.use, 1000)
SESSION = RequestClass("sessions of the console", tokens.change_sessions, 1000)
NOTE = RequestClass("entries of the audit log", _each(lambda turn: Counted(None, 0)), 1000, is_act=True)
PROBE = RequestClass("probes", _each(lambda turn: turn.tx.probe_write()), 100)

SURVIVAL = (
    HEARTBEAT,
    RELEASE,
    RESULTS,
    REAP,
    CANCEL,
    CLAIM,
    *ENQUEUEING,
    SCHEDULE,
    RESCHEDULE,
    CANCEL_MATCHING,
    RESCHEDULE_MATCHING,
    REDRIVE,
    KEEP_GATES,
    KEEP_FOLLOWERS,
    FIRE,
    TAKE_IN,
    SET_ASIDE,
    SET_PERIODIC,
    CANCEL_CHAIN,
    SET_KIND,
    SET_GATE,
    SET_DRAIN,
    SET_TOKEN,
    USE_TOKENS,
    SESSION,
    NOTE,
    *SWEEPING,
    MINUTES,
    PROBE,
)
"""The order in which classes are served under load: heartbeats first."""
