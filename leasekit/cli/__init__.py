"""The command line: `leasekit …`. One file a command; `app` puts them together."""

import sys

from leasekit.errors import LeasekitError

__all__ = ["main"]


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 refused or failed (stderr says why), 2 wrong usage."""
    try:
        from leasekit.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "leasekit":
            raise
        sys.exit(f"leasekit: the command line needs {error.name!r}: pip install 'leasekit[cli]'")
    try:
        app()
    except LeasekitError as error:
        sys.exit(f"leasekit: {error}")
