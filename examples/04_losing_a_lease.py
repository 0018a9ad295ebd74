"""Losing a lease: the service cannot be reached, and the code in the block is told in time to stop."""

import time

import leasekit
from leasekit.registry import open_backend
from leasekit.testing import faults
from leasekit.testing.faults import Faulty

service = Faulty(open_backend("memory://", worker="me"))

with leasekit.connect(service) as client:
    client.schedule("report", claim_timeout=4, heartbeat_timeout=4)
    task = next(client.tasks("report"))
    try:
        with leasekit.lease(task) as held:
            service.always("beat", faults.refuse)  # the network is gone
            while True:
                held.check()
                print(f"{held.remaining():.1f} s of trust left")
                time.sleep(0.1)
    except leasekit.LeaseLost as lost:
        print(lost.reason, "-", lost)
