"""Chains: what each task came from, and the cancel of all tasks that came from one.

Rule 1: a task that came from another has a row: its parent, and its root, the first task of the chain. Other tasks have
        none, and cost nothing.
Rule 2: a chain is cancelled by a mark, and then task by task, in steps. A task that is added later, by a run that goes
        on, finds the mark, and is cancelled where it is added.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from leasekit._lifecycle.states import Event
from leasekit._lifecycle.transitions import NO_LIMITS, end_run
from leasekit.named import PREFIXES
from leasekit.server.store import Filter, Trigger, View
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import NewTask

STEP = 200  # tasks of a chain that one step cancels


class Part(NamedTuple):
    """The tasks of one step that have not ended, and after which task the next step begins (None: this is the last)."""

    root: str
    ids: Sequence[str]
    after: int | None


def parent_of(task: NewTask) -> str | None:
    """Return the parent of a new task: the task whose run scheduled it, or else the first task that it waits for."""
    if task.kind.startswith(PREFIXES):
        return None
    return task.parent or (task.after[0] if task.after else None)


def add(turn: UnitOfWork, rows: Sequence[Trigger], parents: Mapping[str, str]) -> list[Trigger]:
    """Note from which tasks these new ones come; return their states, *cancelled* if their chain is."""
    known = turn.tx.roots(set(parents.values()))
    roots = roots_of([row.id for row in rows if row.id in parents], parents, known)
    turn.tx.add_to_chains([(row.seq, parents[row.id], roots[row.id]) for row in rows if row.id in roots])
    turn.tell_of_chains(roots)
    over = turn.tx.cancelled_chains(set(roots.values()))
    return [_cancelled(turn, row, roots[row.id]) if roots.get(row.id) in over else row for row in rows]


def roots_of(ids: Sequence[str], parents: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the root of each of these tasks, whose parents may be new too; a thousand may be in a row."""
    found: dict[str, str] = {}
    for task_id in ids:
        way, last = {task_id}, task_id
        while last not in found and (parent := parents.get(last)) is not None and parent not in way:
            way.add(last := parent)
        root = found[last] if last in found else known.get(last, last)
        found.update(dict.fromkeys(way, root))
    return {task_id: found[task_id] for task_id in ids}


def _cancelled(turn: UnitOfWork, row: Trigger, root: str) -> Trigger:
    if row.status.ended:
        return row
    ended = end_run(row, Event.CANCEL, limits=NO_LIMITS, now=turn.now)
    ended = replace(ended, reason=f'the chain of "{root}" was cancelled')
    turn.tell("cancelled", ended)
    return ended


def mark(turn: UnitOfWork, ids: Sequence[str]) -> Sequence[str]:
    """Note that the chains of these tasks are cancelled.

    Each task that is added without a look at the mark is in the store once this transaction has ended.
    """
    turn.tx.begin_change()
    roots = turn.tx.roots(set(ids))
    turn.tx.cancel_chains(set(roots.values()), at=turn.now)
    return ids


def part(view: View, task_id: str, *, after: int) -> Part:
    """Return the next tasks of the chain of a task that are to be cancelled."""
    root = view.roots([task_id]).get(task_id, task_id)
    seqs = view.chained(root, after=after, newest=False, limit=STEP)
    rows = view.page(Filter(), after=after, limit=STEP, among=seqs)
    return Part(root, [row.id for row in rows if not row.status.ended], rows[-1].seq if len(rows) == STEP else None)
