"""Hand-back: report what a worker held when it ended, once none of its code can run.

A run that had begun is reported as *crash*, with the reason: the task is ready again at once, and the crash counts
towards its `max_crashes`. A task that had not begun is released, and so are tasks that were granted to a claim in
progress; the claim is ended, so that its request is granted nothing if it arrives only now. A result in the spool
overrides both: the task has been done. Another process that shares the spool may have adopted the dead worker's file
by now, and may have died too: only that a file holds the result matters, not which process reports it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.connection import Connection
from leasekit._driver.keeping.pending_claims import Ended, end_claim
from leasekit._driver.reporting.ledger import Holder, Left, Past, PendingClaim
from leasekit._driver.reporting.outbox import Delivery, Outbox
from leasekit._driver.reporting.spool import Spool
from leasekit._driver.retrying import call_once, call_until
from leasekit.backend import Backend
from leasekit.client import Client
from leasekit.errors import Unavailable
from leasekit.task import Claimed, Settlement

logger = logging.getLogger("leasekit")

_PATIENCE = 5.0  # seconds: a service that is away for longer does not delay the new worker
_PAUSE = 0.02
_FOR_CLAIMS = 3.0  # of these, seconds for ending the claims in progress …
_A_TRY = 1.0  # … and for one request of that


def hand_back(past: Past, why: str, *, waiting: Callable[[float], bool]) -> None:
    """Report what is left in the ledger to its service, as far as the service answers soon.

    Reports without an answer go to the spool, from which the next worker sends them; without a spool those leases
    expire by themselves. `waiting` must wait for the seconds that it is given; if it returns True, this gives up.
    """
    holder = past.holder
    if holder is None or past.is_empty:
        return
    if holder.url is None:
        logger.warning("%d leases of the worker expire by themselves: its service has no URL", len(past.leases))
        return
    try:
        with Client(holder.url, worker=holder.worker, options=holder.options) as client:
            connection = client.__connection__()
            reported = connection.driver.submit(_report_all(connection, holder, past, why))
            left = _PATIENCE
            while not reported.done() and left > 0 and not waiting(_PAUSE):
                left -= _PAUSE
            if reported.done():
                reported.result()
                return
            kept = "are reported by the next worker" if holder.spool else "expire by themselves"
            logger.warning("the service does not take back all leases of the worker now: they %s", kept)
            connection.run(connection.keeper.outbox.aclose())
    except Exception as error:  # noqa: BLE001 - a supervisor lives on, whatever is wrong with a service or an adapter
        logger.warning("the leases of the worker expire by themselves: %s: %s", type(error).__name__, error)


async def _report_all(connection: Connection, holder: Holder, past: Past, why: str) -> None:
    outbox = connection.keeper.outbox
    done: set[tuple[str, str]] = set()
    if holder.spool:
        spool = Spool(Path(holder.spool), holder.url or "")
        # If that cannot be read, no lease is handed back: no task is known to be without a result.
        done = await asyncio.to_thread(spool.unanswered)
        await outbox.use(spool)
    owed = _owed(holder, past, why, refuses_stale=connection.backend.capabilities.refuses_stale)
    back = _put_unreported(owed, outbox, done)
    if connection.backend.capabilities.remembers_claims:
        back += _put_unreported(await _end_claims(connection.backend, past), outbox, done)
    crashes = sum(settlement.outcome == "crash" for settlement in back)
    if back:
        logger.info("handed back: %d of the worker's leases, %d of them as crashed", len(back), crashes)
    is_obeyed_late = not connection.backend.capabilities.refuses_stale
    left = past.armed_at - BOOT_CLOCK.now() if is_obeyed_late and past.armed_at is not None else None
    try:
        async with asyncio.timeout(left):  # what is tried again later could meet the lease of another worker
            await outbox.empty()
    except TimeoutError:
        await outbox.aclose()


def _owed(holder: Holder, past: Past, why: str, *, refuses_stale: bool) -> list[Settlement]:
    """Return what is to be reported of the leases of a dead process."""
    if refuses_stale:
        return [*past.settlements, *_crashes_and_releases(past.leases, why)]
    # Only the kernel's timer proves that these leases have not expired: none that it guards ends before it fires.
    # After that the process may have been dead for long: this supervisor may have been stopped meanwhile.
    is_guarded = holder.guarded and past.armed_at is not None and BOOT_CLOCK.now() < past.armed_at
    ran = [lease for lease in past.leases if is_guarded and (lease.begun or lease.released) and not lease.unguarded]
    # As crashes, though no handler may be to blame: a release is only for the process that held the lease.
    return list(_crashes_and_releases([lease._replace(begun=True) for lease in ran], why))


def _put_unreported(back: Iterable[Settlement], outbox: Outbox, done: Collection[tuple[str, str]]) -> list[Settlement]:
    """Put settlements into the outbox, except for tasks whose result is in the spool; return those put in."""
    reported = [settlement for settlement in back if (settlement.id, settlement.token) not in done]
    for settlement in reported:
        outbox.put(Delivery(settlement))
    return reported


async def _end_claims(backend: Backend, past: Past) -> list[Settlement]:
    """End the claims whose answers the worker did not receive, and return releases of the tasks they were granted."""
    noted = {lease.token for lease in past.leases}
    ended = await asyncio.gather(*(_end_claim_in_time(backend, claim) for claim in past.claims))
    # A service that never answered, at a wrong URL say, has granted nothing.
    if (errors := [one.error for one in ended if one.error is not None]) and past.answered:
        logger.warning("the tasks that the worker was granted last may wait until their leases expire: %s", errors[0])
    back = [task for one in ended for task in one.tasks if task.token not in noted]
    return [Settlement(id=task.id, token=task.token, outcome="release") for task in back]


async def _end_claim_in_time(backend: Backend, claim: PendingClaim) -> Ended:
    time = asyncio.get_running_loop().time
    until = time() + _FOR_CLAIMS

    async def end(kinds: Sequence[str]) -> Claimed:
        call = partial(backend.claim, kinds, limit=0, wait=0, claim_id=claim.claim_id)
        left = until - time() if len(kinds) == 1 else 0.0
        try:
            async with asyncio.timeout_at(until):
                return await call_until(partial(call_once, call, within=_A_TRY), for_at_most=left)
        except TimeoutError as error:
            raise Unavailable("no answer") from error

    return await end_claim(end, claim.kinds)


def _crashes_and_releases(leases: Sequence[Left], why: str) -> Iterator[Settlement]:
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
