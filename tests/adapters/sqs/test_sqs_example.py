"""The loops of the document: the one of `examples/`, as it is and as it was before the diff, and the recipes."""

import inspect
import os
import re
import select
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import boto3
import pytest
from types_boto3_sqs import SQSClient

import leasekit_sqs
from leasekit import LeaseLost
from tests.adapters.sqs.fake import Fake

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/10_sqs_loop.py"
PAGE = ROOT / "docs/sqs.md"
MIGRATING = ROOT / "docs/migrating.md"


def run(aws: Fake, program: Path, folder: Path) -> None:
    for pages in (2, 1):
        aws.put("render", str(pages))
    environment = os.environ | {"AWS_ENDPOINT_URL": aws.endpoint}
    ran = subprocess.run(
        [sys.executable, str(program), "render"],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines() == ["2 pages", "1 pages"]
    assert all(message.deleted for message in aws.queues["render"].messages)


def test_the_example_runs_and_its_messages_are_kept(aws: Fake, tmp_path: Path) -> None:
    run(aws, EXAMPLE, tmp_path)
    assert len(aws.asked("ChangeMessageVisibilityBatch")) >= 2


def test_the_diff_in_the_document_turns_a_loop_that_runs_into_the_example_with_six_lines(
    aws: Fake, tmp_path: Path
) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    hunks = [hunk.strip("\n").split("\n") for hunk in re.split(r"^@@.*\n", diff, flags=re.M) if hunk.strip()]
    for hunk in hunks:
        before, after = ("".join(f"{line[1:]}\n" for line in hunk if line[0] in signs) for signs in (" -", " +"))
        assert text.count(after) == 1
        text = text.replace(after, before)
    added = [line[1:].strip() for hunk in hunks for line in hunk if line[0] == "+"]
    taken = [line[1:].strip() for hunk in hunks for line in hunk if line[0] == "-"]
    assert len([line for line in added if line not in taken]) == 6  # what is only indented is not written anew
    assert "leasekit" not in text.partition('"""\n')[2]
    program = tmp_path / "loop.py"
    program.write_text(text, encoding="utf-8")
    run(aws, program, tmp_path)
    assert aws.asked("ChangeMessageVisibilityBatch") == []


def recipe(first_line: str, page: Path = PAGE) -> str:
    """Return the block of a page that begins with this line."""
    text = page.read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python\n({re.escape(first_line)}.*?)^```", text, re.M | re.S)
    return str(block)


@pytest.mark.parametrize(
    ("page", "receives"),
    [(PAGE, False), (MIGRATING, True)],
)
def test_a_recipe_goes_on_after_a_message_that_fails(
    aws: Fake, caplog: pytest.LogCaptureFixture, page: Path, receives: bool
) -> None:
    for body in ("1", "bad", "3", "4", "5"):
        aws.put("q", body)
    published: list[int] = []
    client = boto3.session.Session().client("sqs", endpoint_url=aws.endpoint)
    url = client.get_queue_url(QueueName="q")["QueueUrl"]
    names: dict[str, Any] = {
        "sqs": client, "url": url, "render": int, "publish": published.append,
    }  # fmt: skip
    if receives:
        names["messages"] = client.receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    exec(recipe("import logging", page), names)  # noqa: S102 - the page is ours
    if page is PAGE:
        exec(recipe("answer = ", page), names)  # noqa: S102 - likewise
    client.close()
    assert published == [1, 3, 4, 5]
    assert [message.body for message in aws.queues["q"].messages if not message.deleted] == ["bad"]
    assert aws.queues["q"].messages[1].visible_at == aws.now + 300
    assert "ValueError" in caplog.text


SERVICE = """
import os, sys, threading, boto3

sqs = boto3.client("sqs")
url = sqs.get_queue_url(QueueName=sys.argv[1])["QueueUrl"]

"""
IN_THREADS = """
def render(pages):
    os.write(1, b"begins\\n")
    stopping.wait()
    os.write(1, b"stops\\n")

def publish(book):
    pass

"""
IN_ASYNCIO = """
async def render(pages):
    os.write(1, b"begins\\n")
    await asyncio.Event().wait()

"""


@pytest.mark.parametrize(
    ("render", "recipes", "messages", "left"),
    [
        pytest.param(IN_THREADS, ["import logging", "import signal\nimport threading"], 6, 2, id="threads"),
        pytest.param(IN_ASYNCIO, ["import asyncio"], 6, 6, id="asyncio", marks=pytest.mark.slow),
        pytest.param(IN_ASYNCIO, ["import asyncio"], 3, 3, id="asyncio, while a poll is open"),
    ],
)
def test_a_loop_of_four_holds_four_messages_and_on_a_signal_ends_its_blocks_and_hides_none(
    moto: str, sqs: SQSClient, queue: str, tmp_path: Path, render: str, recipes: list[str], messages: int, left: int
) -> None:
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    for number in range(messages):
        sqs.send_message(QueueUrl=url, MessageBody=str(number))
    program = tmp_path / "service.py"
    program.write_text("".join([SERVICE, render, *map(recipe, recipes)]), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(program), queue],
        env=os.environ | {"AWS_ENDPOINT_URL": moto},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as service:
        try:
            assert service.stdout is not None
            for _ in range(held := min(messages, 4)):
                assert service.stdout.readline() == b"begins\n"
            assert counts(sqs, url) == (messages - held, held)
            service.send_signal(signal.SIGTERM)
            _, log = service.communicate(timeout=30)
        finally:
            service.kill()
    assert (service.returncode, log) == (0, b"")
    assert counts(sqs, url) == (left, 0)


def test_a_message_that_an_open_poll_brings_after_the_signal_is_given_back_and_not_begun(
    moto: str, sqs: SQSClient, queue: str, tmp_path: Path
) -> None:
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="0")
    program = tmp_path / "service.py"
    recipes = map(recipe, ["import logging", "import signal\nimport threading"])
    program.write_text("".join([SERVICE, IN_THREADS, *recipes]), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(program), queue], env=os.environ | {"AWS_ENDPOINT_URL": moto}, stdout=subprocess.PIPE
    ) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline() == b"begins\n"
            service.send_signal(signal.SIGTERM)
            assert service.stdout.readline() == b"stops\n"
            sqs.send_message(QueueUrl=url, MessageBody="1")  # three threads poll
            seen, _ = service.communicate(timeout=30)
        finally:
            service.kill()
    assert (service.returncode, seen) == (0, b"")
    (late,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20)["Messages"]  # 6 s later at most
    assert late.get("Body") == "1"


def counts(sqs: SQSClient, url: str) -> tuple[int, int]:
    """Return how many messages are visible, and how many are in flight."""
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return int(found["ApproximateNumberOfMessages"]), int(found["ApproximateNumberOfMessagesNotVisible"])


@pytest.mark.parametrize(
    ("is_lost", "timeout", "raised"), [(True, 600, LeaseLost), (False, 0, subprocess.TimeoutExpired)]
)
def test_the_recipe_for_another_program_kills_all_of_it_when_the_lease_is_lost_or_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_lost: bool, timeout: float, raised: type[Exception]
) -> None:
    class Held:
        def check(self) -> None:
            if is_lost:
                raise LeaseLost("lost")

    started: list[tuple[subprocess.Popen[bytes], BinaryIO]] = []
    os.mkfifo(line := tmp_path / "line")

    class Program(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append((self, line.open("rb", buffering=0)))  # which waits for the grandchild

    run = recipe_for_a_program()
    monkeypatch.setattr(subprocess, "Popen", Program)
    with pytest.raises(raised):
        run(["sh", "-c", 'sleep 600 >"$0" & wait', str(line)], Held(), timeout=timeout)
    ((program, reader),) = started
    with reader:
        assert program.returncode == -9
        assert select.select([reader], [], [], 30)[0], "the grandchild goes on"
        assert reader.read() == b""


def test_the_recipe_for_another_program_says_why_it_failed() -> None:
    code = "import sys; sys.exit('x' * 5000 + ' no such film')"
    with pytest.raises(RuntimeError, match=r" ended with 1: x+ no such film$") as failed:
        recipe_for_a_program()([sys.executable, "-c", code], types.SimpleNamespace(check=lambda: None), timeout=600)
    assert len(str(failed.value).partition(": ")[2]) == 2047  # and the end of the line


def test_the_recipe_for_another_program_passes_on_what_it_writes_while_it_runs(tmp_path: Path) -> None:
    os.mkfifo(go_on := tmp_path / "go-on")
    code = f"print('one', flush=True); open({str(go_on)!r}).read(); print('two')"
    heard: list[str] = []

    def hear(text: str) -> None:
        heard.append(text)
        if len(heard) == 1:
            go_on.write_text("")  # the program waits for it

    held = types.SimpleNamespace(check=lambda: None)
    recipe_for_a_program()([sys.executable, "-c", code], held, timeout=600, on_output=hear)
    assert heard[0] == "one\n"


def recipe_for_a_program() -> Callable[..., None]:
    names: dict[str, Any] = {}
    exec(recipe("import contextlib", ROOT / "docs/handlers.md").partition("\nencode = ")[0], names)  # noqa: S102 - the page is ours
    found: Callable[..., None] = names["run"]
    return found


def test_the_page_shows_what_lease_takes() -> None:
    shown = re.search(r"^leasekit_sqs\.lease\((.*)\)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert shown is not None
    parameters = inspect.signature(leasekit_sqs.lease).parameters.values()
    given = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    assert shown[1].replace("*, ", "") == ", ".join(given)
