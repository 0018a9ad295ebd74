"""Output of commands: tables for people, lines for pipes, JSON for scripts.

Rule 1: on a terminal a table or a live view, elsewhere lines whose fields are separated by tabs.
Rule 2: text that others wrote (payloads, errors, names) reaches a terminal without control characters.
"""

import json
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import typer

from leasekit.cli import drop_stdout
from leasekit.codecs import Encoded
from leasekit.errors import LeasekitError
from leasekit.task import Status, TaskInfo

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = {
    Status.CLAIMED: "cyan",
    Status.PROCESSING: "cyan",
    Status.RETRIABLE_FAILURE: "yellow",
    Status.SUCCESS: "green",
    Status.FATAL_FAILURE: "red",
    Status.CANCELLED: "magenta",
    Status.DROPPED: "magenta",
    Status.DEAD: "red",
}


class View(Protocol):
    """A place on the terminal whose content is replaced."""

    def update(self, renderable: "RenderableType", *, refresh: bool = False) -> None: ...


def on_terminal() -> bool:
    return sys.stdout.isatty()


def plain(value: object) -> str:
    """Return a value as one line of text, without control characters."""
    return "".join(character if character.isprintable() else "�" for character in str(value))


def compact(value: Any) -> str:
    """Return a user's value as JSON, or an empty string for None; of an encoded value, the name of its codec."""
    if isinstance(value, Encoded):
        return plain(value)
    return "" if value is None else plain(msgspec.json.encode(value).decode())


def moment(at: datetime | None) -> str:
    """Return a point in time: RFC 3339 in the reader's zone, with its offset, or `-` for None."""
    return "-" if at is None else at.astimezone().isoformat(timespec="seconds")


def error_text(error: Any) -> str:
    """Return the error of a run in one line: type and message without the traceback, or JSON in a form of its own."""
    match error:
        case {"type": str(kind), "message": str(message)}:
            return plain(" ".join(f"{kind}: {message}".split()))
        case _:
            return compact(error)


def ago(at: datetime, now: datetime | None = None) -> str:
    """Return a point in time for people: its distance from now."""
    now = now or datetime.now(UTC)
    return f"{span(at, now)} ago" if now >= at else f"in {span(at, now)}"


def span(start: datetime, end: datetime | None = None) -> str:
    """Return the time from `start` to `end` (None: now) for people, without its sign."""
    seconds = abs(((end or datetime.now(UTC)) - start).total_seconds())
    size, unit = next((n, u) for n, u in _UNITS if seconds >= n or n == 1)
    return f"{int(seconds / size)} {unit}"


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def print_json(value: Any) -> None:
    """Print a value as one line of JSON, in which what a terminal would obey is escaped."""
    line = msgspec.json.encode(value).decode()
    _print("".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in line))


def print_line(fields: Iterable[object]) -> None:
    """Print one line of fields, with `-` for an empty one, so that their number is always the same."""
    _print("\t".join(plain(field) or "-" for field in fields))


def _print(line: str) -> None:
    try:
        typer.echo(line)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise LeasekitError(f"the output cannot be written to stdout: {error.strerror}") from error


def task_fields(task: TaskInfo) -> list[object]:
    """Return a task as the fields of one line."""
    return [task.id, task.kind, task.status, task.attempt, moment(task.at), task.worker or ""]


def console(*, width: int | None = None) -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=width)


def table(*columns: str, title: str | None = None) -> "Table":
    from rich import box
    from rich.table import Table

    empty = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        empty.add_column(column, overflow="ellipsis", no_wrap=True)
    return empty


def styled(value: object, style: str = "") -> "Text":
    """Return text that rich does not read as markup."""
    from rich.text import Text

    return Text(plain(value), style=style)


@contextmanager
def live() -> Generator[View]:
    """Give a view that is replaced in place, and whose last state stays."""
    from rich.live import Live

    # No thread that refreshes: the content changes only when `update` is called.
    with Live(console=console(), auto_refresh=False, vertical_overflow="crop") as view:
        yield view
