"""The command line: `leasekit …`. One file a command; `app` puts them together."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. `leasekit --help` has the exit codes."""
    try:
        from leasekit.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "leasekit":
            raise
        sys.exit(f"leasekit: the command line needs {error.name!r}: pip install 'leasekit[cli]'")
    try:
        try:
            app(prog_name="leasekit")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on, as after `| head`. The interpreter must not find the closed pipe at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
