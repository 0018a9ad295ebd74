"""`leasekit work` over SQS: what its supervisor gives back when a signal has ended the worker."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.adapters.sqs.fake import Fake
from tests.waiting import eventually

HANDLERS = """
    import time
    from pathlib import Path
    from leasekit import Worker

    worker = Worker()

    @worker.handler("k")
    def never_checks(payload):
        Path("begun").touch()
        time.sleep(300)
"""


@pytest.mark.parametrize(
    ("options", "is_twice"),
    [
        (["--drain-grace", "0", "--drain-timeout", "0.1"], False),
        (["--drain-timeout", "inf", "--drain-grace", "inf"], True),
    ],
    ids=["past its timeout", "by a second signal"],
)
def test_what_a_stopped_worker_ran_comes_again_at_once(
    aws: Fake, tmp_path: Path, options: list[str], is_twice: bool
) -> None:
    """At once is when no poll is open any more that the worker has begun."""
    (tmp_path / "handlers.py").write_text(textwrap.dedent(HANDLERS))
    message = aws.put("q", "work")
    url = f"sqs://q?region=eu-west-1&endpoint={aws.endpoint}&ttl=300&kind=k"
    command = [sys.executable, "-m", "leasekit", "work", "handlers:worker", "--backend", url, *options]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as supervisor,
    ):
        try:
            eventually((tmp_path / "begun").exists, "the handler")
            supervisor.send_signal(signal.SIGTERM)
            if is_twice:
                eventually(lambda: b"SIGTERM: the worker stops" in (tmp_path / "log").read_bytes(), "the first signal")
                supervisor.send_signal(signal.SIGTERM)
            assert supervisor.wait(60) == 128 + signal.SIGTERM
        finally:
            supervisor.kill()
    assert message.visible_at == aws.now + 6
    assert not message.deleted
