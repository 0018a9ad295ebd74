"""The leases of a store in memory, and what runs leave."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice, takewhile

from msgspec.structs import replace

from leasekit.server.store import Anchor, Checkpoint, ClaimMemory, Dedupe, Run, Trigger, shifted
from leasekit.server.store.memory.tables import chosen
from leasekit.server.store.memory.tasks import MemoryTasks


class MemoryLeases(MemoryTasks):
    """Writes of leases. `LeaseWrites` describes the methods."""

    def expired(self, *, now: float, limit: int) -> list[Trigger]:
        return self._due(self._tables.leases, 0, limit, now=now)

    def follow_leases(self, *, now: float, limit: int) -> None:
        """Do nothing: a renewal sorts its lease."""

    def restart_leases(self, *, now: float, shift: float | None) -> None:
        for row in self._leased():
            until = now + max(row.claim_timeout, row.heartbeat_timeout) * (1 + (row.seq % 100) / 1000)
            if row.was_extended and shift is not None:
                until = min(until, (row.next_trigger_at or 0.0) + shift)
            run_until = shifted(row.run_until, shift)
            self.save([replace(row, next_trigger_at=until, run_until=run_until, was_extended=True)])

    def anchor(self) -> Anchor | None:
        return self._tables.anchors.get(None)

    def set_anchor(self, anchor: Anchor) -> None:
        self._put(self._tables.anchors, None, anchor)

    def progress_marks(self, seqs: Collection[int]) -> dict[int, tuple[int, int]]:
        return {seq: checkpoint.mark for seq, checkpoint in self.progress(seqs).items()}

    def set_progress(self, values: Mapping[int, Checkpoint]) -> None:
        for seq, checkpoint in values.items():
            self._put(self._tables.progress, seq, checkpoint)

    def add_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            of_task = self._tables.runs.setdefault(run.seq, {})
            if run.fence in of_task:
                raise ValueError(f"there is a run {run.fence} of task {run.seq} already")
            self._put(of_task, run.fence, run)

    def forget_runs(self, keys: Sequence[tuple[int, int]]) -> None:
        for seq, fence in keys:
            self._drop(self._tables.runs.get(seq, {}), fence)

    def runs(self, seqs: Collection[int]) -> list[Run]:
        of_tasks = chosen(self._tables.runs, seqs).values()
        return [replace(run, result=None, error=None) for of_task in of_tasks for run in of_task.values()]

    def set_dedupes(self, dedupes: Sequence[Dedupe]) -> None:
        for first in dedupes:
            self._put(self._tables.dedupes, first[:2], first)

    def claim_memories(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], ClaimMemory]:
        return chosen(self._tables.claims, keys)

    def remember_claims(self, claims: Sequence[ClaimMemory]) -> None:
        for memory in claims:
            self._put(self._tables.claims, memory[:2], memory)

    def forget_claims(self, *, before: float, limit: int) -> int:
        # In the order in which they were granted: the first one that is not old ends the search.
        old = list(islice(takewhile(lambda item: item[1].granted_at < before, self._tables.claims.items()), limit))
        for key, _ in old:
            self._drop(self._tables.claims, key)
        return len(old)
