"""Celery and Dramatiq with leases: what a message costs its worker, beside the same worker without leases.

A real worker with one thread takes messages of tasks that do nothing from a redis-server; the leases are in the same
one. Both workers follow each other in each round. CPU is that of the whole worker process, leasekit's threads included.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import HERE, Bench
from on_redis import running

_WARM = 50  # messages at the start, which are not counted

_COUNT = """
import os, time
done = []
def note():
    done.append(time.process_time())
    if len(done) == int(os.environ["MESSAGES"]):
        with open("cpu", "w") as file:
            file.write(str(1e6 * (done[-1] - done[{warm}]) / (len(done) - 1 - {warm})))
        os._exit(0)
"""

_CELERY = """
from celery import Celery
app = Celery("worker", broker=os.environ["BROKER"])
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
if os.environ["LEASES"]:
    import leasekit_celery
    leasekit_celery.install(app, os.environ["LEASES"])

@app.task
def work():
    note()
"""

_DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
broker = RedisBroker(url=os.environ["BROKER"])
if os.environ["LEASES"]:
    import leasekit_dramatiq
    broker.add_middleware(leasekit_dramatiq.Leases(os.environ["LEASES"]))
dramatiq.set_broker(broker)

@dramatiq.actor
def work():
    note()
"""

_CASES = {
    "Celery": (_CELERY, "worker.work.delay()", ["celery", "-A", "worker", "worker", "-P", "solo", "-l", "error"]),
    "Dramatiq": (_DRAMATIQ, "worker.work.send()", ["dramatiq", "worker", "--processes", "1", "--threads", "1"]),
}


def main() -> None:
    bench = Bench("brokers")
    messages = 100 if bench.quick else 1000
    for case in filter(bench.wants, _CASES):
        rounds = [(_cpu(case, messages, leases=False), _cpu(case, messages, leases=True)) for _ in range(bench.repeat)]
        bare, leased = (statistics.median(values) for values in zip(*rounds, strict=True))
        more = [with_leases - without for without, with_leases in rounds]
        bench.note(
            case,
            cpu_us_without=round(bare),
            cpu_us_with=round(leased),
            more_us=round(statistics.median(more)),
            all=[round(value) for value in more],
        )
    bench.close()


def _cpu(case: str, messages: int, *, leases: bool) -> float:
    """Return the microseconds of CPU of one message."""
    code, send, worker = _CASES[case]
    with running() as (url, _), tempfile.TemporaryDirectory(prefix=".bench-", dir=HERE) as name:
        folder = Path(name)
        (folder / "worker.py").write_text(f"{_COUNT.format(warm=_WARM)}{code}", encoding="utf-8")
        environment = os.environ | {"BROKER": url, "LEASES": url if leases else "", "MESSAGES": str(messages)}
        fill = f"import worker\nfor _ in range({messages}): {send}"
        subprocess.run([sys.executable, "-c", fill], cwd=folder, env=environment, check=True)
        subprocess.run(
            [sys.executable, "-m", *worker],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=600,
            check=False,
        )
        return float((folder / "cpu").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
