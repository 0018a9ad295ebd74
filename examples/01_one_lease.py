"""One lease: a task is claimed, its lease is kept alive while the body runs, and leaving the block settles it."""

import time

import leasekit

with leasekit.connect("sqlite:///tasks.db") as client:
    client.schedule("thumbnail", {"pages": 3})

    for task in client.tasks("thumbnail", until_idle=0.5):
        with leasekit.lease(task) as held:
            for page in range(held.checkpoint or 0, task.payload["pages"]):
                held.check()  # before each side effect: is the task still ours?
                time.sleep(0.1)  # the work; heartbeats go on meanwhile, from a thread of their own
                held.progress(page + 1)  # where the next holder would go on, if this process died here
                print(f"page {page}, fence {held.fence}, {held.remaining():.0f} s of trust left")
            held.complete({"pages": task.payload["pages"]})

        info = client.get(task.id)
        assert info is not None
        print(info.status, info.result)
