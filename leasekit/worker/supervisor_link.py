"""The worker's side of its supervisor: it ends with it, and notes for it what it holds."""

import os

from leasekit._driver.connection import Connection
from leasekit._driver.ledger import Holder, Ledger
from leasekit.client import Client
from leasekit.worker import linux

__all__ = ["VARIABLE", "attach", "attached", "note", "stay"]

VARIABLE = "LEASEKIT_SUPERVISED"  # what the supervisor tells its child, and nobody else: the ledger, and who it is

_ledger: Ledger | None = None
_line: int | None = None  # to the supervisor: nothing is said, but it is cut by the end of this program, and by exec
_parent: int | None = None
_noted: Connection | None = None


def _forget() -> None:
    """A forked child is not what the supervisor watches: it holds nothing of the worker's, nor its line."""
    global _ledger, _line, _parent  # noqa: PLW0603 - one for each process
    _ledger = _parent = None
    if _line is not None:
        os.close(_line)
        _line = None


os.register_at_fork(after_in_child=_forget)


def attach() -> bool:
    """True in the child of a supervisor: from here it ends with it, and is the first to end when memory runs out."""
    global _ledger, _line, _parent  # noqa: PLW0603 - a process has one supervisor
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return False
    fd, _line, _parent = map(int, told.split(":"))
    stay()
    linux.expendable()
    for inherited in (fd, _line):
        os.set_inheritable(inherited, False)  # noqa: FBT003 - of one argument
    _ledger = Ledger(fd)
    return True


def stay() -> None:
    """End with the supervisor, if there is one. The kernel forgets that when a handler changes its user."""
    if _parent is not None:
        linux.end_with(_parent)


def attached() -> Ledger | None:
    """Where this process notes what it holds; None where nobody reads that."""
    return _ledger


def note(client: Client, *, spool: str | None) -> None:
    """What this client holds from now on is handed back when this process has ended, in one way or the other.

    A second one at the same time is not noted, there is one holder: what it holds runs out by itself.
    """
    global _noted  # noqa: PLW0603 - as there is one ledger
    if _ledger is None or (_noted is not None and not _noted.closed):
        return
    connection = _noted = client.connection()
    guarded = connection.watchdog.guards
    _ledger.open(Holder(worker=client.worker, url=client.url, guarded=guarded, spool=spool))
    connection.keeper.note_in(_ledger)
