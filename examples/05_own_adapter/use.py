import leasekit

with leasekit.connect("table:///jobs.db") as client:
    for task in client.tasks("report", until_idle=0.5):
        with leasekit.lease(task) as held:
            print(task.kind, task.payload)
