"""Enter and leave blocks in the main thread, into which a timer signal raises at random moments; then say how often.

python -m harness.chaos.interrupted URL BLOCKS

Another thread holds the lease of a task of kind `kept` meanwhile, and until there is a file `finish`. In some blocks
another client, of a file, is closed: at the end that file must be free.
"""

import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import leasekit

_LATEST = {"claim": 0.03, "enter": 5e-4, "leave": 5e-4, "close": 0.02}  # seconds after a step of a block begins
_OFTEN = (*_LATEST, "claim", "enter", "leave")
_AGAIN = 0.002  # seconds between two interrupts of a close
_FILE = "sqlite:///closed.db"


class Interrupted(BaseException):
    """An exception out of a signal handler."""


def main() -> None:
    url, blocks = sys.argv[1:]
    rng, times = random.Random(url), 0
    signal.signal(signal.SIGALRM, interrupt)
    with leasekit.connect(url) as client:
        keeping = threading.Thread(target=keep, args=[client])
        keeping.start()
        for _ in range(int(blocks)):
            try:
                block(client, rng, rng.choice(_OFTEN))
            except Interrupted:
                times += 1
            except leasekit.LeasekitError as error:  # a generator that was interrupted in the middle, say
                print(repr(error))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        with leasekit.connect(_FILE, retry_for=5) as other:
            other.stats()
        print(f"interrupted {times} times", flush=True)
        keeping.join()


def block(client: leasekit.Client, rng: random.Random, interrupted: str) -> None:
    def begin(step: str) -> None:
        if step == interrupted:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, _LATEST[step]), _AGAIN if step == "close" else 0)

    if interrupted == "close":
        other = leasekit.connect(_FILE, retry_for=5)
        other.stats()
        begin("close")
        other.close()
        return
    begin("claim")
    task = next(client.tasks("steady"))
    begin("enter")
    with leasekit.lease(task) as held:
        held.progress(1)
        begin("leave")


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise in `block` and in what it calls, and nowhere else."""
    while frame is not None:
        if frame.f_code is block.__code__:
            raise Interrupted
        frame = frame.f_back


def keep(client: leasekit.Client) -> None:
    with leasekit.lease(next(client.tasks("kept"))):
        while not Path("finish").exists():
            time.sleep(0.1)


if __name__ == "__main__":
    main()
