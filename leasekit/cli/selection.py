"""The options by which commands select tasks."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, cast

import typer

from leasekit.cli import options, output
from leasekit.config import duration
from leasekit.errors import ConfigError
from leasekit.task import Selection, Status


def when(text: str) -> datetime:
    """Return the instant that a time, or an age such as 12h, means, for an option's `parser`."""
    try:
        return datetime.now(UTC) - timedelta(seconds=duration("the age", text))
    except ConfigError:
        return options.instant(text)


Kind = Annotated[str | None, typer.Option("--kind", "-k", help="Only tasks of this kind.")]
OfStatus = Annotated[Status | None, typer.Option("--status", "-s", help="Only tasks in this status.")]
Collection = Annotated[str | None, typer.Option(help="Only tasks of this collection.")]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="Only tasks with this tag; several: with all of them.")
]
Key = Annotated[str | None, typer.Option(help="Only tasks with this key.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Only tasks with this text in their reason.")]
Error = Annotated[str | None, typer.Option(metavar="TEXT", help="Only tasks with this text in their last error.")]
ErrorType = Annotated[str | None, typer.Option(metavar="NAME", help="Only tasks whose last error has this type.")]
MinAttempts = Annotated[int | None, typer.Option(min=1, help="Only tasks that ran so many times, at least.")]
Since = Annotated[
    datetime | None,
    typer.Option(
        parser=when, metavar="TIME", help="Only tasks that ended since then: an age such as 12h, or RFC 3339."
    ),
]
Until = Annotated[datetime | None, typer.Option(parser=when, metavar="TIME", help="Only tasks that ended before.")]


class Wanted(dict[str, Any]):
    """The filters of a command: a command with a parameter `wanted` has the options that say them."""

    @staticmethod
    def named_by(
        *,
        kind: Kind = None,
        status: OfStatus = None,
        collection: Collection = None,
        tags: Tags = None,
        key: Key = None,
        reason: Reason = None,
        error: Error = None,
        error_type: ErrorType = None,
        min_attempts: MinAttempts = None,
        since: Since = None,
        until: Until = None,
    ) -> "Wanted":
        return Wanted({name: value for name, value in locals().items() if value not in (None, [])})

    @property
    def filters(self) -> Selection:
        """The filters, as a client takes them."""
        return cast("Selection", dict(self))

    def __str__(self) -> str:
        return output.plain(", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in self.items()))


def _text(value: object) -> str:
    return " and ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)
