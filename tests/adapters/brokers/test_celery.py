"""Celery over a real Redis: what is delivered again runs once."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import celery
import pytest
import redis

import leasekit
import leasekit_celery
from leasekit import ConfigError, HistoryEntry
from leasekit.named import kind_of
from tests.adapters.brokers.conftest import SERVICES_WITHOUT_NAMES, Leases
from tests.sampling import slow_after
from tests.waiting import eventually

SHOP = """
import asyncio, os, pathlib, re, signal, sys, time
import celery, kombu
{imports}

app = celery.Celery("{name}", broker="{redis}", backend=None)
app.conf.task_default_queue = "{queue}"
every = kombu.Queue("{queue}-all", kombu.Exchange("{queue}-all", type="fanout"))
app.conf.task_queues = [kombu.Queue("{queue}"), every]
app.conf.broker_transport_options = {{"visibility_timeout": 5, "unacked_restore_interval": 1}}
app.conf.worker_prefetch_multiplier = 1
app.conf.task_track_started = True
app.conf.worker_soft_shutdown_timeout = float(os.environ.get("SOFT_SHUTDOWN", "0"))
{install}
LOG = pathlib.Path({log!r})


def refuse(*_, **__):
    raise ConnectionError("the result backend is away")


if "RESULTS" in os.environ:
    type(app.backend).mark_as_failure = refuse


def say(word, task):
    with LOG.open("a") as log:
        log.write(f"{{word}} {{task.request.id}} {{os.getpid()}}\\n")


@app.task(shared=False, bind=True, acks_late=True)
def long(self, seconds):
    say("begin", self)
    time.sleep(seconds)
    say("end", self)


@app.task(shared=False, bind=True, acks_late=True)
def waits(self):
    say("begin", self)
    while not LOG.with_suffix(".go").exists():
        time.sleep(0.01)
    say("end", self)


@app.task(shared=False, bind=True, acks_late=True)
def reports(self, seconds):
    self.update_state(state="PROGRESS", meta=7)
    say("begin", self)
    time.sleep(seconds)


@app.task(shared=False, bind=True, acks_late=True)
def fails(self):
    say("begin", self)
    raise ValueError("oops")


@app.task(shared=False, bind=True, acks_late=True, max_retries=2)
def retries(self):
    say("begin", self)
    if self.request.retries < 2:
        raise self.retry(countdown=0)


@app.task(shared=False, bind=True, acks_late=True, time_limit=2)
def limited(self, seconds):
    say("begin", self)
    time.sleep(seconds)
    say("end", self)


@app.task(shared=False, bind=True, acks_late=True, time_limit=2)
def stops(self, process):
    os.kill(process, signal.SIGSTOP)


@app.task(shared=False, bind=True, acks_late=True, soft_time_limit=2)
def softly(self, seconds):
    say("begin", self)
    time.sleep(seconds)
    say("end", self)


@celery.signals.task_revoked.connect
def revoked(request, **_):
    with LOG.open("a") as log:
        log.write(f"revoked {{request.id}} {{os.getpid()}}\\n")


@app.task(shared=False, bind=True, acks_late=True, reject_on_worker_lost=True)
def killed(self, seconds):
    say("begin", self)
    if len(LOG.read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    say("end", self)


@app.task(shared=False, bind=True, acks_late=True, retry_on_worker_lost=True, default_retry_delay=600)
def retried(self, how):
    leasekit_celery.current_lease().progress(7)
    act(self, how)


@app.task(shared=False, bind=True, retry_on_worker_lost=True, default_retry_delay=600)
def retried_early(self, how):
    act(self, how)


@app.task(shared=False, bind=True, acks_late=True)
def silent(self, how):
    act(self, how)


@app.task(shared=False, bind=True, acks_late=True, time_limit=2)
def followed(self, how):
    if not self.request.retries:
        self.retry(countdown=0, throw=False)
    act(self, how)


@app.task(shared=False, bind=True, acks_late=True, time_limit=2)
def replaced(self, how):
    try:
        self.replace(long.si(0) | long.si(0))
    finally:
        end(how)


@app.task(shared=False, bind=True, acks_late=True, acks_on_failure_or_timeout=False)
def unaccepted(self, how):
    act(self, how)


class Own({base}):
    abstract = True


@app.task(shared=False, bind=True, acks_late=True, base=Own)
def silent_own(self, how):
    act(self, how)


def act(self, how):
    say("begin", self)
    if len(LOG.read_text().splitlines()) == 1:
        end(how)
    say("end", self)


def end(how):
    if how == "sys.exit":
        sys.exit(3)
    elif how in ("SIGSTOP", "SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "CancelledError":
        raise asyncio.CancelledError
    elif how in ("sleeps", "deaf"):
        if how == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    else:
        re.match("(a+)+$", "a" * 40 + "b")  # holds the interpreter for hours
"""


class Shop:
    """An app as a module in `folder`, for workers and for this process, and what its tasks have written."""

    def __init__(self, folder: Path, name: str, *, redis: str, leases: str | None, ttl: float = 6) -> None:
        self.name = name
        self.log = folder / f"{name}.txt"
        text = SHOP.format(
            name=name,
            queue=f"{name}-{uuid.uuid4().hex}",  # Redis outlives a test, and so would its messages
            redis=redis,
            log=str(self.log),
            imports="import leasekit_celery" if leases else "",
            base="leasekit_celery.LeasedTask" if leases else "celery.Task",
            install=f"leasekit_celery.install(app, {leases!r}, ttl={ttl})" if leases else "",
        )
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        self.module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def send(self, task: str, *args: Any, again: str | None = None, **options: Any) -> str:
        return str(getattr(self.module, task).apply_async(args, task_id=again, **options).id)

    def send_copy(self, task: str, *args: Any, of: str, **options: Any) -> None:
        """Send what the first look at a message that came again sends."""
        self.send(task, *args, again=of, headers={"leasekit_put_off": 1}, **options)

    def count(self, word: str, task_id: str) -> int:
        return len(self.processes(word, task_id))

    def processes(self, word: str, task_id: str) -> list[str]:
        """The ids of the processes that have said this, one for each time."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return [line.split()[-1] for line in lines if line.startswith(f"{word} {task_id} ")]


class Workers(Protocol):
    def __call__(self, name: str, *options: str, **environment: str) -> "subprocess.Popen[bytes]": ...


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts `celery -A name worker`, in process groups that end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str, **environment: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "celery", "-A", name, "worker", "--concurrency", "4", "--without-mingle"]
        command += options
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--without-gossip", "--loglevel", "INFO"],
                cwd=tmp_path,
                env=os.environ | environment,
                start_new_session=True,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        kill_all(process)


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL for a worker and its pool: nothing of it says a last word."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Shops(Protocol):
    def __call__(self, name: str, *, leased: bool = True, ttl: float = 6) -> Shop: ...


@pytest.fixture
def shop(tmp_path: Path, redis_url: str, leases_url: str) -> Shops:
    def make(name: str, *, leased: bool = True, ttl: float = 6) -> Shop:
        return Shop(tmp_path, name, redis=redis_url, leases=leases_url if leased else None, ttl=ttl)

    return make


@pytest.mark.slow
def test_a_long_task_runs_several_times_without_leases_and_once_with_them(shop: Shops, workers: Workers) -> None:
    bare, leased = shop("bare", leased=False), shop("leased")
    workers("bare")
    workers("leased")
    twice, once = bare.send("long", 20), leased.send("long", 20)
    eventually(lambda: bare.count("begin", twice) > 1)
    eventually(lambda: leased.count("end", once))
    after = leased.send("long", 0)  # what was delivered again before is looked at before this one, or just after it
    eventually(lambda: leased.count("end", after))
    assert leased.count("begin", once) == 1


@pytest.mark.slow
def test_a_task_whose_worker_was_killed_runs_again(shop: Shops, workers: Workers) -> None:
    app = shop("killed")
    first = workers("killed")
    task = app.send("long", 4)
    eventually(lambda: app.count("begin", task))
    kill_all(first)
    workers("killed")
    eventually(lambda: app.count("end", task))
    assert app.count("begin", task) == 2


@pytest.mark.slow
def test_what_has_ended_is_acknowledged_without_running(shop: Shops, workers: Workers, tmp_path: Path) -> None:
    app = shop("ended")
    workers("ended")
    for task, *args in (("long", 0), ("fails",), ("retries",)):
        sent = app.send(task, *args)
        begins = 3 if task == "retries" else 1
        eventually(lambda sent=sent, begins=begins: app.count("begin", sent) == begins)  # type: ignore[misc]
        said = f"{sent} was delivered again, and had ended"
        app.send(task, *args, again=sent)
        eventually(lambda said=said: said in (tmp_path / "ended.log").read_text())  # type: ignore[misc]
        assert app.count("begin", sent) == begins


def test_a_copy_that_does_not_run_leaves_the_state_that_celery_has_stored(
    shop: Shops, workers: Workers, tmp_path: Path, redis_url: str
) -> None:
    app, results = shop("tracked"), celery.Celery(backend=redis_url, set_as_current=False).backend
    workers("tracked", "--hostname", "tracked@here", CELERY_RESULT_BACKEND=redis_url)
    log = tmp_path / "tracked.log"

    def result(task: str) -> tuple[str, Any]:
        stored = results.get_task_meta(task)
        return stored["status"], stored["result"]

    first = app.send("long", 60)
    process = eventually(lambda: app.processes("begin", first))[0]
    assert result(first) == ("STARTED", {"pid": int(process), "hostname": "tracked@here"})
    running = app.send("reports", 60)
    eventually(lambda: app.count("begin", running))
    app.send("reports", 60, again=running)
    eventually(lambda: f"task {running} is put off" in log.read_text())
    assert result(running) == ("PROGRESS", 7)
    failed = app.send("fails")
    eventually(lambda: result(failed)[0] == "FAILURE")
    app.send("fails", again=failed)
    eventually(lambda: f"{failed} was delivered again, and had ended" in log.read_text())
    assert result(failed)[0] == "FAILURE"


@pytest.mark.parametrize("name", slow_after(1, [None, "reports/ü"]))
def test_a_task_that_celery_ends_at_its_time_limit_has_failed_for_good(
    shop: Shops, workers: Workers, tmp_path: Path, name: str | None
) -> None:
    app = shop("limited")
    workers("limited")
    task = app.send("limited", 60, again=name and f"{name}-{uuid.uuid4()}")
    eventually(lambda: app.count("begin", task))
    app.send("limited", 60, again=task)  # as Redis does while the task runs: it is put off, and looked at again
    eventually(lambda: f"{task} was delivered again, and had ended" in (tmp_path / "limited.log").read_text())
    assert app.count("begin", task) == 1


@pytest.mark.slow
def test_a_time_limit_that_is_over_while_the_lease_is_settled_is_no_failure(
    shop: Shops, workers: Workers, leases: Leases, tmp_path: Path
) -> None:
    app = shop("settling", ttl=600)
    workers("settling")
    try:
        task = app.send("stops", leases.process.pid)
        log = tmp_path / "settling.log"
        eventually(lambda: f"task {task} has ended, and its time limit was over" in log.read_text())
        eventually(lambda: "exited with 'signal" in log.read_text())
    finally:
        leases.process.send_signal(signal.SIGCONT)
    assert "Hard time limit" not in log.read_text()


@pytest.mark.slow
def test_a_failure_that_the_main_process_cannot_store_is_no_end(shop: Shops, workers: Workers, tmp_path: Path) -> None:
    app = shop("unstored", ttl=600)
    workers("unstored", RESULTS="away")
    task = app.send("silent", "SIGKILL")
    log = tmp_path / "unstored.log"
    eventually(lambda: "exception: ConnectionError('the result backend is away')" in log.read_text())
    app.send("silent", "SIGKILL", again=task)
    eventually(lambda: app.count("end", task))


@pytest.mark.slow
def test_a_time_limit_that_is_over_while_its_worker_is_shut_down_loses_no_task(shop: Shops, workers: Workers) -> None:
    app = shop("leaving")
    worker = workers("leaving", SOFT_SHUTDOWN="3")  # longer than the limit
    task = app.send("limited", 60)
    eventually(lambda: app.count("begin", task))
    worker.send_signal(signal.SIGQUIT)
    eventually(lambda: worker.poll() is not None)
    workers("leaving")
    eventually(lambda: app.count("begin", task) == 2)


@pytest.mark.slow
def test_a_copy_that_expires_does_not_revoke_the_task_that_runs(shop: Shops, workers: Workers, tmp_path: Path) -> None:
    app = shop("expired")
    workers("expired")
    task = app.send("long", 2)
    eventually(lambda: app.count("begin", task))
    app.send_copy("long", 2, of=task, expires=0.5, countdown=1)
    eventually(lambda: f"{task} was delivered again, and had ended" in (tmp_path / "expired.log").read_text())
    assert [app.count(word, task) for word in ("begin", "end", "revoked")] == [1, 1, 0]


def test_a_copy_that_has_expired_is_revoked_if_no_run_has_its_lease(shop: Shops, workers: Workers) -> None:
    app = shop("orphan")
    workers("orphan")
    task = app.send("long", 0, expires=0.5, countdown=1, headers={"leasekit_put_off": 1})
    eventually(lambda: app.count("revoked", task))
    assert app.count("begin", task) == 0


@pytest.mark.slow
def test_a_task_that_is_sent_to_each_worker_runs_in_each(
    shop: Shops, workers: Workers, tmp_path: Path, redis_url: str
) -> None:
    app, log = shop("everywhere"), tmp_path / "everywhere.log"
    workers("everywhere")
    workers("everywhere")
    eventually(lambda: log.exists() and log.read_text().count(" ready.") == 2)
    with redis.Redis(unix_socket_path=redis_url.removeprefix("redis+socket://")) as broker:
        # Each worker subscribes twice, for the queue and for remote control, a moment after it says that it is ready.
        eventually(lambda: sum(client["psub"] == "1" for client in broker.client_list()) == 4)
    task = app.send("limited", 60, queue=app.module.every)
    eventually(lambda: log.read_text().count("Hard time limit") == 2)
    assert app.count("begin", task) == 2
    assert "is delivered again" not in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("by", slow_after(1, ["SIGTERM", "SIGKILL"]))
def test_a_task_is_terminated_though_a_copy_of_its_message_waits_and_never_runs_again(
    shop: Shops, workers: Workers, tmp_path: Path, leases_url: str, by: str
) -> None:
    app = shop("terminated", ttl=600)
    workers("terminated")
    log = tmp_path / "terminated.log"
    task = app.send("long", 60)
    process = eventually(lambda: app.processes("begin", task))[0]
    app.send_copy("long", 60, of=task, countdown=600)
    eventually(lambda: log.read_text().count(f"{task}] received") == 2)
    app.module.app.control.revoke(task, terminate=True, signal=by)
    eventually(lambda: not Path(f"/proc/{process}").exists())
    app.send_copy("long", 60, of=task)
    eventually(lambda: f"{task} was delivered again, and had ended" in log.read_text())
    assert [app.count(word, task) for word in ("begin", "end", "revoked")] == [1, 0, 1]
    assert "(it was revoked)" in str(history(leases_url, task)[-1].error)


@pytest.mark.slow
def test_a_worker_says_that_a_task_goes_on_whose_process_ignores_the_signal_of_its_revoke(
    shop: Shops, workers: Workers, tmp_path: Path
) -> None:
    app = shop("deaf")
    workers("deaf", REMAP_SIGTERM="SIGQUIT")
    task = app.send("waits")
    eventually(lambda: app.count("begin", task))
    app.module.app.control.revoke(task, terminate=True, signal="SIGTERM")
    said = f"task {task} goes on, though Celery calls it revoked: its process ignores"
    eventually(lambda: said in (tmp_path / "deaf.log").read_text())
    app.log.with_suffix(".go").touch()
    eventually(lambda: app.count("end", task))


def history(leases_url: str, task: str) -> list[HistoryEntry]:
    with leasekit.connect(leases_url) as client:
        info = eventually(lambda: client.get(kind_of(f"celery:{task}", "once:")))
    return list(info.history)


@pytest.mark.parametrize("name", slow_after(1, [None, "reports/ü"]))
def test_the_lease_of_a_killed_pool_process_does_not_keep_its_task_waiting_and_ends_as_a_crash(
    shop: Shops, workers: Workers, leases_url: str, name: str | None
) -> None:
    app = shop("struck", ttl=600)
    workers("struck")
    task = app.send("killed", 0, again=name and f"{name}-{uuid.uuid4()}")
    eventually(lambda: app.count("end", task))
    assert app.count("begin", task) == 2
    first = history(leases_url, task)[0]
    assert first.outcome == "crash"
    assert "signal 9 (SIGKILL)" in str(first.error)


@pytest.mark.parametrize(("name", "how"), [
    ("silent", "SIGKILL"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("silent", "SIGTERM"), ("silent", "sys.exit"), ("silent_own", "SIGKILL"),
    )),
])  # fmt: skip
def test_a_task_whose_process_something_else_has_ended_has_failed_unless_celery_delivers_it_again(
    shop: Shops, workers: Workers, tmp_path: Path, name: str, how: str
) -> None:
    app = shop("shot", ttl=600)
    workers("shot")
    task = app.send(name, how)
    log = tmp_path / "shot.log"
    eventually(lambda: "WorkerLostError" in log.read_text())
    app.send(name, how, again=task)
    eventually(lambda: f"{task} was delivered again, and had ended" in log.read_text())
    assert app.count("begin", task) == 1
    assert "was ended by leasekit" not in log.read_text()


def test_a_task_that_fails_with_no_exception_has_failed_for_good(
    shop: Shops, workers: Workers, leases_url: str, tmp_path: Path
) -> None:
    app = shop("interrupted", ttl=600)
    workers("interrupted")
    task = app.send("silent", "CancelledError")
    with leasekit.connect(leases_url) as client:
        eventually(lambda: (info := client.get(f"once:celery:{task}")) and info.status == "fatal_failure")
    app.send("silent", "CancelledError", again=task)
    eventually(lambda: f"{task} was delivered again, and had ended" in (tmp_path / "interrupted.log").read_text())
    assert app.count("begin", task) == 1


@pytest.mark.parametrize(
    "how",
    slow_after(1, ["deaf", "SIGKILL", "SIGTERM", "sys.exit", "sleeps"]),
)
@pytest.mark.parametrize("name", slow_after(1, ["replaced", "followed"]))
def test_what_a_run_has_sent_in_its_own_place_runs_also_if_its_process_is_ended(
    shop: Shops, workers: Workers, name: str, how: str
) -> None:
    app = shop("followed", ttl=600)
    workers("followed")
    task = app.send(name, how)
    eventually(lambda: app.count("end", task))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "sys.exit"])
def test_a_task_whose_process_was_ended_runs_again_if_celery_does_not_acknowledge_failures(
    shop: Shops, workers: Workers, tmp_path: Path, how: str
) -> None:
    app = shop("unaccepted", ttl=600)
    workers("unaccepted")
    task = app.send("unaccepted", how)
    log = tmp_path / "unaccepted.log"
    eventually(lambda: "WorkerLostError" in log.read_text())
    app.send("unaccepted", how, again=task)
    eventually(lambda: app.count("end", task))


@pytest.mark.skipif(not hasattr(celery.Task, "retry_on_worker_lost"), reason="an option of Celery 5.7")
@pytest.mark.parametrize(("name", "how"), [
    ("retried", "SIGKILL"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("retried", "SIGTERM"), ("retried", "sys.exit"),
        ("retried_early", "SIGKILL"), ("retried_early", "SIGTERM"), ("retried_early", "sys.exit"),
    )),
])  # fmt: skip
@pytest.mark.slow
def test_a_killed_attempt_whose_retry_celery_has_sent_does_not_run_again(
    shop: Shops, workers: Workers, tmp_path: Path, how: str, name: str
) -> None:
    app = shop("retried", ttl=600)
    workers("retried")
    task = app.send(name, how)
    log = tmp_path / "retried.log"
    eventually(lambda: f"[{task}] retry: Retry in 600s" in log.read_text())
    app.send(name, how, again=task)
    eventually(lambda: f"{task} was delivered again, and had ended" in log.read_text())
    assert app.count("begin", task) == 1
    app.send(name, how, again=task, retries=1)
    eventually(lambda: app.count("end", task))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timer is Linux's")
def test_a_run_whose_lease_is_lost_is_ended_before_another_begins(
    shop: Shops, workers: Workers, leases: Leases
) -> None:
    app = shop("lost")
    workers("lost")
    task = app.send("long", 20)
    first = eventually(lambda: app.processes("begin", task))[0]
    with leases.away():
        eventually(lambda: not Path(f"/proc/{first}").exists())
    eventually(lambda: app.count("begin", task) == 2)
    assert app.count("end", task) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's timer is Linux's")
@pytest.mark.parametrize("how", ["SIGSTOP", "holds the interpreter"])
def test_a_task_whose_process_could_not_send_heartbeats_runs_again_and_the_log_says_why(
    shop: Shops, workers: Workers, tmp_path: Path, how: str
) -> None:
    app = shop("silent")
    workers("silent")
    task = app.send("silent", how)
    eventually(lambda: app.count("end", task))
    assert app.count("begin", task) == 2
    log = tmp_path / "silent.log"

    def warnings() -> list[str]:
        lines = log.read_text().splitlines()
        return [line.partition("] ")[2] for line in lines if ": WARNING/MainProcess] " in line and task in line]

    why = "no heartbeat was acknowledged for 5 s (the process was stopped, or code held the interpreter)"
    assert eventually(warnings) == [f"task {task} is delivered again: its process was ended by leasekit, because {why}"]
    assert f"task {task} runs again, as attempt 2: " in log.read_text()


def test_a_task_that_is_called_like_a_function_needs_no_lease(shop: Shops) -> None:
    app = shop("called")
    assert app.module.long(0) is None
    assert app.count("end", "None") == 1


def test_after_its_tasks_were_made_an_app_is_refused(shop: Shops) -> None:
    app = shop("late", leased=False)
    app.module.app.finalize()
    with pytest.raises(ConfigError, match="before"):
        leasekit_celery.install(app.module.app, "memory://")


@pytest.mark.parametrize("url", SERVICES_WITHOUT_NAMES)
def test_a_service_that_keeps_no_names_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot hold leases of names, because it .*: keep names in another service"):
        leasekit_celery.install(celery.Celery("shop"), url)


@pytest.mark.parametrize("leased", slow_after(1, [True, False]))
def test_a_worker_of_greenlets_does_not_start_where_its_tasks_need_leases(
    shop: Shops,
    workers: Workers,
    tmp_path: Path,
    leased: bool,
) -> None:
    app = shop("green", leased=leased)
    worker = workers("green", "--pool", "gevent")
    if leased:
        assert worker.wait(60) == 1
        assert "leasekit: gevent has replaced threading" in (tmp_path / "green.log").read_text(encoding="utf-8")
    else:
        task = app.send("long", 0)
        eventually(lambda: app.count("end", task))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "answers", "said"),
    [
        ("long", "refuses", "is put off"),
        ("softly", "hangs", "is put off"),
        ("limited", "hangs", "is delivered again: its time"),
    ],
)
def test_without_the_service_a_task_is_neither_run_nor_lost(
    tmp_path: Path, redis_url: str, leases_url: str, workers: Workers, kind: str, answers: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = f"http://127.0.0.1:{silent.getsockname()[1] if answers == 'hangs' else 9}"
        app = Shop(tmp_path, "away", redis=redis_url, leases=away)
        path = tmp_path / "away.py"
        first = workers("away")
        task = app.send(kind, 0)
        log = tmp_path / "away.log"
        eventually(lambda: f"{task} {said}" in log.read_text(encoding="utf-8"))
        assert f"no task runs before the service of the leases answers (<Client of {away} " in log.read_text()
        assert app.count("begin", task) == 0
        kill_all(first)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(away, leases_url), encoding="utf-8")
    workers("away")
    eventually(lambda: app.count("end", task))
    assert f"tasks run under leases (<Client of {leases_url} " in log.read_text()
