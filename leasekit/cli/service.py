"""Service: connect a command to its service, without retries except where the command watches."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import typer

import leasekit
from leasekit.client import Client
from leasekit.errors import LeasekitError, Throttled, Unavailable

T = TypeVar("T")


@contextmanager
def connected(url: str, *, retry_for: float = 0) -> Generator[Client]:
    """Give a client whose calls are not repeated, or only for `retry_for` seconds: a person waits for the answer.

    If the service does not answer, the error says what to do about it.
    """
    with leasekit.connect(url, retry_for=retry_for) as client:
        try:
            yield client
        except Unavailable as error:
            advice = "name another with --backend or LEASEKIT_URL"
            if url.startswith("http"):
                advice += ", or start a server with 'leasekit serve'"
            raise LeasekitError(f"{error} ({advice})") from error


def looks(look: Callable[[], T], *, every: float) -> Iterator[T]:
    """Yield what `look` returns, now and every `every` seconds.

    An error of the first call is raised. Later outages are waited out, with a message at their begin and end.
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
            typer.echo("leasekit: the service answers again", err=True)
        away = False
        yield seen
