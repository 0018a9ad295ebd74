"""Which checkpoint of a task is kept: of all that one holder has reported, the last one, in whatever order they come.

Two beats of a lease may be under way at once, one that timed out and the next, and a proxy may deliver the first last.
"""

from msgspec import UNSET

from leasekit.server.store import Checkpoint, Trigger, Tx
from leasekit.server.turn import to_bytes
from leasekit.task import Beat, Settlement

__all__ = ["Progress"]


class Progress:
    """The checkpoints of one batch.

    One without a number is taken as it comes: its holder says nothing of an order, or has reported it with its result,
    after all others.
    """

    def __init__(self) -> None:
        self._latest: dict[int, Checkpoint] = {}
        self._numbered: set[int] = set()

    def report(self, row: Trigger, item: Beat | Settlement) -> None:
        """Take what the holder of this task says, if it says something of its progress."""
        if item.progress is UNSET:
            return
        checkpoint = Checkpoint(to_bytes(item.progress), row.fence, item.progress_seq or 0)
        if item.progress_seq is None:
            self._numbered.discard(row.seq)
        elif row.seq in self._latest and checkpoint.mark < self._latest[row.seq].mark:
            return
        else:
            self._numbered.add(row.seq)
        self._latest[row.seq] = checkpoint

    def save(self, tx: Tx) -> None:
        """Keep them, but for those that are older than what is kept."""
        if not self._latest:
            return
        known = tx.progress_marks(self._numbered) if self._numbered else {}
        late = {seq for seq in self._numbered if seq in known and self._latest[seq].mark < known[seq]}
        tx.set_progress({seq: checkpoint for seq, checkpoint in self._latest.items() if seq not in late})
