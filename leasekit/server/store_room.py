"""Whether a store has room for new tasks; tasks that exist go on without it."""

import logging

from leasekit.errors import Unavailable
from leasekit.server.store import Store

logger = logging.getLogger("leasekit.server")


class StoreRoom:
    """The room of one store, as of the last look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lack: str | None = None
        """Why no new tasks are accepted; None: they are."""

    def check(self) -> None:
        """Raise `Unavailable` if no new tasks are accepted."""
        if self.lack is not None:
            raise Unavailable(self.lack)

    def look(self) -> None:
        """Ask the store, and log a change."""
        was, self.lack = self.lack, self._store.cramped()
        if self.lack is not None and was is None:
            logger.error("no new tasks are accepted, existing tasks go on: %s", self.lack)
        elif was is not None and self.lack is None:
            logger.warning("there is room again: new tasks are accepted")
