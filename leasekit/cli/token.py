"""`leasekit token`: make, list, revoke and rotate access tokens."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from leasekit.cli import options, output
from leasekit.cli.errors import spoken
from leasekit.cli.service import connected
from leasekit.client import Client
from leasekit.errors import LeasekitError
from leasekit.tokens import SCOPES, NewToken, Scope, TokenInfo

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """\b
  leasekit token create NAME --scope SCOPE
                                make one; prints its secret, once
  leasekit token list           the tokens, also those that ended lately
  leasekit token show NAME      one of them
  leasekit token revoke NAME    end it, for good
  leasekit token rotate NAME    give it another secret; prints it, once

\b
The first token is made where the store is, with --store: whoever can open
the store may do everything. A token then makes others that may do no more
than it. NAME may be an id. The list has, in a pipe, a line for each: name,
state, scopes, kinds, when it was made, used, expires; - for an empty field.

\b
Scopes: submit  schedule tasks; cancel and reschedule them by their ids
        work    claim tasks, renew their leases, settle them
        read    see tasks, counts, workers, settings, events, metrics
        operate gates, settings, redrives, purges, bulk acts, tokens

\b
Examples:
  leasekit token create admin --store sqlite:///leasekit.db \\
      --scope read --scope operate
  leasekit token create workers --scope work --kind report --kind 'mail.*' \\
      --expires 90d --out workers.token
  leasekit token rotate workers --overlap 1h --out workers.token
"""

_ROOM = 200  # bytes, more than a secret has
_ACTIONS = ("create", "list", "show", "revoke", "rotate")

What = Annotated[str, typer.Argument(metavar="[ACTION]", help="create, list, show, revoke or rotate.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The token; of all actions but list.")]
Scopes = Annotated[
    list[str] | None, typer.Option("--scope", "-s", metavar="SCOPE", help="With create: what it allows; several times.")
]
Kinds = Annotated[
    list[str] | None,
    typer.Option("--kind", "-k", metavar="KIND", help="With create: for which kinds, as in mail or mail.*. Default: *"),
]
Expires = Annotated[
    float | None, typer.Option(parser=options.age, metavar="TIME", help="With create: end after this time, as in 90d.")
]
Overlap = Annotated[
    float | None,
    typer.Option(parser=options.age, metavar="TIME", help="With rotate: take the secret before it for this long too."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the secret into this file, which only its owner can read."),
]
Store = Annotated[
    str | None, typer.Option(metavar="URL", help="The store itself, sqlite:///… or postgresql://…, not a server.")
]


class Grant(NamedTuple):
    """The rights of a new token, and when they end: the command has the options that say it."""

    scopes: Sequence[Scope]
    kinds: Sequence[str]
    expires_at: datetime | None

    @staticmethod
    def named_by(*, scope: Scopes = None, kind: Kinds = None, expires: Expires = None) -> "Grant":
        at = None if expires is None else datetime.now(UTC) + timedelta(seconds=expires)
        return Grant(cast("list[Scope]", scope or []), kind or ["*"], at)


@spoken
def token(
    what: What = "list",
    name: Name = None,
    *,
    grant: Grant,
    overlap: Overlap = None,
    out: Out = None,
    store: Store = None,
    service: options.Service,
    as_json: options.Json = False,
) -> None:
    """Make, list, revoke and rotate access tokens.

    A server whose store has a token, or that listens to other machines, takes no request without one.
    """
    of = _checked(what, name, grant.scopes)
    with connected(service if store is None else options.Service(store, {}), may_create=what == "create") as client:
        match what:
            case "list":
                _print_all(client.tokens(), as_json=as_json)
            case "show":
                _print_one(client, of, as_json=as_json)
            case "revoke":
                _print_all([client.revoke_token(of)], as_json=as_json)
            case "rotate":
                _hand_out(partial(client.rotate_token, of, overlap=overlap or 0.0), out, as_json=as_json)
            case _:
                make = partial(client.create_token, of, scopes=grant.scopes, kinds=grant.kinds)
                _hand_out(partial(make, expires_at=grant.expires_at), out, as_json=as_json)


def _checked(what: str, name: str | None, scopes: Sequence[str]) -> str:
    """Return the name; raise `BadParameter` for an unknown action, or one with the wrong arguments."""
    if what not in _ACTIONS:
        raise typer.BadParameter(f"{what!r} is no action: use {', '.join(_ACTIONS)}", param_hint="ACTION")
    if (what == "list") is not (name is None):
        usage = "list" if what == "list" else f"{what} NAME"
        raise typer.BadParameter(f"write: leasekit token {usage}", param_hint="NAME")
    if (what == "create") is not bool(scopes):
        needs = f"say what it may do: {', '.join(SCOPES)}" if what == "create" else "it is for create only"
        raise typer.BadParameter(needs, param_hint="--scope")
    if unknown := [one for one in scopes if one not in SCOPES]:
        raise typer.BadParameter(f"{unknown[0]!r} is no scope: use {', '.join(SCOPES)}", param_hint="--scope")
    return name or ""


def _hand_out(make: Callable[[], NewToken], out: Path | None, *, as_json: bool) -> None:
    """Make a secret, and print it, or write it into a file of its own."""
    made = make() if out is None else _written(out, make)
    info = made.info
    if out is None and as_json:
        output.print_json({"secret": made.secret, "info": info})
    elif out is None:
        output.print_line([made.secret])
    where = f"is in {out}" if out is not None else "is not shown again"
    what = f"{info.name!r} may {', '.join(info.scopes)} for {', '.join(info.kinds)}"
    typer.echo(output.plain(f"leasekit token: {what}; its secret {where}"), err=True)


def _written(path: Path, make: Callable[[], NewToken]) -> NewToken:
    """Make a secret into a new file, or in place of one, readable by its owner only; or into a device or a pipe.

    The file is opened and has its room first: who gives itself another secret, and cannot write that down, has none.
    """
    made, part = None, None
    try:
        # To put a file in its place would take /dev/null from all others.
        if path.exists() and not path.is_file():
            with path.open("w", encoding="ascii") as device:
                made = make()
                device.write(f"{made.secret}\n")
            return made
        if path.is_symlink():
            raise OSError(None, "a link is there")
        descriptor, part = mkstemp(dir=path.parent, prefix=".leasekit-token-")
        with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 - a descriptor
            file.write(" " * _ROOM)
            file.flush()
            os.fsync(descriptor)
            file.seek(0)
            made = make()
            file.write(f"{made.secret}\n")
            file.truncate()
        Path(part).replace(path)
    except OSError as error:
        then = "nothing was changed, so give another --out" if made is None else "rotate the token with another --out"
        raise LeasekitError(f"the secret cannot be written to {path} ({error.strerror}): {then}") from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)
    return made


def _print_one(client: Client, name: str, *, as_json: bool) -> None:
    if (info := client.token(name)) is None:
        raise LeasekitError(f"there is no access token {name!r}: `leasekit token list` shows them")
    _print_all([info], as_json=as_json)


def _print_all(found: Sequence[TokenInfo], *, as_json: bool) -> None:
    if not as_json and output.on_terminal():
        output.console().print(_table(found) if found else "there is no access token")
        return
    for info in found:
        if as_json:
            output.print_json(info)
        else:
            times = (info.created_at, info.used_at, info.expires_at)
            shown = ["-" if at is None else output.moment(at) for at in times]
            output.print_line([info.name, _state(info), ",".join(info.scopes), ",".join(info.kinds), *shown])


def _table(found: Sequence[TokenInfo]) -> "Table":
    shown = output.table("token", "state", "may", "kinds", "made", "by", "used", "expires", "id")
    for info in found:
        used = "-" if info.used_at is None else output.ago(info.used_at)
        expires = "-" if info.expires_at is None else output.moment(info.expires_at)
        may, kinds = ", ".join(info.scopes), ", ".join(info.kinds)
        cells = (
            *(info.name, _state(info), may, kinds, output.ago(info.created_at)),
            *(info.created_by, used, expires, info.id),
        )
        shown.add_row(*map(output.styled, cells))
    return shown


def _state(info: TokenInfo) -> str:
    if info.revoked_at is not None:
        return "revoked"
    return "expired" if info.expires_at is not None and info.expires_at <= datetime.now(UTC) else "valid"
