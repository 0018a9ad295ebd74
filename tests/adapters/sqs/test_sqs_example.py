"""The loops of the document: the one of `examples/`, as it is and as it was before the diff, and the recipes."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest

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


def test_the_diff_in_the_document_turns_a_loop_that_runs_into_the_example_with_five_lines(
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
    assert len([line for line in added if line not in taken]) == 5  # what is only indented is not written anew
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
    client.close()
    assert published == [1, 3, 4, 5]
    assert [message.body for message in aws.queues["q"].messages if not message.deleted] == ["bad"]
    assert aws.queues["q"].messages[1].visible_at == aws.now + 300
    assert "ValueError" in caplog.text


@pytest.mark.parametrize(
    ("is_lost", "timeout", "raised"), [(True, 600, LeaseLost), (False, 0, subprocess.TimeoutExpired)]
)
def test_the_recipe_for_another_program_kills_it_when_the_lease_is_lost_or_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, timeout: float, raised: type[Exception]
) -> None:
    class Held:
        def check(self) -> None:
            if is_lost:
                raise LeaseLost("lost")

    started: list[subprocess.Popen[bytes]] = []

    class Program(subprocess.Popen[bytes]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    names: dict[str, Any] = {}
    exec(recipe("import contextlib", ROOT / "docs/handlers.md").partition("\nencode = ")[0], names)  # noqa: S102 - the page is ours
    monkeypatch.setattr(subprocess, "Popen", Program)
    with pytest.raises(raised):
        names["run"]([sys.executable, "-c", "import time; time.sleep(600)"], Held(), timeout=timeout)
    assert [program.returncode for program in started] == [-9]


def test_the_page_shows_what_lease_takes() -> None:
    shown = re.search(r"^leasekit_sqs\.lease\((.*)\)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert shown is not None
    parameters = inspect.signature(leasekit_sqs.lease).parameters.values()
    given = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    assert shown[1].replace("*, ", "") == ", ".join(given)
