"""The memory that a node keeps from one transaction to the next: settings, gates and turns of kinds; and drains."""

import logging
from collections.abc import Mapping

import msgspec

from leasekit.server.kind_clock import KindClock
from leasekit.server.store import DrainRow, KindRow, Tx
from leasekit.server.store.gates import Gates
from leasekit.server.store.kind_rules import NO_RULES, KindRules, rules_of
from leasekit.task import CompleteSettings, KindSettings, effective

logger = logging.getLogger("leasekit.server")


_decode = msgspec.json.Decoder(KindSettings).decode  # ignores what only a newer leasekit knows


def decoded(row: KindRow) -> KindSettings | None:
    """Return the settings of a kind; None if it has none, or if its row is damaged, which the log then says."""
    if row.settings is None:
        return None
    try:
        return _decode(row.settings)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        why = "are damaged, and have no effect until they are set again"
        logger.error("the settings of kind %r %s: %s", row.name, why, error)
        return None


class KindDefaults:
    """The settings that kinds have for their tasks, the gates and the drains, as of the last transaction that asked.

    Rule 1: after a change of any kind, gate or drain, the next transaction reads what has changed.
    Rule 2: only what is committed is kept. So a transaction changes settings after all else that it does, and what is
    known of a store is dropped when the store fails: the store may have lost its last transactions.
    """

    def __init__(self) -> None:
        self._change = 0
        self._of_kind: dict[str, CompleteSettings] = {}
        self.fair: set[str] = set()  # the kinds in which a collection is the key of its tasks
        self.gates = Gates()  # as of the last `read`, also for other threads
        self.drains: Mapping[str, DrainRow] = {}  # the same, by worker
        self.rules: Mapping[str, KindRules] = {}  # the same, of the kinds that have any; replaced, never changed
        self.clock = KindClock()
        self.served: dict[str, int] = {}  # caller → in which transaction it was last granted tasks, of those that wait
        self.has_waits = False  # whether tasks wait for others, or ever did; also for other threads
        self.start_by: float | None = 0.0  # the first start deadline of any task, or earlier; None: there is none
        self.has_inbox = False  # whether applications have put tasks into the inbox; also for other threads
        self.fires_at: float | None = None  # when the next periodic task fires; also for other threads

    def read(self, tx: Tx) -> Mapping[str, CompleteSettings]:
        """Return the complete settings of each kind that has any."""
        last = tx.last_kind_change()
        if last != self._change:
            if last < self._change:
                self.clear()
            rules = dict(self.rules)
            for row in tx.kinds(after=self._change):
                self._of_kind.pop(row.name, None)
                self.fair.discard(row.name)
                rules.pop(row.name, None)
                if (settings := decoded(row)) is not None:
                    self._of_kind[row.name] = effective(settings)
                    if settings.fair is True:
                        self.fair.add(row.name)
                    if (of_kind := rules_of(settings)) != NO_RULES:
                        rules[row.name] = of_kind
            self.rules = rules
            self.gates = Gates(tx.gates())
            self.drains = {row.worker: row for row in tx.drains()}
            self._change = last
        return self._of_kind

    def clear(self) -> None:
        """Forget all."""
        self._change = 0
        self._of_kind = {}
        self.fair = set()
        self.gates = Gates()
        self.drains = {}
        self.rules = {}
