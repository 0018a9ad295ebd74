"""Lease kinds: of which kinds the tasks are whose leases callers renew, looked up once for each lease.

Rule: a lease is a task's id with the token of its claim, which no other claim has. It is of one kind until its end. So
what was found for a lease tells nothing of another lease, also if its task is removed, and its id used again.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

from leasekit.task import Beat

_MOST = 20_000  # leases that are remembered, of about 300 bytes each


class LeaseKinds:
    """The kinds of leases of one server; for the event loop. `kinds_of` asks the store for kinds of tasks."""

    def __init__(self, kinds_of: Callable[[Collection[str]], Awaitable[dict[str, str]]]) -> None:
        self._kinds_of = kinds_of
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def of(self, beats: Sequence[Beat]) -> list[str | None]:
        """Return the kind of each lease that is renewed; None: there is no such task."""
        leases = [(beat.id, beat.token) for beat in beats]
        kinds: dict[tuple[str, str], str] = {lease: self._known[lease] for lease in leases if lease in self._known}
        if unknown := [lease for lease in leases if lease not in kinds]:
            found = await self._kinds_of({task_id for task_id, _ in unknown})
            new = {lease: found[lease[0]] for lease in unknown if lease[0] in found}
            kinds |= new
            self._known |= new
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return [kinds.get(lease) for lease in leases]
