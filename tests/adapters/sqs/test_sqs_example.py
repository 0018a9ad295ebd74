"""The loop of `examples/`, as it is and as it was before the diff that the document shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.adapters.sqs.fake import Fake

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/10_sqs_loop.py"
PAGE = ROOT / "docs/sqs.md"


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
    assert ran.stdout.split() == ["page", "0", "page", "1", "page", "0"]
    assert all(message.deleted for message in aws.queues["render"].messages)


def test_the_example_runs_and_its_messages_are_kept(aws: Fake, tmp_path: Path) -> None:
    run(aws, EXAMPLE, tmp_path)
    assert len(aws.asked("ChangeMessageVisibilityBatch")) >= 2


def test_the_diff_in_the_document_turns_a_loop_that_runs_into_the_example_with_two_lines(
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
    assert len([line for line in added if line not in taken]) == 2  # what is only indented is not written anew
    assert "leasekit" not in text.partition('"""\n')[2]
    program = tmp_path / "loop.py"
    program.write_text(text, encoding="utf-8")
    run(aws, program, tmp_path)
    assert aws.asked("ChangeMessageVisibilityBatch") == []
