"""`leasekit cancel`: tasks that nobody wants any more."""

from typing import Annotated

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import fail, spoken
from leasekit.cli.service import connected
from leasekit.task import Verdict

__all__ = ["EXAMPLES", "cancel"]

_BATCH = 1000  # a backend's largest

EXAMPLES = """\b
A line for each: id, verdict, reason. Verdicts: cancelled; ordered, where it
runs and its holder is told; gone, where it has ended or there is none.
Exit code 1 if any of them could not be cancelled.

\b
Examples:
  leasekit cancel 0199c1f0-…
  leasekit tasks --kind report --status new | cut -f1 | xargs leasekit cancel
"""


@spoken
def cancel(
    task_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="The tasks.")],
    backend: options.Backend = options.DEFAULT_URL,
    as_json: options.Json = False,  # noqa: FBT002 - a flag
) -> None:
    """Cancel tasks, whether they wait or run.

    One that waits is cancelled at once. One that runs is when its body has wound down, or its lease ends.
    """
    verdicts: list[Verdict] = []
    with connected(backend) as client:
        for start in range(0, len(task_ids), _BATCH):
            verdicts += client.cancel(*task_ids[start : start + _BATCH])
    for verdict in verdicts:
        if as_json:
            output.print_json(verdict)
        else:
            output.print_line([verdict.id, verdict.verdict, *([verdict.reason] if verdict.reason else [])])
    if gone := [verdict.id for verdict in verdicts if verdict.verdict not in {"cancelled", "ordered"}]:
        shown = output.plain(gone[0]) + (f" and {len(gone) - 1} more" if len(gone) > 1 else "")
        fail("cancel", f"{shown} cannot be cancelled: ended before, or not there")
