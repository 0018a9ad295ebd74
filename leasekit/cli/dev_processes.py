"""The processes of `leasekit dev`: each in a group of its own, so that Ctrl-C reaches them in our order."""

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

__all__ = ["Child", "say"]

_PR_SET_PDEATHSIG = 1
_SILENCE = 1.0  # seconds of waiting before something is said about it
_LAST = 5.0  # seconds for a process to end that was told to do so at once


class Child:
    """A command of ours as a process. Leaving the block asks it to end, and sees that it does.

    It has `grace` seconds, or until `at_once` is set; then it is told once more, which ends it at once.
    """

    def __init__(self, *command: str, grace: float, at_once: threading.Event | None = None) -> None:
        self._name = command[0]
        self._grace = grace
        self._at_once = at_once or threading.Event()
        self._process = subprocess.Popen(  # noqa: S603 - our own commands
            [sys.executable, "-m", "leasekit", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._name == "serve" else None,
            text=True,
            process_group=0,
            # Bytecode is judged by seconds and size: a quick edit of one character would not be seen.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are no threads here whose locks a child could inherit
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
        """Its exit code; None while it runs."""
        return self._process.poll()

    def address(self) -> str | None:
        """Where the server listens, as soon as it says so; None where it ends instead."""
        assert self._process.stdout is not None  # noqa: S101 - of a server it is a pipe
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
        if not self._ends_within(_LAST, patiently=True):
            self._process.kill()
            self._process.wait()

    def _ends_within(self, seconds: float, *, patiently: bool = False) -> bool:
        until = time.monotonic() + seconds
        while self.code is None and time.monotonic() < until and (patiently or not self._at_once.is_set()):
            time.sleep(0.02)
        return self.code is not None


def say(what: str) -> None:
    """A word to whoever sits before it, on stderr."""
    typer.echo(f"leasekit dev: {what}", err=True)


# Looked up before the fork: a child of a fork imports nothing.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def _end_with_parent() -> None:
    """In the child: where the kernel can, it ends the child too when we are killed."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
