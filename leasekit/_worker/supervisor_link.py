"""Supervisor link: the worker's side. The worker ends with its supervisor, and notes for it what it holds."""

import atexit
import os
import signal

from leasekit._driver.connection import Connection
from leasekit._driver.reporting.ledger import Holder, Ledger
from leasekit._worker import linux
from leasekit.client import Client

VARIABLE = "LEASEKIT_SUPERVISED"  # set by the supervisor for its child only: ledger, pipe, and the supervisor's pid

_ledger: Ledger | None = None
_line: int | None = None  # a pipe to the supervisor: without data, but closed by the end of this program, and by exec
_parent: int | None = None
_noted: Connection | None = None


def _forget() -> None:
    """Detach a forked child: the supervisor does not watch it, and it holds neither leases nor the pipe."""
    global _ledger, _line, _parent  # noqa: PLW0603 - one for each process
    _ledger = _parent = None
    if _line is not None:
        os.close(_line)
        _line = None


os.register_at_fork(after_in_child=_forget)


def attach() -> bool:
    """Connect to the supervisor; return whether there is one. The worker ends with it, and first if memory runs out."""
    global _ledger, _line, _parent  # noqa: PLW0603 - a process has one supervisor
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return False
    fd, _line, _parent = map(int, told.split(":"))
    end_with_supervisor()
    linux.expendable()
    for inherited in (fd, _line):
        os.set_inheritable(inherited, False)  # noqa: FBT003 - of one argument
    _ledger = Ledger(fd)
    atexit.register(_ignore_late_signals)  # first, so that it is called last
    return True


def _ignore_late_signals() -> None:
    """Ignore handled signals from here on: Python is about to drop its handlers, and a signal would kill the process.

    The supervisor passes on each of its signals, and may do so when the worker has already ended well.
    """
    if _ledger is not None:  # None in a forked child
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)


def end_with_supervisor() -> None:
    """Have the kernel kill this process when its supervisor ends. Repeat this: a handler's change of user undoes it."""
    if _parent is not None:
        linux.end_with(_parent)


def attached() -> Ledger | None:
    """Return the ledger in which this process notes what it holds; None without a supervisor."""
    return _ledger


def note_drain(timeout: float) -> None:
    """Have the supervisor kill this process if it lives on for longer after its first signal. Any thread."""
    if _ledger is not None:
        _ledger.note_drain(timeout)


def note(client: Client, *, spool: str | None) -> None:
    """Note what this client holds from now on, so that the supervisor hands it back when this process has ended.

    A second client at the same time is not noted, because a ledger has one holder: its leases expire by themselves.
    """
    global _noted  # noqa: PLW0603 - there is one ledger
    if _ledger is None or (_noted is not None and not _noted.closed):
        return
    connection = _noted = client.__connection__()
    guarded = connection.watchdog.guards
    _ledger.open(Holder(worker=client.worker, url=client.url, options=client.options, guarded=guarded, spool=spool))
    connection.keeper.note_in(_ledger)
    connection.watchdog.note_in(_ledger)
    connection.driver.call_soon(connection.keeper.reachability.when_reached, _ledger.note_answer)
