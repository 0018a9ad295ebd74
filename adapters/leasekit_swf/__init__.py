"""Amazon SWF: `swf://domain/task-list` URLs; `lease` and `task` for a poll loop of your own."""

from leasekit.registry import needs_extra

with needs_extra("swf"):
    from leasekit_swf.backend import connect, lease, task
    from leasekit_swf.service import SwfService

__all__ = ["SwfService", "connect", "lease", "task"]
