"""Directory: the workers that a node has heard of, when, and the kinds that they claim; and the nodes themselves.

The nodes that share a store write their workers into their signs, so that each lists the workers of all.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from leasekit.server.roles.frontend import moment
from leasekit.server.store import DrainRow, Holding, Node, NodeRow
from leasekit.task import NodeInfo, WorkerInfo
from leasekit.wire import WorkerWindow

_KINDS = 1000  # of one worker, at most: a named lease is a kind of its own
_TOKENS = 8  # that are noted of one worker: its own, and some that came before
_BYTES = 262_144  # of what a node writes of its workers; the workers that it has not heard for longest are left out
_RATE = 20_000  # bytes a second that it writes, on average


class Heard(Struct, frozen=True, array_like=True):
    """A worker, as a node has heard of it."""

    name: str
    at: float
    kinds: list[str] | None
    labels: dict[str, str] | None = None
    window: WorkerWindow | None = None
    tokens: list[str] = []
    """The access tokens that have used the name."""


class Start(NamedTuple):
    """The start of a worker, as a claim has told it."""

    at: float = -math.inf
    caller: str = ""
    """The access token of the claim, as in `Directory.tokens`."""


_LONG_AGO = Start()
_NO_LABELS: Mapping[str, str] = {}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Heard]).decode
_OTHERS = _encode(("", 0, None))  # in place of workers that are left out


class Directory:
    """The workers of one node. `len` is their number."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # worker → when it was last heard of
        self._kinds: dict[str, dict[str, None]] = {}  # worker → its kinds, the one that was claimed last at the end
        self._labels: dict[str, Mapping[str, str]] = {}  # worker → the labels of its last claim, if it has any
        self._windows: dict[str, WorkerWindow] = {}
        self._starts: dict[str, Start] = {}  # of workers whose last claim has said it
        self._tokens: dict[str, set[str]] = {}  # worker → the access tokens that have used the name
        self._write_at = -math.inf

    def __len__(self) -> int:
        return len(self._seen)

    def hear(self, worker: str, now: float, *, caller: str = "") -> bool:
        """Note that a worker has called, with this access token ("": with none); return whether it is new here."""
        is_new = worker not in self._seen
        self._seen[worker] = now
        tokens = self._tokens.setdefault(worker, set())
        if caller not in tokens:
            tokens.add(caller if len(tokens) < _TOKENS else "")
        return is_new

    def claims(
        self,
        worker: str,
        kinds: Iterable[str],
        labels: Mapping[str, str] = _NO_LABELS,
        *,
        since: float | None = None,
        caller: str = "",
    ) -> None:
        if since is not None:
            self._starts[worker] = Start(since, caller)
        if labels:
            self._labels[worker] = labels
        else:
            self._labels.pop(worker, None)
        known = self._kinds.setdefault(worker, {})
        for kind in kinds:
            known.pop(kind, None)
            known[kind] = None
        while len(known) > _KINDS:
            del known[next(iter(known))]

    def start_of(self, worker: str) -> Start:
        """Return when the worker of the last claim of this name started; long ago: it has not said."""
        return self._starts.get(worker, _LONG_AGO)

    def tokens(self, elsewhere: Iterable[bytes]) -> dict[str, set[str]]:
        """Return by which access tokens the name of each worker was used, here and elsewhere.

        "" stands for a request that needed none, and for more tokens than are noted. The worker "" stands for those
        that another node has left out.
        """
        found = {worker: set(tokens) for worker, tokens in self._tokens.items()}
        for written in elsewhere:
            for worker in _decode(written):
                found.setdefault(worker.name, set()).update(worker.tokens or [""])
        return found

    def note_window(self, worker: str, window: WorkerWindow) -> None:
        self._windows[worker] = window

    def forget(self, *, before: float) -> list[str]:
        """Forget the workers that have not called since then, and return them."""
        silent = [worker for worker, at in self._seen.items() if at < before]
        for worker in silent:
            del self._seen[worker]
            self._kinds.pop(worker, None)
            self._labels.pop(worker, None)
            self._windows.pop(worker, None)
            self._starts.pop(worker, None)
            self._tokens.pop(worker, None)
        return silent

    def written(self, now: float) -> bytes | None:
        """Return the directory as the other nodes read it; None: it was written a moment ago."""
        if now < self._write_at:
            return None
        rows: list[bytes] = []
        size = 2
        for name, at in sorted(self._seen.items(), key=lambda item: item[1], reverse=True):
            more = [self._labels.get(name), self._windows.get(name), sorted(self._tokens[name])]
            while more and more[-1] in (None, [""]):  # the defaults
                more.pop()
            row = _encode((name, round(at, 1), self._kinds_of(name), *more))
            size += len(row) + 1
            if size > _BYTES - len(_OTHERS) - 1:
                rows.append(_OTHERS)
                break
            rows.append(row)
        written = b"[" + b",".join(rows) + b"]"
        self._write_at = now + len(written) / _RATE
        return written

    def workers(
        self, running: Mapping[str, Holding], elsewhere: Iterable[bytes] = (), drains: Iterable[DrainRow] = ()
    ) -> list[WorkerInfo]:
        """List the workers that hold leases, or were heard of here, or elsewhere as other nodes have written it."""
        drained_at = {row.worker: moment(row.at) for row in drains}
        seen, labels = dict(self._seen), dict(self._labels)
        kinds = {name: known for name in seen if (known := self._kinds_of(name)) is not None}
        windows = dict(self._windows)
        for written in elsewhere:
            for worker in _decode(written):
                if not worker.name:
                    continue
                if worker.labels is not None and worker.at >= seen.get(worker.name, worker.at):
                    labels[worker.name] = worker.labels
                if worker.window is not None and worker.at >= seen.get(worker.name, worker.at):
                    windows[worker.name] = worker.window
                seen[worker.name] = max(worker.at, seen.get(worker.name, worker.at))
                if worker.kinds is not None:
                    kinds[worker.name] = sorted({*worker.kinds, *kinds.get(worker.name, ())})
        return [
            WorkerInfo(
                name=name,
                last_seen=moment(seen[name]) if name in seen else None,
                running=(held := running.get(name, Holding())).running,
                kinds=kinds.get(name),
                labels=dict(labels.get(name, {})),
                ttl=held.ttl,
                window=None if (window := windows.get(name)) is None else window.size,
                waiting=None if window is None else window.waiting,
                draining_since=drained_at.get(name),
            )
            for name in sorted(seen.keys() | running.keys())
        ]

    def _kinds_of(self, worker: str) -> list[str] | None:
        return sorted(known) if (known := self._kinds.get(worker)) is not None else None


def node_info(row: NodeRow, *, correction: float = 0.0) -> NodeInfo:
    """Describe a node; `correction` is the seconds by which the wall clock is ahead of the clock of its moments."""
    return NodeInfo(
        id=row.id,
        name=row.name,
        version=row.version,
        role="process" if row.address is None else "server",
        address=row.address,
        started_at=moment(row.started_at + correction),
        last_seen=moment(row.seen + correction),
        has_left=row.has_left,
    )


def only_node(node_id: str, *, address: str | None = None, started_at: float, now: float) -> list[NodeInfo]:
    """Describe this process, as the only node of a store."""
    node = Node.of_this_process(node_id)
    row = NodeRow(
        node.id, node.name, node.version, address, wants_events=False, started_at=started_at, seen=now, has_left=False
    )
    return [node_info(row)]
