"""Service: connect a command to its service, without retries except where the command watches."""

import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import typer

import leasekit
from leasekit.cli.options import DEFAULT_URL, Service
from leasekit.client import Client
from leasekit.errors import LeasekitError, MissingDependency, Throttled, Unavailable

T = TypeVar("T")


@contextmanager
def connected(service: Service, *, retry_for: float = 0, may_create: bool = False) -> Generator[Client]:
    """Give a client whose calls are not repeated, or only for `retry_for` seconds: a person waits for the answer.

    If the service does not answer, the error says what to do about it. A file that does not exist is an error too,
    because a mistyped path would show an empty store, unless the command `may_create` it.
    """
    url, options = service
    os.environ["LEASEKIT_URL"] = url  # the service that LEASEKIT_HEADERS is for
    try:
        client = leasekit.connect(url, retry_for=retry_for, **options)
    except MissingDependency as error:
        if url != DEFAULT_URL:
            raise
        raise LeasekitError(f"{error}; {url} is used where no --backend and no LEASEKIT_URL names a service") from error
    with client:
        if not may_create and (file := missing_file(client.url)):
            raise LeasekitError(
                f"there is no store at {file}: name another with --backend or LEASEKIT_URL (sqlite:/// is followed by "
                "a path in the working directory, sqlite://// by an absolute one)"
            )
        try:
            yield client
        except Unavailable as error:
            advice = "name another with --backend or LEASEKIT_URL"
            if url.startswith("http") and "cannot be reached" in str(error):
                advice += ", or start a server with 'leasekit serve'"
            raise LeasekitError(f"{error} ({advice})") from error


def missing_file(url: str | None) -> str | None:
    """Return the absolute path that a `sqlite://` URL names, if there is no store yet, else None."""
    path = os.path.realpath(re.sub(r"\?retention=[^/]*\Z", "", (url or "").removeprefix("sqlite:///")))
    is_there = any(os.path.exists(name) for name in (path, f"{path}.id"))  # noqa: PTH110 - without access is there
    return path if (url or "").startswith("sqlite:///") and not is_there else None


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
