"""Cancel hints: the ids of running tasks whose cancel was requested, for holders that wait to hear of it.

A hint only makes the holder send its next heartbeat early, whose answer says that a cancel was requested. So hints may
be lost.
"""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from leasekit.task import Verdict

_MOST = 1000  # ids that are kept for a worker between two of its calls


def _resolve(answer: "asyncio.Future[list[str]]", ids: list[str]) -> None:
    if not answer.done():
        answer.set_result(ids)


class CancelHints:
    """The hints for workers that have waited for one at least once. Any thread and any event loop may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, list[str]] = {}  # worker → the hints that came between its calls
        self._waiting: dict[str, list[asyncio.Future[list[str]]]] = {}  # worker → its calls
        self._has_ended = False

    def tell(self, cancelled: Iterable[tuple[Verdict, str | None]]) -> list[Verdict]:
        """Give hints to the holders of cancelled tasks, each of which comes with its verdict; return the verdicts."""
        verdicts: list[Verdict] = []
        holders: dict[str, list[str]] = {}
        for verdict, holder in cancelled:
            verdicts.append(verdict)
            if holder is not None:
                holders.setdefault(holder, []).append(verdict.id)
        for holder, ids in holders.items():
            with self._lock:
                waiting, kept = self._waiting.pop(holder, None), self._kept.get(holder)
                if waiting is None and kept is not None:
                    kept += ids[: _MOST - len(kept)]
            self._answer(waiting or (), ids)
        return verdicts

    async def wait(self, worker: str, seconds: float) -> list[str]:
        """Return the hints for `worker` since its last call; wait up to `seconds` for the first."""
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        with self._lock:
            kept = self._kept.setdefault(worker, [])
            if kept or self._has_ended:
                self._kept[worker] = []
                return kept
            self._waiting.setdefault(worker, []).append(answer)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return []
        finally:
            self._leave(worker, answer)

    def _leave(self, worker: str, answer: "asyncio.Future[list[str]]") -> None:
        with self._lock:
            waiting = self._waiting.get(worker, [])
            if answer in waiting:
                waiting.remove(answer)
                if not waiting:  # hints are kept from now on
                    del self._waiting[worker]

    def forget(self, worker: str) -> None:
        with self._lock:
            self._kept.pop(worker, None)

    def end(self) -> None:
        """Answer all calls that wait now, and later ones at once."""
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            self._answer(answers, [])

    def _answer(self, waiting: Sequence["asyncio.Future[list[str]]"], ids: list[str]) -> None:
        for answer in waiting:
            with suppress(RuntimeError):  # its loop is closed
                answer.get_loop().call_soon_threadsafe(_resolve, answer, ids)
