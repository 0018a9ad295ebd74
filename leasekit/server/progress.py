"""Checkpoints: keep the last one that a holder has reported, in whatever order the reports arrive.

Two beats of a lease may be under way at once, one that timed out and the next, and a proxy may deliver the first last.
"""

from msgspec import UNSET

from leasekit.server.store import Checkpoint, Trigger, Tx
from leasekit.server.unit_of_work import to_bytes
from leasekit.task import Beat, Settlement


class Progress:
    """The checkpoints of one batch.

    A checkpoint without a number is kept in order of arrival: its holder does not number reports, or has sent it with
    the result, after all others. It takes over the number of the checkpoint that it replaces, and so stays the later.
    """

    def __init__(self) -> None:
        self._reported: dict[int, list[tuple[int, int | None, bytes]]] = {}  # seq → fence, number, value

    def report(self, row: Trigger, item: Beat | Settlement) -> None:
        if item.progress is not UNSET:
            report = (row.fence, item.progress_seq, to_bytes(item.progress))
            self._reported.setdefault(row.seq, []).append(report)

    def save(self, tx: Tx, *, now: float) -> None:
        """Write the last checkpoint of each task, unless it is older than the stored one."""
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
                    latest[seq] = Checkpoint(value, *own, now)
        tx.set_progress(latest)
