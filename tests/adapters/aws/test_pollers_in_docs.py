"""The pollers of `examples/`, as they are and as they were before the diff that the documents show."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.adapters.aws.conftest import Aws

ROOT = Path(__file__).parents[3]
ARN = "arn:aws:states:eu-central-1:123456789012:activity:resize"


class Poller(NamedTuple):
    """A poller, and what of it a document shows."""

    example: Path
    page: Path
    arguments: list[str]
    source: str
    inputs: list[Any]
    results: list[str]
    heartbeat: str

    @property
    def hunks(self) -> list[list[str]]:
        (diff,) = re.findall(r"^```diff\n(.*?)^```", self.page.read_text(encoding="utf-8"), re.M | re.S)
        return [hunk.strip("\n").split("\n") for hunk in re.split(r"^@@.*\n", diff, flags=re.M) if hunk.strip()]


SWF = Poller(
    ROOT / "examples/11_swf_poller.py",
    ROOT / "docs/swf.md",
    [],
    "render",
    [{"pages": 2}, {"pages": 1}],
    ['"2 pages"', '"1 pages"'],
    "RecordActivityTaskHeartbeat",
)
SFN = Poller(
    ROOT / "examples/12_sfn_activity.py",
    ROOT / "docs/sfn.md",
    [ARN],
    ARN,
    [{"width": 80}, {"width": 40}],
    ['{"width":80,"height":60}', '{"width":40,"height":30}'],
    "SendTaskHeartbeat",
)


def run(aws: Aws, poller: Poller, program: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the service was told at the end of each task."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    works = [aws.schedule(poller.source, "work", value) for value in poller.inputs]
    command = [sys.executable, str(program), *poller.arguments]
    ran = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [next(iter(work.end.values())) for work in works]


@pytest.mark.parametrize("poller", [SWF, SFN], ids=lambda poller: poller.page.stem)
def test_an_example_runs_and_its_tasks_are_beaten_and_completed(
    aws: Aws, poller: Poller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(aws, poller, poller.example, tmp_path, monkeypatch) == poller.results
    assert len(aws.asked(poller.heartbeat)) >= len(poller.inputs)


@pytest.mark.parametrize("poller", [SWF, SFN], ids=lambda poller: poller.page.stem)
def test_the_diff_in_the_document_turns_a_poller_that_runs_into_the_example_with_three_lines(
    aws: Aws, poller: Poller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = poller.example.read_text(encoding="utf-8")
    for hunk in poller.hunks:
        before, after = ("".join(f"{line[1:]}\n" for line in hunk if line[0] in signs) for signs in (" -", " +"))
        assert text.count(after) == 1
        text = text.replace(after, before)
    assert sum(line[0] == "+" for hunk in poller.hunks for line in hunk) <= 3
    assert "leasekit" not in text.partition('"""\n')[2]
    program = tmp_path / "poller.py"
    program.write_text(text, encoding="utf-8")
    ends = run(aws, poller, program, tmp_path, monkeypatch)
    assert [re.sub(r"\s", "", end) for end in ends] == [re.sub(r"\s", "", result) for result in poller.results]
    assert aws.asked(poller.heartbeat) == []
