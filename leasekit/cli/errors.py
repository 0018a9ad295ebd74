"""Errors of a command: one sentence on stderr, and an exit code with a meaning."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from leasekit.cli.options import with_options
from leasekit.errors import ConfigError, LeasekitError, Refused, UnknownScheme

FAILED = 1
WRONG_USAGE = 2
DAMAGED = 65  # EX_DATAERR: starting it again does not help
INTERRUPTED = 130


def spoken(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: leasekit's errors are printed as one sentence instead of raised, and Ctrl-C ends it silently."""
    run = with_options(command)

    @functools.wraps(run)
    def speaking(**options: Any) -> None:
        try:
            run(**options)
        except (ConfigError, UnknownScheme) as error:
            fail(command.__name__, sentence(error), WRONG_USAGE)
        except LeasekitError as error:
            fail(command.__name__, sentence(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None

    return speaking


def fail(command: str, what: str, code: int = FAILED) -> NoReturn:
    """Print what went wrong, and end with exit code `code`."""
    typer.echo(f"leasekit {command}: {what}", err=True)
    raise typer.Exit(code)


def sentence(error: LeasekitError) -> str:
    """Return an error's message in one line, with the wrong fields if a request was refused."""
    said = " ".join(str(error).split())
    if isinstance(error, Refused) and error.errors:
        faults = [(wrong["field"], wrong["detail"]) for wrong in error.errors if wrong.get("field")]
        unsaid = [f"{field} {detail}" for field, detail in faults if f"{field} {detail}" not in said.replace(": ", " ")]
        said = ": ".join(filter(None, [said, "; ".join(unsaid)]))
    return "".join(character if character.isprintable() else "�" for character in said)
