"""One lease: claim a task, hold its lease while the code in the block runs, and settle the task at its end."""

import time

import leasekit

with leasekit.connect("sqlite:///tasks.db") as client:
    client.schedule("thumbnail", {"pages": 3})

    for task in client.tasks("thumbnail", until_idle=0.5):
        with leasekit.lease(task) as held:
            for page in range(held.checkpoint or 0, task.payload["pages"]):
                held.check()  # before each side effect: raises if the lease is lost
                time.sleep(0.1)  # the work; a thread sends heartbeats meanwhile
                held.progress(page + 1)  # where the next run goes on if this process dies here
                print(f"page {page}, fence {held.fence}, {held.remaining():.0f} s of trust left")
            held.complete({"pages": task.payload["pages"]})

        info = client.get(task.id)
        assert info is not None
        print(info.status, info.result)
