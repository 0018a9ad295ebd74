"""Amazon SWF: `swf://domain/task-list` URLs; `lease` and `task` for a poll loop of your own."""

from leasekit.registry import needs_extra

with needs_extra("swf"):
    from leasekit_swf.backend import SwfService, connect, lease, task

__all__ = ["SwfService", "connect", "lease", "task"]
