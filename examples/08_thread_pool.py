"""Leases in an existing thread pool: each job runs under its lease, whichever thread takes it.

python examples/08_thread_pool.py
"""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import leasekit

client = leasekit.connect("sqlite:///jobs.db")
done: list[str] = []


def job(task: leasekit.Task, held: leasekit.Lease) -> None:
    with held:  # in the pool's thread; after an exception the task is retried
        held.check()
        done.append(f"{task.id} in {threading.current_thread().name}")


for number in range(6):
    client.schedule("job", {"number": number}, id=f"job-{number}")

with client, ThreadPoolExecutor(max_workers=3, thread_name_prefix="pool") as pool:
    # `lease(task)` reserves the task: while it waits for a thread, the lease is renewed, and the loop keeps the task.
    wait([pool.submit(job, task, leasekit.lease(task)) for task in client.tasks("job", until_idle=0.2)])
    assert all(task.status is leasekit.Status.SUCCESS for task in client.wait_tasks(*(f"job-{n}" for n in range(6))))

print("\n".join(done))
