"""Run a client's program through the scenarios, and judge what it did."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from leasekit.errors import ConfigError
from leasekit.server.conformance.record import Record
from leasekit.server.conformance.recorder import SIGN, Recorder, until
from leasekit.server.conformance.rules import RULES
from leasekit.server.conformance.scenarios import KIND, TTL, Scenario
from leasekit.server.engine import Engine
from leasekit.server.http.process import InnerServer
from leasekit.server.store.memory import MemoryStore
from leasekit.task import FixedDelays, NewTask, Status, TaskInfo

STOP_TIMEOUT = 30.0  # seconds until a program has ended after SIGTERM; then it is killed
_OTHER_RUN = 0.5  # seconds for which a client is watched after its tasks have ended

LEASED = frozenset({Status.CLAIMED, Status.PROCESSING})


@dataclass(frozen=True)
class Finding:
    """A rule that the client broke."""

    rule: str
    """The name of the rule."""
    must: str
    """What a client must do."""
    found: str
    """What this client did."""


async def check(scenario: Scenario, command: Sequence[str]) -> list[Finding]:
    """Run a program through one scenario, and return the rules that it broke.

    The program finds the server's URL in `LEASEKIT_URL`, claims tasks of the kind `conformance`, and ends at SIGTERM.
    """
    async with Engine(MemoryStore()) as engine:
        recorder = Recorder(engine, scenario.faults)
        async with _served(recorder) as url:
            await engine.schedule(_tasks(scenario, url))
            async with _running(command, url, recorder.record) as program:
                findings = await _until_ended(scenario, engine, recorder, program)
        tasks = [await _task(engine, job.id) for job in scenario.jobs]
    return [*findings, *_ends(scenario, tasks), *judged(recorder.record)]


def judged(record: Record) -> list[Finding]:
    """Return how the record breaks the rules; each rule is listed once, with the first case."""
    found = ((rule, next(rule(record), None)) for rule in RULES)
    return [Finding(rule.__name__, rule.__doc__ or "", text) for rule, text in found if text is not None]


def _tasks(scenario: Scenario, url: str) -> list[NewTask]:
    return [
        NewTask(
            id=job.id,
            kind=KIND,
            payload=Raw(msgspec.json.encode(job.payload(f"{url}{SIGN}/{job.id}"))),
            claim_timeout=TTL,
            heartbeat_timeout=TTL,
            retry=FixedDelays(waits=[0.2]),
        )
        for job in scenario.jobs
    ]


async def _task(engine: Engine, task_id: str) -> TaskInfo:
    if (task := await engine.queries.get(task_id)) is None:
        raise LookupError(task_id)  # cannot be: nothing removes tasks here
    return task


async def _have_ended(scenario: Scenario, engine: Engine) -> bool:
    return all([(await _task(engine, job.id)).status.ended for job in scenario.jobs])


async def _until_ended(
    scenario: Scenario, engine: Engine, recorder: Recorder, program: asyncio.subprocess.Process
) -> list[Finding]:
    """Wait until the scenario is over; disturb the client meanwhile as the scenario says."""
    record = recorder.record
    if scenario.cancel is not None or scenario.stop:
        await until(lambda: bool(record.signs) or program.returncode is not None, within=scenario.within)
    if scenario.cancel is not None:
        await engine.cancel([scenario.cancel])
    if scenario.stop:
        return await _stop(program, record)
    end = asyncio.get_running_loop().time() + scenario.within
    while not await _have_ended(scenario, engine):
        if program.returncode is not None:
            record.exit_code = program.returncode
            return [_program(f"ended with exit code {program.returncode} before it was told to")]
        if asyncio.get_running_loop().time() >= end:
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(_OTHER_RUN)
    return await _stop(program, record)


async def _stop(program: asyncio.subprocess.Process, record: Record) -> list[Finding]:
    with contextlib.suppress(ProcessLookupError):
        program.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            record.exit_code = await program.wait()
    except TimeoutError:
        return [_program(f"had not ended {STOP_TIMEOUT:g} s after SIGTERM")]
    return []


def _program(found: str) -> Finding:
    return Finding("the_program_ends_when_it_is_told_to", "End at SIGTERM, and not before.", f"the program {found}")


def _ends(scenario: Scenario, tasks: Sequence[TaskInfo]) -> list[Finding]:
    """Return how the tasks did not end as they should."""
    findings: list[Finding] = []
    for job, task in zip(scenario.jobs, tasks, strict=True):
        must = f"End {task.id!r} as {job.ends_as}" if job.ends_as else f"Report or release {task.id!r} before the end"
        wrong = task.status is not job.ends_as if job.ends_as else task.status in LEASED
        if wrong:
            findings.append(Finding("tasks_end_as_they_should", must, f"{task.id!r} is {task.status}"))
        elif task.attempt > scenario.attempts:
            must = f"Take {scenario.attempts} attempt(s) at most"
            findings.append(Finding("tasks_end_as_they_should", must, f"{task.id!r} took {task.attempt}"))
        elif task.status is Status.SUCCESS and (result := msgspec.json.decode(task.result)) != f"result of {task.id}":
            must = "Report the result that the payload names"
            findings.append(Finding("tasks_end_as_they_should", must, f"the result of {task.id!r} is {result!r}"))
    return findings


@contextlib.asynccontextmanager
async def _served(recorder: Recorder) -> AsyncGenerator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = InnerServer(recorder, stop_timeout=1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started or serving.done(), within=30)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], url: str, record: Record) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run the program in a process group of its own, which is killed in the end."""
    environment = {**os.environ, "LEASEKIT_URL": url}
    try:
        program = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}; name a program and its arguments") from None
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await program.wait()
