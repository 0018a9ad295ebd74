"""App: all commands, put together. A command's module is imported when that command runs, so that `--help` is quick."""

import importlib
from typing import Annotated, Any

import typer
import typer.core
import typer.main

COMMANDS = {
    "serve": "Serve tasks over HTTP until SIGTERM or Ctrl-C.",
    "console": "Open the web console of a store without a server, until Ctrl-C.",
    "migrate": "Create or upgrade the tables of a database.",
    "work": "Run the handlers of a worker until SIGTERM or Ctrl-C.",
    "dev": "Run a server and a worker that restarts when code changes.",
    "schedule": "Schedule a task and print its id.",
    "status": "Show one task, or an overview of all.",
    "tasks": "List tasks, or follow them as they change.",
    "flow": "List, show, cancel, resume and draw flows.",
    "relay": "Schedule what an application has committed to its file.",
    "tree": "Draw a chain of tasks, each below the one it came from.",
    "cancel": "Cancel tasks, whether they wait or run.",
    "reschedule": "Change when waiting tasks are due, or how urgent they are.",
    "pause": "Have the tasks of a kind or a collection wait.",
    "drop": "Cancel the due tasks of a kind or a collection.",
    "open": "Start the tasks of a paused kind or collection again.",
    "gates": "List the kinds and collections that are paused or dropped.",
    "dead": "List, show, redrive and purge dead tasks.",
    "purge": "Remove tasks that have ended, with their results and history.",
    "workers": "List the workers, or have some finish what they hold, and stop.",
    "kinds": "List, show and change the settings of kinds.",
    "periodic": "List, show and change periodic tasks.",
    "token": "Make, list, revoke and rotate access tokens.",
    "audit": "List what operators did.",
    "nodes": "List the servers, and other processes that have the store open.",
    "stats": "Count the tasks of each kind in each status.",
    "budget": "Print how the seconds of a lease add up.",
    "conformance": "Check a client of the protocol, in any language.",
    "demo": "See long work survive a killed worker.",
}
"""Name → summary. The command `x` is the function `x` of `leasekit.cli.x`; its help shows `examples` of that module."""

_EXIT_CODES = """
Exit codes: 0 done; 1 refused, failed or not found, and stderr says why in a sentence; 2 wrong usage; 130 Ctrl-C.

\b
Example:
  leasekit serve &
  leasekit work my_module:worker &
  leasekit schedule thumbnail '{"pages": 3}' --wait
"""


class _Commands(typer.core.TyperGroup):
    """A group whose commands are only summaries until one is chosen."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and command is not None else None, rest


class _Command(typer.core.TyperCommand):
    """A command that refuses an option of one value that is given twice: the last one would win silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            if not isinstance(option, typer.core.TyperOption) or option.multiple or option.is_flag:
                continue
            if given.count(option) > 1:
                raise typer.BadParameter("it takes one value, and is given twice", ctx=ctx, param=option)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="leasekit",
    cls=_Commands,
    help="Leases and heartbeats for long-running Python tasks.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help takes as long to import as all the rest, and cuts what is long
    context_settings={"help_option_names": ["-h", "--help"]},
)


def load(name: str) -> Any:
    """Load the command `name`, with all its options."""
    module = importlib.import_module(f"leasekit.cli.{name}")
    alone = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    alone.command(name, cls=_Command, epilog=getattr(module, "EXAMPLES", None))(getattr(module, name))
    return typer.main.get_command(alone)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's signature
    if wanted:
        from importlib.metadata import version

        typer.echo(f"leasekit {version('leasekit')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _summary() -> None:
    """Take the place of a command that is not loaded; this function is never called."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_summary)
