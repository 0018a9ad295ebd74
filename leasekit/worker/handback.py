"""What a worker held when it ended is handed back, by who saw that nothing of it runs any more.

A body that had begun is a *crash*, with the reason: the task is ready again at once, and counts towards its
`max_crashes`. What had not begun is a *release*, and so is what was granted to a claim that was under way; such a claim
is ended, so that its request is granted nothing if it arrives only now. A result in the spool goes before both: the
task has been done. Any process that shares the spool may have taken the dead worker's file up by now, and may have died
too: what counts is that the result is in one of the files, not who reports it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from leasekit._driver.connection import Connection
from leasekit._driver.ledger import Asked, Holder, Left, Past
from leasekit._driver.outbox import Delivery, Outbox
from leasekit._driver.retrying import call_once, call_until
from leasekit._driver.spool import Spool
from leasekit.backend import Backend
from leasekit.client import Client
from leasekit.errors import BackendError
from leasekit.task import Settlement, Task

__all__ = ["hand_back"]

logger = logging.getLogger("leasekit")

_PATIENCE = 5.0  # seconds: a service that is away for longer holds up no new worker
_PAUSE = 0.02
_FOR_CLAIMS = 3.0  # of these, for ending the claims that were under way …
_A_TRY = 1.0  # … and for one request of that


def hand_back(past: Past, why: str, *, waiting: Callable[[float], bool]) -> None:
    """Report all that is left, to the service that it was claimed from, as far as that answers soon.

    What is unanswered then goes to the spool, and its service hears it from the next worker; without a spool those
    leases run out by themselves. `waiting` is called with seconds to wait; where it returns true this gives up.
    """
    holder = past.holder
    if holder is None or past.is_empty:
        return
    if holder.url is None:
        logger.warning("%d leases of the worker run out by themselves: its service has no URL", len(past.leases))
        return
    try:
        with Client(holder.url, worker=holder.worker) as client:
            connection = client.connection()
            reported = connection.driver.submit(_report(connection, holder, past, why))
            left = _PATIENCE
            while not reported.done() and left > 0 and not waiting(_PAUSE):
                left -= _PAUSE
            if reported.done():
                reported.result()
                return
            kept = "are reported by the next worker" if holder.spool else "run out by themselves"
            logger.warning("the service does not take back all leases of the worker now: they %s", kept)
            connection.run(connection.keeper.outbox.aclose())
    except Exception as error:  # noqa: BLE001 - a supervisor lives on, whatever is wrong with a service or an adapter
        logger.warning("the leases of the worker run out by themselves: %s: %s", type(error).__name__, error)


async def _report(connection: Connection, holder: Holder, past: Past, why: str) -> None:
    outbox = connection.keeper.outbox
    done: set[tuple[str, str]] = set()
    if holder.spool:
        spool = Spool(Path(holder.spool), holder.url or "")
        # Where that cannot be read, no lease is handed back: none is known to be without a result.
        done = await asyncio.to_thread(spool.unanswered)
        await outbox.use(spool)
    if connection.backend.traits.refuses_stale:
        back = [*past.said, *_settlements(past.leases, why)]
    else:
        # Nobody but the kernel's timer can say that these leases had not run out long before.
        guarded = [lease for lease in past.leases if holder.guarded and lease.begun and not lease.elsewhere]
        back = list(_settlements(guarded, why))
    back = _hand_over(back, outbox, done)
    if connection.backend.traits.remembers_claims:
        back += _hand_over(await _unheard(connection.backend, past), outbox, done)
    crashes = sum(settlement.outcome == "crash" for settlement in back)
    if back:
        logger.info("handed back: %d of the worker's leases, %d of them as crashed", len(back), crashes)
    await outbox.empty()


def _hand_over(back: Iterable[Settlement], outbox: Outbox, done: Collection[tuple[str, str]]) -> list[Settlement]:
    """Have these reported, but for those of tasks whose result is in the spool; return what is reported."""
    reported = [settlement for settlement in back if (settlement.id, settlement.token) not in done]
    for settlement in reported:
        outbox.put(Delivery(settlement))
    return reported


async def _unheard(backend: Backend, past: Past) -> list[Settlement]:
    """End the claims whose answers the worker did not live to hear, and release what they were granted."""
    noted = {lease.token for lease in past.leases}
    ended = await asyncio.gather(*(_end(backend, asked) for asked in past.asked))
    if reasons := [answer for answer in ended if isinstance(answer, str)]:
        logger.warning("what the worker was granted last may have to run out by itself: %s", reasons[0])
    granted = [task for answer in ended if not isinstance(answer, str) for task in answer]
    back = [task for task in granted if task.token not in noted]
    return [Settlement(id=task.id, token=task.token, outcome="release") for task in back]


async def _end(backend: Backend, asked: Asked) -> list[Task] | str:
    """End one claim; return what it was granted, or why that is not known."""
    end = partial(backend.claim, asked.kinds, limit=0, wait=0, claim_id=asked.claim_id)
    try:
        async with asyncio.timeout(_FOR_CLAIMS):
            return (await call_until(partial(call_once, end, within=_A_TRY), for_at_most=_FOR_CLAIMS)).tasks
    except (BackendError, TimeoutError) as error:
        return str(error) or "no answer"


def _settlements(leases: Sequence[Left], why: str) -> Iterator[Settlement]:
    error = {"type": "WorkerEnded", "message": why}
    for lease in leases:
        yield Settlement(
            id=lease.task_id,
            token=lease.token,
            outcome="crash" if lease.begun else "release",
            error=error if lease.begun else None,
            progress=lease.progress,
            progress_seq=lease.progress_seq,
        )
