"""The protocols for operators: what an adapter may implement so that they see and change the tasks of its service.

`leasekit.backend` has these names too. Each is a protocol of its own, because few services do all of it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, Protocol, Unpack, runtime_checkable

from leasekit.periodic import PeriodicInfo, PeriodicTask
from leasekit.task import (
    ChainCancelled,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Scheduled,
    Selection,
    Vacuumed,
    WorkerInfo,
)
from leasekit.tokens import AuditPage, Scope, TokenInfo


@runtime_checkable
class WorkerDirectory(Protocol):
    """A backend that also knows the workers of its tasks. Few services do, so this is a protocol of its own."""

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases, or called the service lately."""
        ...


@runtime_checkable
class WorkerDrainer(Protocol):
    """A backend by which operators have workers finish what they hold, take nothing new, and stop."""

    async def drain_worker(self, worker: str) -> WorkerInfo:
        """Drain a worker. Refused if no worker of this name holds leases, or called the service lately.

        From the answer on, no claim of the worker is granted a task by any process: each is answered at once, also one
        that waits, with `draining`. Claims of names are granted as ever. A process that started later under the same
        name is not drained, and ends the drain.
        """
        ...

    async def undrain_worker(self, worker: str) -> None:
        """Take a drain back; a worker that nobody drains is left as it is."""
        ...


@runtime_checkable
class NodeDirectory(Protocol):
    """A backend that also knows the nodes of its service: the processes that have the store open."""

    async def nodes(self) -> list[NodeInfo]:
        """List the nodes, also those that have left lately."""
        ...


@runtime_checkable
class KindDirectory(Protocol):
    """A backend that also keeps settings of kinds: options for tasks whose submissions do not give them."""

    async def kinds(self) -> list[KindInfo]:
        """List the kinds that have settings, sorted by name."""
        ...

    async def kind(self, kind: str) -> KindInfo | None:
        """Return the settings of a kind; None: it has none."""
        ...

    async def set_kind(
        self, kind: str, settings: KindSettings, *, is_declared: bool = False, was: KindSettings | None = None
    ) -> KindInfo:
        """Replace the settings of a kind. They hold for all tasks that are scheduled once this has returned.

        Tasks that were scheduled before keep their options. A kind of names, `named:` or `once:`, is refused.

        `is_declared`: the code of a worker says so. That takes effect once, for the settings in which it differs from
        what code declared before; the others stay as they are. Its repeats change nothing, nor does what older code
        says while workers repeat what newer code says.

        `was`: the settings that the kind was seen to have. A change of others is refused, with an error whose field is
        *was*, so that it undoes no change that its client has not seen. `KindSettings()`: it had none.
        """
        ...

    async def delete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        """Remove the settings of a kind, and what code has declared; a kind that has none is left as it is.

        `was`: as in `set_kind`.
        """
        ...


@runtime_checkable
class PeriodicDirectory(Protocol):
    """A backend that also keeps periodic tasks, and schedules a task at each of their firings."""

    async def list_periodic(self) -> list[PeriodicInfo]:
        """List the periodic tasks, sorted by name, each with its next firing."""
        ...

    async def get_periodic(self, name: str) -> PeriodicInfo | None:
        """Return a periodic task with its next firings; None: there is none of this name."""
        ...

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        """Add a periodic task, or replace when it fires and what is scheduled. A pause stays.

        `is_declared`: the code of a worker says so. That takes effect once: its repeats change nothing, nor does what
        older code says while workers repeat what newer code says.
        """
        ...

    async def pause_periodic(self, name: str, *, is_paused: bool = True) -> PeriodicInfo:
        """Pause a periodic task, or resume it; what falls into a pause is not made up for. Refused if there is none."""
        ...

    async def trigger_periodic(self, name: str, *, at: datetime) -> Scheduled:
        """Let a periodic task fire once, also if it is paused. Refused if there is none.

        The instant `at` is in the id of the task, so that a repeated call makes no second task.
        """
        ...

    async def delete_periodic(self, name: str) -> None:
        """Remove a periodic task, if there is one; the tasks that it has scheduled stay."""
        ...


@runtime_checkable
class TokenDirectory(Protocol):
    """A backend that also keeps access tokens, and a log of what operators did.

    Whoever reaches the store itself may do everything, like an access token with all scopes for all kinds.
    """

    async def tokens(self) -> list[TokenInfo]:
        """List the access tokens, the oldest first, also those that have ended lately."""
        ...

    async def token(self, token: str) -> TokenInfo | None:
        """Return an access token by its id, or by its name if it is valid; None: there is none."""
        ...

    async def create_token(
        self,
        *,
        token_id: str,
        name: str,
        digest: str,
        scopes: Sequence[Scope],
        kinds: Sequence[str],
        expires_at: datetime | None = None,
    ) -> TokenInfo:
        """Make an access token whose secret has this SHA-256; a repeat with the same id makes no second one."""
        ...

    async def revoke_token(self, token: str) -> TokenInfo:
        """End an access token, for good. Refused if there is none."""
        ...

    async def rotate_token(self, token: str, *, digest: str, overlap: float = 0.0) -> TokenInfo:
        """Give an access token another secret; the one before it is taken for `overlap` seconds more."""
        ...

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        """Return a page of the log of what operators did, the latest first."""
        ...


@runtime_checkable
class GateDirectory(Protocol):
    """A backend with gates: it does not start the tasks of a kind or a collection whose gate is closed.

    Running tasks go on, and tasks are accepted. What is judged by a claim's answer: from the answer of `set_gate` on,
    no claim is granted such a task by any process.
    """

    async def gates(self) -> list[GateInfo]:
        """List the closed gates: those of kinds, then those of collections, sorted by name."""
        ...

    async def set_gate(
        self,
        *,
        kind: str | None = None,
        collection: str | None = None,
        mode: Literal["pause", "drop"] = "pause",
        until: datetime | None = None,
        duration: float | None = None,
        reason: str | None = None,
    ) -> GateInfo:
        """Close the gate of a kind or of a collection, in place of the gate that it has.

        Due tasks wait (*pause*), or end as *cancelled* (*drop*). The gate opens by itself at `until`, or `duration`
        seconds from now, by the service's clock. A kind of names, `named:` or `once:`, is refused.
        """
        ...

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        """Open a gate; a kind or collection that has none is left as it is."""
        ...


@runtime_checkable
class ChainDirectory(Protocol):
    """A backend that knows what each task came from: its `parent`, and the `root` of the chain.

    Such a backend also has the argument `root` of `list_tasks`: the first task of a chain, and all that came from it.
    """

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        """Cancel the tasks of the chain of this task that have not ended.

        One call is one step; its `cursor` begins the next one. From the answer to the first step on, a task that comes
        from this chain, by a run that goes on, is cancelled where it is accepted.
        """
        ...


@runtime_checkable
class Rescheduler(Protocol):
    """A backend that can change a task that waits."""

    async def reschedule(
        self,
        task_id: str,
        *,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        request_id: str | None = None,
    ) -> Rescheduled:
        """Have a waiting task be due at `at`, or `delay` seconds from now, and in the lane of this priority.

        What is not given stays. Other tasks for which it waits, gates, limits and the turn of its key hold as before.
        Refused with the reason if the task runs, has ended or is unknown. A repeat of the last call for the task, with
        the same `request_id`, changes nothing, and is answered with the task as it is now.
        """
        ...


@runtime_checkable
class BulkChanger(Protocol):
    """A backend that can cancel or reschedule all tasks that match, after a dry run.

    One call is one step, whose `cursor` begins the next one. A dry run counts, and its answer has the token that the
    act takes; further steps of a dry run take it too. An act changes no task that was scheduled after the first step of
    the dry run. A repeated step of a cancel changes and counts what is left.
    """

    async def cancel_matching(
        self, *, dry_run: bool = False, token: str | None = None, cursor: str | None = None, **wanted: Unpack[Selection]
    ) -> Matched:
        """Cancel the tasks that match and have not ended. Refused with a token of another request, or without one."""
        ...

    async def reschedule_matching(
        self,
        *,
        at: datetime | None = None,
        delay: float | None = None,
        priority: int | None = None,
        dry_run: bool = False,
        token: str | None = None,
        cursor: str | None = None,
        **wanted: Unpack[Selection],
    ) -> Matched:
        """Reschedule the tasks that match and wait, as `Rescheduler` does. Refused as a cancel is."""
        ...


@runtime_checkable
class Purger(Protocol):
    """A backend that also removes tasks that have ended, before their retention is over."""

    async def purge(
        self,
        task_ids: Sequence[str] = (),
        *,
        older_than: float = 0.0,
        cursor: str | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Purged:
        """Remove these tasks, or those that match, if they ended at least `older_than` seconds ago, or only count them.

        One call is one step: it removes so few tasks that no heartbeat waits long, and its `cursor` begins the next
        step. A task that has not ended, or whose end other tasks have still to be told, stays. A repeated step removes
        what is left, and counts only that.
        """
        ...

    async def vacuum(self) -> Vacuumed:
        """Give back a part of the file's free space, as small as a step of `purge`. Raises `Refused` without a file."""
        ...


@runtime_checkable
class DeadLetters(Protocol):
    """A backend in which an operator can look at dead tasks, begin new lives of them, and remove them.

    A call is for the tasks that it names, or for those that match a `Selection`. `status` is *dead* if it is not given;
    *fatal_failure* and *dropped* can be redriven too.

    A service that does not know single tasks (`TaskSink` only) takes a `kind` alone. It refuses what it cannot select,
    lists a sample, and redrives and removes all dead tasks of the kind, in the background.
    """

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Unpack[Selection]) -> Page:
        """List the dead tasks that match, in an order that nothing changes; `cursor` is that of the page before.

        A page may have fewer tasks than `limit`, or none, and yet a cursor. Who walks through all pages gets each task
        once that matches all the while, also if others are redriven or removed meanwhile.
        """
        ...

    async def redrive(
        self,
        task_ids: Sequence[str] = (),
        *,
        redrive_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        rate: int | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Redriven:
        """Make tasks ready again that are dead, failed for good or dropped: these, or a page of those that match.

        A new life has no failures and crashes, and its attempts and fences continue those of the life before. The
        history of the task gets an entry *redriven*. A task that cannot be redriven is *failed* with the reason, and
        does not fail the others. The same ids under the same `redrive_id` have the same answer, and change nothing.

        A service that redrives in the background does so at most `rate` a second; the others redrive at once, and
        ignore `rate`.
        """
        ...

    async def purge(
        self,
        task_ids: Sequence[str] = (),
        *,
        older_than: float = 0.0,
        cursor: str | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Selection],
    ) -> Purged:
        """Remove tasks that have ended: see `Purger`."""
        ...
