"""The SQS backend: `sqs://queue?region=…`, and `lease` and `task` for a receive loop of your own."""

from leasekit.registry import needs_extra

with needs_extra("sqs"):
    from leasekit_sqs.address import Address
    from leasekit_sqs.backend import SqsBackend, connect
    from leasekit_sqs.loop import close, lease, task, watch

__all__ = ["Address", "SqsBackend", "close", "connect", "lease", "task", "watch"]
