"""AWS Step Functions: `sfn://activity-arn` URLs; `lease` and `task` for a poll loop of your own."""

from leasekit.registry import needs_extra

with needs_extra("sfn"):
    from leasekit_sfn.backend import SfnService, connect, lease, task

__all__ = ["SfnService", "connect", "lease", "task"]
