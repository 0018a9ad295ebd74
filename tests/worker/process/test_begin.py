"""A run begins in an executor whose other threads may hold the interpreter lock."""

import os
import socket
import threading
import time

import pytest

from leasekit import Heartbeats
from leasekit._core.term import Term
from leasekit._driver.clock import BOOT_CLOCK
from leasekit._driver.guarding.watchdog import Watchdog
from leasekit._worker.handlers import declare
from leasekit._worker.process.child import Channel, _Connection, _Executor
from leasekit._worker.process.messages import Address, LeaseChanged, LeaseState, Run, Setup, packed
from leasekit.task import Task

BEATS = Heartbeats().for_ttl(60)
now = BOOT_CLOCK.now


def a_function(payload: None) -> None: ...


def test_a_renewal_that_arrives_as_the_run_begins_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        setup = Setup(
            handler=Address(kind="k", module=__name__, name="a_function"),
            main={},
            argv=[],
            accepts_work=False,
            max_progress=1,
        )
        handler = declare("k", a_function, run="process", idle_timeout=None)
        executor = _Executor(Channel(theirs), handler, _Connection(setup), guard=os.getppid(), threads=1)
        about_to_end = LeaseState(granted_at=now() + 1 - (BEATS.trust - BEATS.grace), heartbeats=BEATS)
        task = Task(id="t", kind="k", token="x", ttl=60, payload=None)
        ours.send(packed(Run(number=1, task=task, state=about_to_end)))
        executor.catch_up()

        def held_up(watchdog: Watchdog, term: Term) -> None:
            """Another thread has the interpreter lock, and meanwhile the lease is renewed."""
            while now() < term.lost_at:
                time.sleep(0.01)
            ours.send(packed(LeaseChanged(run=1, state=LeaseState(granted_at=now(), heartbeats=BEATS))))

        monkeypatch.setattr(Watchdog, "begins", held_up)
        begins = threading.Thread(target=executor._begin, args=(1,), daemon=True)
        begins.start()
        begins.join(60)
        assert not begins.is_alive()
        assert not executor._holding[1].lost
