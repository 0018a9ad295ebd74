"""A leader among several processes: the one that holds a named lease.

    python examples/07_one_leader.py

Three members want the same name. One leads, and the others wait. When the leader steps down or dies, the next one leads
with a higher fence, which distinguishes its writes from late writes of a former leader.
"""

import tempfile
import threading
from pathlib import Path

import leasekit

terms: list[tuple[str, int]] = []


def member(client: leasekit.Client, name: str) -> None:
    with client.named("reports/nightly", wait=30) as held:
        terms.append((name, held.fence))  # only one member is here at a time
        held.progress({"last_leader": name})  # the next leader finds this in `held.checkpoint`
        print(f"{name} leads with fence {held.fence}, after {held.checkpoint}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, leasekit.connect(f"sqlite:///{Path(folder)}/names.db") as client:
        members = [threading.Thread(target=member, args=[client, name]) for name in ("ada", "grace", "linus")]
        for thread in members:
            thread.start()
        for thread in members:
            thread.join()

        with client.named("reports/nightly"):
            try:
                with client.named("reports/nightly", wait=0):
                    raise AssertionError("two led at once")
            except leasekit.NotGranted as refused:
                print(refused)

    fences = [fence for _, fence in terms]
    assert fences == sorted(set(fences))


if __name__ == "__main__":
    main()
