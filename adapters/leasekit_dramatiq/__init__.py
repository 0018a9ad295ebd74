"""Dramatiq actors that run once, however often their messages are delivered.

    broker.add_middleware(leasekit_dramatiq.Leases("redis://localhost/1"))       # this line

A broker delivers a message again when it believes that its worker has died: a stalled process, a lost connection, a
long pause; its first run may be alive. With this line each message runs under the lease of its id: one that comes again
while the first run is alive is put off; once the first run has died, it runs; once it has ended well, the message is
acknowledged without running. Retries run as ever: a run that failed gives its lease back. A run has ended when all
other middleware has done what follows from it. A message whose lease somebody has cancelled is a dead letter.
"""

from leasekit_dramatiq.middleware import Leases

__all__ = ["Leases"]
