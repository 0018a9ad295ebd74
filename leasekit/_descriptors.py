"""Free descriptors: whether this process can open the files and sockets that the leases of one more task need.

A claim needs none where a connection is open; the heartbeats and results of its tasks may need several. A process that
has left too many open would claim tasks that it can neither keep nor report, and make crashes of them.
"""

import errno
import os
from typing import Any

try:  # here: without a free descriptor no module can be loaded
    import resource
except ImportError:  # not every system has it
    resource = None  # type: ignore[assignment]

_NEEDED = 8  # heartbeats, results and cancel requests at once, each with a name to resolve
_USED_UP = (errno.EMFILE, errno.ENFILE)


def lack_of_descriptors() -> str | None:
    """Return what is wrong if this process cannot open some files at once; None if it can, or something else is."""
    opened: list[int] = []
    try:
        for _ in range(_NEEDED):
            opened.append(os.dup(opened[0]) if opened else os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in _USED_UP:
            return (
                f"this process can open no more files and sockets ({error.strerror}, {_limit()}), which heartbeats and "
                "results need; find what leaves some open, or raise the limit (LimitNOFILE in a unit)"
            )
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None


def _limit() -> str:
    return "the limit is that of the system" if resource is None else f"ulimit -n is {_soft_limit(resource)}"


def _soft_limit(module: Any) -> int:
    return int(module.getrlimit(module.RLIMIT_NOFILE)[0])
