"""`leasekit migrate`: create the tables of a PostgreSQL database, or bring them up to date."""

from typing import Annotated

import typer

from leasekit.cli.errors import fail, sentence
from leasekit.errors import LeasekitError

EXAMPLES = """\b
Servers of the version before this one can go on meanwhile.
Exit code 1 if the database cannot be changed, or with --check
if it has to be.

\b
Examples:
  leasekit migrate --store postgresql://db.example.com/tasks
  LEASEKIT_STORE=postgresql://db/tasks leasekit migrate --check
"""


def migrate(
    store: Annotated[
        str,
        typer.Option(envvar="LEASEKIT_STORE", show_envvar=False, help="The database, postgresql://… [LEASEKIT_STORE]"),
    ],
    check: Annotated[bool, typer.Option("--check", help="Only say whether a migration is needed.")] = False,  # noqa: FBT002
) -> None:
    """Create or upgrade the tables of a database."""
    from leasekit.server.store import SharedStore
    from leasekit.server.store.urls import open_store

    try:
        opened = open_store(store)
        if not isinstance(opened, SharedStore):
            fail("migrate", "only a PostgreSQL database is migrated by hand: an SQLite file is at its next start")
        lacking = opened.lacks()
        made = [] if check else opened.migrate()
    except LeasekitError as error:
        fail("migrate", sentence(error))
    what, numbers = ("lacking", lacking) if check else ("made", made)
    typer.echo(f"{what}: {', '.join(f'version {number}' for number in numbers)}" if numbers else "up to date")
    raise typer.Exit(int(check and bool(lacking)))
