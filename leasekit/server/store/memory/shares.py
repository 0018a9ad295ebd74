"""Changes of shares and limits of keys in a store in memory, which claims take from."""

import bisect
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from leasekit.server.store import Lane, Share, Trigger
from leasekit.server.store.memory.tables import NEVER, chosen
from leasekit.server.store.memory.tasks import MemoryTasks

NONE_TAKEN = (0.0, False)


class MemoryShares(MemoryTasks):
    """Writes of shares and limits. `ShareWrites` describes the methods."""

    def ready(self, lane: Lane, *, now: float, after: tuple[float, int], limit: int) -> list[Trigger]:
        waiting = self._tables.lanes.get(lane.kind, {}).get(lane.priority, [])
        first = bisect.bisect_right(waiting, after)
        return self._due(waiting, first, first + limit, now=now)

    def active_shares(self, lane: Lane, *, after: Share, limit: int) -> list[Share]:
        of_lane = self._tables.shares.get(lane[:2], {})
        return sorted(
            share for key, (taken, active) in of_lane.items() if active and (share := Share(taken, key)) > after
        )[:limit]

    def joining_shares(self, lane: Lane, *, now: float, limit: int) -> list[Share]:
        shares, queues = self._tables.shares.get(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        waiting = ((key, max(waiting[0][0], self._left_until(lane[:2], key))) for key, waiting in queues.items())
        due = (key for key, due_at in waiting if due_at <= now and not shares.get(key, NONE_TAKEN)[1])
        return [self.share(lane, key) for key in islice(due, limit)]

    def share(self, lane: Lane, key: str) -> Share:
        return Share(self._tables.shares.get(lane[:2], {}).get(key, NONE_TAKEN)[0], key)

    def queued(
        self, lane: Lane, after: Mapping[str, tuple[float, int]], *, now: float, limit: int
    ) -> dict[str, list[Trigger]]:
        queues = self._tables.queues.get(lane[:2], {})
        firsts = {key: bisect.bisect_right(queues.get(key, []), last) for key, last in after.items()}
        return {key: self._due(queues.get(key, []), at, at + limit, now=now) for key, at in firsts.items()}

    def charge(self, lane: Lane, taken: Mapping[str, int], *, base: float, now: float) -> None:
        shares, queues = self._tables.shares.setdefault(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        for key, count in taken.items():
            was, active = shares.get(key, (base, False))
            start = was if active else min(max(was, base), base + 1)
            waiting = queues.get(key)
            self._put(shares, key, (start + count, waiting is not None and waiting[0][0] <= now))
            self._drop(self._tables.full.get(lane[:2], {}), key)

    def leave(self, lane: Lane, until: Mapping[str, float | None], *, most: int) -> None:
        shares, queues = self._tables.shares.setdefault(lane[:2], {}), self._tables.queues.get(lane[:2], {})
        for key in [key for key in until if key in queues]:
            again_at = until[key]
            self._put(self._tables.full.setdefault(lane[:2], {}), key, NEVER if again_at is None else again_at)
            self._put(shares, key, (shares.get(key, NONE_TAKEN)[0], False))

    def keep_places(self, seqs: Collection[int]) -> None:
        rows = [row for row in self.triggers_of(sorted(seqs)).values() if row.seq not in self._tables.routes]
        for row in rows:
            key = self._tables.keys.get(row.seq)
            if key and row.seq not in self._tables.kept and not self.running_of_keys(row.kind, [key]):
                self._undo.append(self._tables.keep(row.seq, kept=True))

    def drop_places_of(self, kind: str) -> None:
        self.drop_places([seq for seq in self._tables.kept if self._tables.triggers[seq].kind == kind])

    def drop_places(self, seqs: Collection[int]) -> bool:
        kept = self.kept_places(seqs)
        for seq in kept:
            self._undo.append(self._tables.keep(seq, kept=False))
        return bool(kept)

    def kept_places(self, seqs: Collection[int]) -> set[int]:
        return {seq for seq in seqs if seq in self._tables.kept}

    def free_keys(self, seqs: Collection[int]) -> list[Lane]:
        keys = {(row.kind, self._tables.keys.get(row.seq)) for row in self.triggers_of(seqs).values()}
        kinds = {kind for kind, _ in keys}
        full = self.full_keys([*kinds, *self.routes(kinds)], now=0.0, limit=sys.maxsize)
        return self._freed([(lane, key) for lane, key in full if (lane.kind, key) in keys and self._is_full(lane, key)])

    def free_keys_of(self, kinds: Collection[str], *, at_moments: bool = True) -> list[Lane]:
        full = self.full_keys(kinds, now=0.0, limit=sys.maxsize)
        return self._freed([(lane, key) for lane, key in full if at_moments or self._is_full(lane, key)])

    def _is_full(self, lane: Lane, key: str) -> bool:
        """Return whether a key has left its lane until the end of a run."""
        return self._left_until(lane[:2], key) == NEVER

    def _freed(self, full: Sequence[tuple[Lane, str]]) -> list[Lane]:
        for lane, key in full:
            self._drop(self._tables.full[lane[:2]], key)
        return [lane for lane, _ in full]

    def tend_shares(self, *, limit: int) -> None:
        for lane, shares in self._tables.shares.items():
            queues = self._tables.queues.get(lane, {})
            base = min((taken for taken, active in shares.values() if active), default=math.inf)
            idle = (key for key, (taken, _) in shares.items() if taken <= base and key not in queues)
            for key in list(islice(idle, limit)):
                self._drop(shares, key)

    def begin_starts(self, kinds: Collection[str]) -> Collection[str]:
        return kinds

    def buckets(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], float]:
        return chosen(self._tables.buckets, keys)

    def set_buckets(self, full_at: Mapping[tuple[str, str], float]) -> None:
        for key, at in full_at.items():
            self._put(self._tables.buckets, key, at)

    def fill_buckets(self, kind: str, *, full_by: float, of_keys: bool = False) -> None:
        full_at = self._tables.buckets
        self.set_buckets({key: full_by for key in self._buckets_of({kind}, of_keys=of_keys) if full_at[key] > full_by})

    def forget_buckets(self, kinds: Collection[str], *, now: float, limit: int) -> None:
        full = (key for key in self._buckets_of(kinds, of_keys=True) if self._tables.buckets[key] <= now)
        for key in list(islice(full, limit)):
            self._drop(self._tables.buckets, key)

    def _buckets_of(self, kinds: Collection[str], *, of_keys: bool) -> list[tuple[str, str]]:
        """Return the ⟨kind, key⟩ pairs of token buckets: of the keys of these kinds, or of the kinds as a whole."""
        return [key for key in self._tables.buckets if key[0] in kinds and bool(key[1]) == of_keys]
