"""Which checkpoint of a task is kept: of all that one holder has reported, the last one, in whatever order they come.

Two beats of a lease may be under way at once, one that timed out and the next, and a proxy may deliver the first last.
"""

from msgspec import UNSET

from leasekit.server.store import Checkpoint, Trigger, Tx
from leasekit.server.unit_of_work import to_bytes
from leasekit.task import Beat, Settlement

__all__ = ["Progress"]


class Progress:
    """The checkpoints of one batch.

    One without a number is taken as it comes: its holder says nothing of an order, or has reported it with its result,
    after all others. It has the number of the one that it replaces: what is older than that is older than it, too.
    """

    def __init__(self) -> None:
        self._reported: dict[int, list[tuple[int, int | None, bytes]]] = {}  # seq → fence, number, value

    def report(self, row: Trigger, item: Beat | Settlement) -> None:
        """Take what the holder of this task says, if it says something of its progress."""
        if item.progress is not UNSET:
            said = (row.fence, item.progress_seq, to_bytes(item.progress))
            self._reported.setdefault(row.seq, []).append(said)

    def save(self, tx: Tx) -> None:
        """Keep the last of each task, but for those that are older than what is kept."""
        if not self._reported:
            return
        marks = tx.progress_marks(self._reported)
        latest: dict[int, Checkpoint] = {}
        for seq, reports in self._reported.items():
            mark = marks.get(seq, (0, 0))
            for fence, number, value in reports:
                own = (fence, number) if number is not None else max((fence, 0), mark)
                if own >= mark:
                    mark = own
                    latest[seq] = Checkpoint(value, *own)
        tx.set_progress(latest)
