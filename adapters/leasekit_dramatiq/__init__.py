"""Dramatiq actors that run once, however often their messages are delivered.

    broker.add_middleware(leasekit_dramatiq.Leases("redis://localhost/1"))       # this line

A broker delivers a message again when its worker seems to have died (a stalled process, a lost connection, a long
pause), but the first run may be alive. With this line each message runs under the lease of its id. A message that is
delivered again while the first run is alive is put off; if the first run has died, the message runs; if it has
succeeded, the message is acknowledged without running. Retries work as before, because a failed run releases its lease.
A run has ended when all other middleware has finished its work on it. A message whose lease was cancelled becomes a
dead letter.
"""

from leasekit.registry import needs_extra

with needs_extra("dramatiq"):
    from leasekit_dramatiq.middleware import Leases, current_lease

__all__ = ["Leases", "current_lease"]
