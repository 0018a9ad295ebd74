"""Command line `leasekit …`. Each command has a file of its own; `app` puts them together."""

import os
import sys
import threading

LAST_WORDS = 5.0
"""Seconds for exit handlers to run, and for logs to be written, when a command has ended."""


def main() -> None:
    """Run the command line. `leasekit --help` has the exit codes."""
    open_streams()
    # httpx loads its own command line, with rich, click and pygments: most of its import, if they are installed.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    try:
        from leasekit.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "leasekit":
            raise
        sys.exit(f"leasekit: the command line needs {error.name!r}: pip install '/path/to/leasekit[cli]'")
    try:
        try:
            app(prog_name="leasekit")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()  # the reader of the pipe has ended, as after `| head`
        sys.exit(1)
    except SystemExit as end:
        # A log that nobody can write to would hold up the interpreter's end for ever.
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        last_word = threading.Timer(LAST_WORDS, os._exit, [code])
        last_word.daemon = True
        last_word.start()
        raise


def open_streams() -> None:
    """Open what the caller has closed of stdin, stdout and stderr (`2>&-`), as /dev/null, here and for child processes.

    A file or socket that is opened next would have that number otherwise, and get all that is printed and logged.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 - it has the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def drop_stdout() -> None:
    """Discard what is still in the buffer of stdout: writing it must not fail at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
