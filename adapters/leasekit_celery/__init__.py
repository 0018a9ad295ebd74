"""Celery tasks whose runs do not overlap, however often their messages are delivered.

    import leasekit_celery                                              # with this line …
    app = Celery("shop", broker="redis://localhost/0")
    leasekit_celery.install(app, "redis://localhost/1?retention=1d")    # … and this one

Celery's brokers deliver a message again when its worker has not acknowledged it in time (Redis: `visibility_timeout`),
even if the first run is still alive: a long task with `acks_late` then runs twice at the same time. With these two
lines each task runs under the lease of its id. A message that is delivered again while the first run is alive is put
off; if the first run has died, the task runs; if it has ended, the message is acknowledged without running. A run has
ended when Celery has stored its result and sent its callbacks and its chain. A task whose lease was cancelled is
revoked.

Without `acks_late` Celery acknowledges a message before its task begins. Then brokers deliver again only what still
waits for its ETA or countdown, and of such copies one runs.
"""

from leasekit.registry import needs_extra

with needs_extra("celery"):
    from leasekit_celery.leased import LeasedTask
    from leasekit_celery.setup import install
    from leasekit_celery.task_lease import TaskLease, current_lease

__all__ = ["LeasedTask", "TaskLease", "current_lease", "install"]
