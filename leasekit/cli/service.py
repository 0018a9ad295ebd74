"""The service that a command asks: at once or not at all, except where it watches."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import typer

import leasekit
from leasekit.client import Client
from leasekit.errors import LeasekitError, Throttled, Unavailable

__all__ = ["connected", "looks"]

T = TypeVar("T")


@contextmanager
def connected(url: str, *, patience: float = 0) -> Generator[Client]:
    """A client whose calls are not repeated, or only for `patience` seconds: a person waits for the answer.

    Where nobody answers, the error says what to do about it.
    """
    with leasekit.connect(url, patience=patience) as client:
        try:
            yield client
        except Unavailable as error:
            advice = "name another with --backend or LEASEKIT_URL"
            if url.startswith("http"):
                advice += ", or start a server with 'leasekit serve'"
            raise LeasekitError(f"{error} ({advice})") from error


def looks(look: Callable[[], T], *, every: float) -> Iterator[T]:
    """What `look` sees, now and every so many seconds.

    The first look may fail. After it an outage is waited out, with a word on stderr when it begins and when it ends.
    """
    yield look()
    away = False
    while True:
        time.sleep(every)
        try:
            seen = look()
        except (Unavailable, Throttled) as error:
            if not away:
                typer.echo(f"leasekit: {error}; trying again", err=True)
            away = True
            continue
        if away:
            typer.echo("leasekit: it answers again", err=True)
        away = False
        yield seen
