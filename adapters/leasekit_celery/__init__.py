"""Celery tasks that run once, however often their messages are delivered.

    app = Celery("shop", broker="redis://localhost/0")
    leasekit_celery.install(app, "redis://localhost/1")       # this line

Celery's brokers deliver a message again when its worker has not acknowledged it in time (Redis: `visibility_timeout`),
also where the first run is alive and well: a long task with `acks_late` then runs twice at a time. With this line each
task runs under the lease of its id. A message that comes again while the first run is alive is put off; once the first
run has died, it runs; once it has ended, the message is acknowledged without running. A run has ended when Celery has
stored its result and sent what follows from it. A task whose lease somebody has cancelled is revoked.

What leasekit cannot do here: Celery acknowledges messages by itself, before the task begins, unless `acks_late` is set;
then nothing is delivered again, and there is nothing to keep apart.
"""

from leasekit_celery.leased import LeasedTask, install

__all__ = ["LeasedTask", "install"]
