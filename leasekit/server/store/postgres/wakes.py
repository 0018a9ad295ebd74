"""Messages between the nodes of a database, by NOTIFY. What they mean, `neighbours` knows.

They are sent outside the transactions that they are about, because commits that notify wait for each other.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

import psycopg

from leasekit.errors import BackendError
from leasekit.server.store.postgres.session import Connection
from leasekit.server.store.postgres.view import PostgresView

logger = logging.getLogger("leasekit.server")

_CHANNEL = "leasekit"
_LOOK = 0.5  # seconds between two looks at whether to stop
_AGAIN = 1.0  # seconds until a lost connection is made again


class Wakes:
    """A thread that listens, on a connection of its own, until `stop`."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        node: str,
        heard: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._node = node
        self._heard = heard
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leasekit-listener", daemon=True)
        self._thread.start()

    @staticmethod
    def tell(view: PostgresView, node: str, messages: Sequence[str]) -> None:
        """Send messages: those of a node have its id in front, and need not survive a crash."""
        notes = [f"{node} {message}" for message in messages]
        view.execute(
            "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, note) FROM unnest(%s::text[]) AS note",
            *(_CHANNEL, notes),
        )

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with contextlib.closing(self._connect()) as connection:
                    self._listen(connection)
            except (psycopg.Error, BackendError) as error:
                logger.debug("the other nodes are not heard at the moment: %s", error)
                self._is_over.wait(_AGAIN)

    def _listen(self, connection: Connection) -> None:
        connection.execute(f"LISTEN {_CHANNEL}")
        while not self._is_over.is_set():
            for note in connection.notifies(timeout=_LOOK):
                node, _, message = note.payload.partition(" ")
                if node != self._node:
                    self._heard(message)
