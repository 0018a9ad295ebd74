"""Processes of `leasekit dev`: each in a group of its own, so that Ctrl-C reaches them in the intended order."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Self

import typer

_PR_SET_PDEATHSIG = 1
_SILENCE = 1.0  # seconds of waiting before a message
_LAST = 5.0  # seconds for a process to end that was told to end at once


class Child:
    """A leasekit command as a process. Leaving the block asks it to end, and waits until it has.

    The process has `grace` seconds, or until `at_once` is set; then a second signal ends it at once.
    """

    def __init__(self, *command: str, grace: float, at_once: threading.Event | None = None) -> None:
        self._name = command[0]
        self._grace = grace
        self._at_once = at_once or threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 - leasekit's own commands
            [sys.executable, "-m", "leasekit", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._name == "serve" else None,
            text=True,
            process_group=0,
            # Python compares bytecode with its source by seconds and size: it would miss a quick edit of one character.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - no threads exist here whose locks a child could inherit
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def address(self) -> str | None:
        """Return the server's URL, as soon as the server prints it; None if the server ends instead."""
        assert self._process.stdout is not None  # noqa: S101 - a server's is a pipe
        found = re.search(r"https?://\S+", self._process.stdout.readline())
        return None if found is None else found[0]

    def _end(self) -> None:
        if self.code is not None:
            return
        self._process.terminate()
        if self._ends_within(min(self._grace, _SILENCE)):
            return
        say(f"waiting for {self._name!r} to end what it runs: {self._grace:g} s, or until Ctrl-C is pressed twice")
        if self._ends_within(self._grace - _SILENCE):
            return
        self._process.terminate()
        if not self._ends_within(_LAST, ignore_at_once=True):
            self._process.kill()
            self._process.wait()

    def _ends_within(self, seconds: float, *, ignore_at_once: bool = False) -> bool:
        until = time.monotonic() + seconds
        while self.code is None and time.monotonic() < until and (ignore_at_once or not self._at_once.is_set()):
            time.sleep(0.02)
        return self.code is not None


def say(what: str) -> None:
    typer.echo(f"leasekit dev: {what}", err=True)


# Looked up before the fork: a forked child must not import.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def _end_with_parent() -> None:
    """Have the kernel, if it can, end this child when its parent is killed."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
