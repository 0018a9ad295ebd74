"""A worker as a process: signals, and its end where a body outlives its lease."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.sampling import slow_after
from tests.waiting import eventually

_PREAMBLE = """
import os, signal, sys, threading, time
import leasekit
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests run under nohup
service = MemoryService()
faulty = Faulty(MemoryBackend(service, worker="worker"))
submitter = leasekit.Client(MemoryBackend(service, worker="submitter"))
worker = leasekit.Worker(faulty, concurrency=2)

def say(*words):
    "In one piece: print writes a line and its end apart, and several threads say something."
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def now():
    return time.clock_gettime(time.CLOCK_BOOTTIME)
"""


class Script:
    """A Python process; what it says goes to a file."""

    def __init__(self, home: Path, code: str) -> None:
        (home / "script.py").write_text(_PREAMBLE + dedent(code))
        self._said = home / "said"
        self._errors = home / "errors"
        with self._said.open("w") as said, self._errors.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, "script.py"], cwd=home, stdout=said, stderr=errors)

    @property
    def said(self) -> list[str]:
        return self._said.read_text().splitlines()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    started: list[Script] = []

    def start(code: str) -> Script:
        started.append(Script(tmp_path, code))
        return started[-1]

    yield start
    for script in started:
        script.process.kill()
        script.process.wait()


GRACEFUL = """
    finish = threading.Event()

    @worker.handler("thread")
    def in_thread(payload):
        say("begun")
        finish.wait(60)
        return "thread"

    @worker.handler("blocks")
    async def blocks(payload):
        say("begun")
        finish.wait(60)  # also the loop
        return "loop"

    def end():
        while faulty.calls["claim"] < 4:  # both claims, and those that followed
            time.sleep(0.001)
        say("claiming")
        while faulty.calls["claim"] < 6:  # the stop gives up both
            time.sleep(0.001)
        say("stopping")
        finish.set()

    threading.Thread(target=end, daemon=True).start()
    ids = [submitter.schedule(kind).id for kind in ("thread", "blocks")]
    worker.run()
    say(*[submitter.get(task_id).result for task_id in ids])
    submitter.close()
    say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_a_signal_that_interrupts_the_writing_of_a_log_stops_the_worker(start: Callable[[str], Script]) -> None:
    script = start(
        """
        import logging

        class Stream(logging.Handler):
            writing = False

            def emit(self, record):
                if self.writing:
                    raise RuntimeError("reentrant call")  # as the stream of stderr does
                if record.getMessage() != "a line of the main thread":
                    return
                self.writing = True
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
                self.writing = False

        logging.getLogger("leasekit").addHandler(Stream())
        logging.getLogger("leasekit").setLevel("INFO")
        signal.signal(signal.SIGUSR1, lambda *_: logging.getLogger("leasekit").info("a line of the main thread"))

        @worker.handler("k")
        def handle(payload):
            os.kill(os.getpid(), signal.SIGUSR1)

        submitter.schedule("k")

        worker.run()
        say("ended")
        """
    )
    assert script.exit_code() == 0, script.errors
    assert script.said == ["ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_bodies_end_and_their_results_be_reported(
    start: Callable[[str], Script], number: signal.Signals
) -> None:
    script = start(GRACEFUL)
    eventually(lambda: sorted(script.said) == ["begun", "begun", "claiming"])
    script.signal(number)
    assert script.exit_code() == 0, script.errors
    assert script.said[3:] == ["stopping", "thread loop", "True", "True"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once_and_its_logs_are_written(
    start: Callable[[str], Script], number: signal.Signals
) -> None:
    script = start(
        """
        import logging
        from logging.handlers import MemoryHandler
        held_back = MemoryHandler(1000, flushLevel=logging.CRITICAL, target=logging.StreamHandler())
        logging.basicConfig(level=logging.INFO, handlers=[held_back])

        @worker.handler("k")
        def never_ends(payload):
            logging.info("held back until the end")
            say("begun")
            threading.Event().wait()

        submitter.schedule("k")
        say("ready")
        worker.run()
        """
    )
    eventually(lambda: "begun" in script.said)
    script.signal(number)
    while script.process.poll() is None:
        script.signal(number)
        try:
            script.process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    assert script.exit_code() == 128 + number
    assert "held back until the end" in script.errors


def test_a_hang_up_that_comes_with_another_signal_is_no_second_one(
    start: Callable[[str], Script], tmp_path: Path
) -> None:
    script = start(
        """
        @worker.handler("k")
        def waits(payload):
            say("begun")
            while not os.path.exists("finish"):
                time.sleep(0.01)

        submitter.schedule("k")
        worker.run()
        submitter.close()
        """
    )
    eventually(lambda: "begun" in script.said)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        script.signal(number)
    (tmp_path / "finish").touch()
    assert script.exit_code() == 0, script.errors


LEAVES_A_THREAD = """
    import asyncio, contextvars
    from leasekit._worker import signals
    signals._LEFTOVERS = 0.1

    @worker.handler("k")
    async def leaves_a_thread(payload):
        # Of no run: its result is reported at once. But asyncio waits for the thread in the end.
        contextvars.Context().run(asyncio.get_running_loop().run_in_executor, None, time.sleep, {seconds})
        return "done"

    def end():
        while submitter.get(task_id).status != "success":
            time.sleep(0.001)
        {stop}

    task_id = submitter.schedule("k").id
    threading.Thread(target=end, daemon=True).start()
    worker.run()
    say("stopped")
    submitter.close()
"""


def test_what_a_body_has_left_behind_does_not_outlast_the_drain_timeout(start: Callable[[str], Script]) -> None:
    text = LEAVES_A_THREAD.format(seconds=600, stop="os.kill(os.getpid(), signal.SIGTERM)")
    text = text.replace("_LEFTOVERS = 0.1", "_LEFTOVERS = 600.0")
    script = start(text.replace("worker.run()", "worker.run(drain_grace=0.1, drain_timeout=0.2)"))
    assert script.exit_code() == 128 + signal.SIGTERM, script.errors


def test_what_a_body_has_left_behind_does_not_hold_up_a_stop_for_ever(start: Callable[[str], Script]) -> None:
    script = start(LEAVES_A_THREAD.format(seconds=600, stop="os.kill(os.getpid(), signal.SIGTERM)"))
    assert script.exit_code() == 128 + signal.SIGTERM, script.errors
    assert script.said == []


def test_who_stops_a_worker_by_himself_is_not_ended_with_it(start: Callable[[str], Script]) -> None:
    script = start(LEAVES_A_THREAD.format(seconds=1, stop="worker.stop()"))
    assert script.exit_code() == 0, script.errors
    assert script.said == ["stopped"]


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: None"])
def test_a_hang_up_that_is_ignored_or_somebody_elses_stays_so(start: Callable[[str], Script], handler: str) -> None:
    script = start(
        f"""
        handler = {handler}
        signal.signal(signal.SIGHUP, handler)

        @worker.handler("k")
        def looks(payload):
            say(signal.getsignal(signal.SIGHUP) is handler)
            worker.stop()

        submitter.schedule("k")
        worker.run()
        submitter.close()
        """
    )
    assert script.exit_code() == 0, script.errors
    assert script.said == ["True"]


def test_a_body_that_outlives_its_lease_ends_the_process_before_its_trust_ends_and_shows_its_stack(
    start: Callable[[str], Script],
) -> None:
    script = start(
        """
        faulty.always("beat", faults.drop)

        @worker.handler("k")
        def never_checks(payload):
            until = now() + 4  # the grant was before
            say("ttl", until)
            while True:
                say("at", now())
                time.sleep(0.005)

        submitter.schedule("k", claim_timeout=4, heartbeat_timeout=4)
        worker.run()
        """
    )
    code = script.exit_code()
    # The kernel's timer comes 20 ms after the process' own end: first, where a busy machine leaves no turn in between.
    assert code in (75, -signal.SIGKILL), script.errors
    times = [float(line.split()[1]) for line in script.said if line.count(" ") == 1]
    assert times[-1] < times[0]
    assert times[-1] > times[0] - 2
    assert code != 75 or "never_checks" in script.errors


def test_a_process_whose_interpreter_is_held_up_is_ended_by_the_kernel_when_trust_ends(
    start: Callable[[str], Script],
) -> None:
    script = start(
        """
        import ctypes

        @worker.handler("k")
        def holds_the_gil(payload):
            say("begins", now())
            ctypes.PyDLL(None).usleep(20_000_000)  # a PyDLL keeps the GIL: no beat leaves, no Python code runs
            say("came back", now())

        submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        worker.run()
        """
    )
    assert script.exit_code() == -signal.SIGKILL
    assert len(script.said) == 1


def test_a_process_that_is_stopped_past_its_trust_never_goes_on(start: Callable[[str], Script]) -> None:
    script = start(
        """
        @worker.handler("k")
        def stops(payload):
            say("stops", now())
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # the stop takes hold of another thread first
            say("went on", now())

        submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        worker.run()
        """
    )
    assert script.exit_code() == -signal.SIGKILL  # while it was stopped: nobody sent SIGCONT
    assert len(script.said) == 1


STARTS = {
    "to_thread": "await asyncio.to_thread(goes_on)",
    "run_in_executor": "await asyncio.get_running_loop().run_in_executor(None, goes_on)",
    "own_executor": "await asyncio.get_running_loop().run_in_executor(pool, goes_on)",
    "task": "await asyncio.wait([asyncio.create_task(hears_nothing())])",
    "cancelled_task": "task = asyncio.create_task(asyncio.to_thread(goes_on)); await asyncio.to_thread(goes.wait); "
    "task.cancel()",
}


@pytest.mark.parametrize(
    "starts",
    slow_after(1, STARTS.values()),
    ids=STARTS,
)
def test_a_job_of_an_async_body_that_outlives_its_lease_ends_the_process(
    start: Callable[[str], Script], starts: str
) -> None:
    """The coroutine ends when it is told to; the thread that it awaited does not."""
    script = start(
        f"""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        faulty.always("beat", faults.drop)
        goes = threading.Event()

        def goes_on():
            goes.set()
            while True:
                say("at", now())
                time.sleep(0.005)

        async def hears_nothing():
            while True:
                say("at", now())
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    pass

        @worker.handler("k")
        async def awaits(payload):
            say("ttl", now() + 4)  # the grant was before
            {starts}
            await asyncio.sleep(600)

        submitter.schedule("k", claim_timeout=4, heartbeat_timeout=4)
        worker.run()
        """
    )
    # By the kernel where the machine is too busy to let the process end itself in time.
    assert script.exit_code() in (75, -signal.SIGKILL), script.errors
    until, *times = [float(line.split()[1]) for line in script.said]
    assert until - 2 < times[-1] < until


@pytest.mark.slow
def test_the_kernel_ends_a_job_of_an_async_body_that_holds_up_the_interpreter(start: Callable[[str], Script]) -> None:
    """The coroutine has ended by then, and its lease is guarded all the same."""
    script = start(
        """
        import asyncio, ctypes

        def holds_the_gil(ended):
            ended.wait()
            say("ended", now())
            ctypes.PyDLL(None).usleep(20_000_000)
            say("came back", now())

        @worker.handler("k")
        async def returns(payload):
            ended = threading.Event()
            asyncio.create_task(asyncio.to_thread(holds_the_gil, ended))
            asyncio.get_running_loop().call_later(0.2, ended.set)

        submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        worker.run()
        """
    )
    assert script.exit_code() == -signal.SIGKILL, script.errors
    assert [line.split()[0] for line in script.said] == ["ended"]


def test_an_idle_async_body_whose_job_goes_on_ends_the_process(start: Callable[[str], Script]) -> None:
    script = start(
        """
        import asyncio

        @worker.handler("k", idle_timeout=0.5)
        async def awaits(payload):
            await asyncio.to_thread(time.sleep, 600)

        submitter.schedule("k", claim_timeout=3, heartbeat_timeout=3)
        worker.run()
        """
    )
    # By the kernel where the machine is too busy to let the process end itself in time.
    assert script.exit_code() in (75, -signal.SIGKILL), script.errors
    assert "did not end when told to" in script.errors


@pytest.mark.slow
def test_a_program_that_a_body_becomes_has_no_watchdog(start: Callable[[str], Script]) -> None:
    """As docs/promises.md says of a worker without a supervisor: the kernel's timer ends with the program."""
    script = start(
        """
        @worker.handler("k")
        def becomes_another_program(payload):
            goes_on = "import sys, time; time.sleep(float(sys.argv[1])); print(1)"
            os.execv(sys.executable, [sys.executable, "-c", goes_on, "3"])

        submitter.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        worker.run()
        """
    )
    assert script.exit_code() == 0, script.errors
    assert script.said == ["1"]


def test_a_soft_worker_is_not_ended(start: Callable[[str], Script]) -> None:
    script = start(
        """
        worker = leasekit.Worker(faulty, watchdog="soft")
        faulty.always("beat", faults.drop)

        @worker.handler("k")
        def checks_late(payload, held):
            until = now() + 2.5
            while now() < until:
                time.sleep(0.01)
            try:
                held.check()
            except leasekit.LeaseLost:
                say("lost")
                worker.stop()
                raise

        submitter.schedule("k", claim_timeout=2, heartbeat_timeout=2)
        worker.run()
        submitter.close()
        """
    )
    assert script.exit_code() == 0, script.errors
    assert "lost" in script.said


@pytest.mark.parametrize(
    "declared",
    [
        "def forks(payload):",
        "async def forks(payload):\n            asyncio.create_task(asyncio.to_thread(time.sleep, 1))",
    ],
    ids=["thread", "async"],
)
def test_a_child_that_a_handler_forks_does_not_become_a_second_worker(
    start: Callable[[str], Script], declared: str
) -> None:
    script = start(
        f"""
        import asyncio

        @worker.handler("k")
        {declared}
            if pid := os.fork():
                _, status = os.waitpid(pid, 0)
                return os.waitstatus_to_exitcode(status)
            return "from the child"  # comes back from the handler, as a child should not

        task_id = submitter.schedule("k").id

        def end():
            while submitter.get(task_id).status != "success":
                time.sleep(0.001)
            worker.stop()

        threading.Thread(target=end, daemon=True).start()
        worker.run()
        say(submitter.get(task_id).result)
        submitter.close()
        """
    )
    assert script.exit_code() == 0, script.errors
    assert script.said == ["0"]


def test_a_child_that_a_handler_forks_ends_when_it_is_told_to(start: Callable[[str], Script]) -> None:
    """As those of multiprocessing are, and does not take the signal for one that stops the worker."""
    script = start(
        """
        @worker.handler("k")
        def forks(payload):
            statuses = []
            for number in (signal.SIGTERM, signal.SIGINT):
                is_there, here = os.pipe()
                if not (pid := os.fork()):
                    try:
                        os.write(here, b"!")
                        while True:
                            time.sleep(0.05)  # a signal just before a sleep does not end that sleep
                    except KeyboardInterrupt:
                        os._exit(7)
                os.read(is_there, 1)  # a signal that comes in the middle of a fork is dropped by Python
                os.kill(pid, number)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return statuses

        task_id = submitter.schedule("k").id

        def end():
            while submitter.get(task_id).status != "success":
                time.sleep(0.001)
            worker.stop()

        threading.Thread(target=end, daemon=True).start()
        worker.run()
        say(submitter.get(task_id).result)
        submitter.close()
        """
    )
    assert script.exit_code() == 0, script.errors
    assert script.said == ["[-15, 7]"]
