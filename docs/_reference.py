"""The reference: every setting, command, error, event, trait and call, said in the words of the code.

What the code says in no comment or docstring is said in `_words`; what is said nowhere is an error.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from types import ModuleType
from typing import Any

import msgspec

from _source import annotations, comments, documented, of_parameters, paragraphs, signature
from _words import words
from leasekit import Beats, Client, Idle, Lease, Worker, backend, connect, errors, hooks, lease, leased
from leasekit.backend import Traits
from leasekit.claiming import Tasks
from leasekit.cli import app
from leasekit.registry import open_backend
from leasekit.task import Exponential, NewTask, Polynomial, Status, TaskInfo, TaskOptions, Waits
from leasekit.testing import clock, effects, faults, memory, proxy
from leasekit.wire import MAX_BATCH, MAX_KINDS

__all__ = ["PAGES", "code", "fields_of", "struct_defaults", "table"]

_INNER = {
    "Client.connection", "Client.reserve", "Lease.attach", "Lease.begin", "Lease.end", "Lease.ended", "Lease.enter",
    "Lease.leave", "Lease.move",
}  # fmt: skip
"""Public to other parts of leasekit, not to users."""

# Building blocks ----------------------------------------------------------------------------------------------

_GENERATED = "<!-- Written by docs/_generate.py, from the code: change that. -->"


def page(title: str, intro: str, *sections: str) -> str:
    return "\n\n".join([_GENERATED, f"# {title}", intro, *sections]) + "\n"


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown; `|` in cells is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def type_of(text: str) -> str:
    """A type as it is written, with its bounds in words."""

    def bounds(match: re.Match[str]) -> str:
        of, said = match[1], dict(one.split("=") for one in match[2].split(", "))
        what = "entries" if of.startswith("list") else "characters"
        shown = [f"{sign} {said[key]}" for key, sign in _SIGNS.items() if key in said]
        shown += [f"{said['min_length']} to {said.get('max_length', '')} {what}"] if "min_length" in said else []
        shown += [f"up to {said['max_length']} {what}"] if "max_length" in said and not shown else []
        return of + (f" {', '.join(shown)}" if shown else "")

    text = (
        text.replace("MAX_BATCH", str(MAX_BATCH))
        .replace("MAX_KINDS", str(MAX_KINDS))
        .replace(", _Batch]", f", Meta(min_length=1, max_length={MAX_BATCH})]")
    )
    return (
        re.sub(r"Annotated\[([^(]+), Meta\(([^)]*)\)\]", bounds, text)
        .replace(" | UnsetType", "")
        .replace(" | ", " or ")
    )


_SIGNS = {"ge": "≥", "gt": ">", "le": "≤"}


def code(value: object) -> str:
    return f"`{value}`"


def prose(docstring: str | None, *, without: Mapping[str, Any] | None = None) -> str:
    """A docstring as Markdown; drawings are blocks, and what is said in a table is left out."""
    shown: list[str] = []
    for paragraph in paragraphs(docstring or ""):
        if paragraph.startswith(" "):
            shown.append("```text\n" + paragraph + "\n```")
        elif not (without and of_parameters(paragraph, without)):
            shown.append(paragraph)
    return "\n\n".join(shown)


def _default(value: Any) -> str:
    if value is msgspec.UNSET:
        return "absent"
    if value in (MISSING, msgspec.NODEFAULT, inspect.Parameter.empty):
        return "required"
    if isinstance(value, Exponential):
        return code("Exponential()")
    return code(f"{value:g}" if isinstance(value, float) else repr(value))


def parameters(owner: str, function: Callable[..., Any], docstring: str | None) -> str:
    """A table of what a function takes."""
    taken = {
        name: one for name, one in inspect.signature(function).parameters.items() if name not in {"self", "function"}
    }
    said = of_parameters(docstring or "", taken)
    rows = [
        (code(f"*{name}" if one.kind is one.VAR_POSITIONAL else name),
         "" if one.kind is one.VAR_POSITIONAL else _default(one.default), words(owner, name, said.get(name, "")))
        for name, one in taken.items()
    ]  # fmt: skip
    return table(("parameter", "default", "meaning"), rows)


def fields_of(cls: type, defaults: Mapping[str, Any]) -> str:
    """A table of what a value is made of."""
    said, types = comments(cls), annotations(cls)
    rows = [
        (code(name), code(type_of(types[name])), _default(defaults[name]), words(cls.__name__, name, text))
        for name, text in said.items()
    ]
    return table(("field", "type", "default", "meaning"), rows)


def struct_defaults(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(cls)
    }


def _dataclass_defaults(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in fields(cls)}


def entry(name: str, docstring: str | None, *more: str, level: int = 3, called: Any = None) -> str:
    """A heading, how it is called, what it promises."""
    head = f"{'#' * level} {name}"
    wait = "await " if inspect.iscoroutinefunction(called) else ""
    how = [code(wait + name + signature(called))] if called is not None else []
    return "\n\n".join(filter(None, [head, *how, prose(docstring), *more]))


def members(cls: type, *, level: int = 3, told: type | None = None) -> str:
    """The public methods and properties of a class, in their order; those of the protocol `told` are told there."""
    entries: list[str] = []
    for name, member in vars(cls).items():
        if name.startswith("_") or not (callable(member) or isinstance(member, property)) or hasattr(told, name):
            continue
        if f"{cls.__name__}.{name}" in _INNER:
            continue
        docstring = inspect.getdoc(member)
        if docstring is None:
            if told is not None:
                continue
            raise ValueError(f"{cls.__name__}.{name} has no docstring")
        called = None if isinstance(member, property) else member
        entries.append(entry(f"{cls.__name__}.{name}", docstring, level=level, called=called))
    return "\n\n".join(entries)


# Pages --------------------------------------------------------------------------------------------------------


def settings() -> str:
    options = {name: struct_defaults(NewTask)[name] for name in TaskOptions.__annotations__}
    said, types = comments(NewTask), annotations(NewTask)
    task = [(code(name), code(type_of(types[name])), _default(options.get(name, struct_defaults(NewTask)[name])),
             words("NewTask", name, said[name])) for name in said]  # fmt: skip
    policies = [
        entry(cls.__name__, cls.__doc__, fields_of(cls, struct_defaults(cls)) if comments(cls) else "")
        for cls in (Exponential, Polynomial, Waits)
    ]
    return page(
        "Settings",
        "Durations are seconds. Options of commands are in [commands](commands.md).",
        "## Beats",
        prose(Beats.__doc__),
        fields_of(Beats, _dataclass_defaults(Beats)),
        "What follows from them:",
        table(
            ("property", "meaning"),
            [(code(name), prose(inspect.getdoc(value))) for name, value in vars(Beats).items()
             if isinstance(value, property) and not name.startswith("_")],
        ),
        "## connect",
        prose((connect.__doc__ or "").partition("\n\n")[0]),
        parameters("connect", connect, None),
        "## Client.tasks",
        parameters("Client.tasks", Client.tasks, None),
        "## lease",
        parameters("lease", lease, lease.__doc__),
        "## Worker",
        prose((Worker.__doc__ or "").partition("\n\n")[0]),
        parameters("Worker", Worker.__init__, Worker.__doc__),
        "## Worker.handler",
        parameters("Worker.handler", Worker.handler, Worker.handler.__doc__),
        "## Worker.run",
        parameters("Worker.run", Worker.run, None),
        "## A task",
        "`client.schedule(kind, payload, **options)` takes these by name, `schedule_all` as `NewTask`s, HTTP as JSON.",
        "A `Name` is 1-128 printable ASCII characters without `/`; `Seconds` go up to ten years, `Timeout`s to one.",
        table(("field", "type", "default", "meaning"), task),
        "## Retry policies",
        "In `leasekit.task`; over HTTP `{\"policy\": \"exponential\", …}`, `\"polynomial\"` and `\"list\"`.",
        *policies,
        "## Environment",
        table(
            ("variable", "meaning"),
            [(code("LEASEKIT_URL"), "the service, for a worker that names none, and for commands without `--backend`")],
        ),
    )  # fmt: skip


def commands() -> str:
    sections: list[str] = []
    for name, summary in app.COMMANDS.items():
        command = app.load(name)
        rows: list[tuple[str, str, str]] = []
        for parameter in command.params:
            if parameter.name == "help":
                continue
            shown = (
                ", ".join(map(code, parameter.opts))
                if parameter.param_type_name == "option"
                else code(parameter.metavar or parameter.name.upper())
            )
            text = getattr(parameter, "help", None)
            if not text:
                raise ValueError(f"leasekit {name} {parameter.name} has no help")
            default = (
                "required"
                if parameter.required
                else ""
                if parameter.default in (None, False)
                else code(parameter.default)
            )
            rows.append((shown, default, text))
        epilog = (command.epilog or "").replace("\b\n", "").strip()
        about = paragraphs(command.help or summary)
        sections += [f"## leasekit {name}", *about, table(("option", "default", "meaning"), rows)]
        sections += ["```text\n" + epilog + "\n```"] if epilog else []
    intro = "`leasekit COMMAND --help` says the same. " + " ".join(
        (app.app.info.epilog or "").partition("\b")[0].split()
    )
    return page("Commands", intro, *sections)


def error_tree() -> str:
    shown = [(name, cls) for name, cls in documented(errors).items()]
    tree = inspect.getdoc(errors) or ""
    return page(
        "Errors",
        "Names are importable from `leasekit`.",
        "```text\n" + tree.partition("\n\n")[2] + "\n```",
        *(entry(name, docstring, level=2) for name, docstring in shown),
    )


def events() -> str:
    classes = [cls for cls in vars(hooks).values() if inspect.isclass(cls) and issubclass(cls, hooks.Event)]
    sections = [entry(cls.__name__, cls.__doc__, fields_of(cls, _dataclass_defaults(cls))) for cls in classes]
    others = [name for name in hooks.__all__ if getattr(hooks, name) not in [*classes, hooks.Hook]]
    rest: list[str] = []
    for name in others:
        value = getattr(hooks, name)
        if inspect.isclass(value):
            rest.append(entry(name, value.__doc__, members(value, level=4)))
        else:
            rest.append(entry(name, value.__doc__, called=value))
    return page(
        "Hooks",
        prose(hooks.__doc__),
        "A hook is given to [`connect`](settings.md#connect) or `Worker(hooks=…)`, later to `client.listen(hook)`, or "
        "to `leasekit.hooks.everywhere(hook)` for all of this process. All names are in `leasekit.hooks`.",
        "## Events",
        *sections,
        "## Around them",
        *rest,
    )


def seam() -> str:
    protocols = [getattr(backend, name) for name in backend.__all__ if name != "Traits"]
    return page(
        "Backends",
        prose(backend.__doc__),
        "## Traits",
        prose(Traits.__doc__),
        fields_of(Traits, _dataclass_defaults(Traits)),
        "## What each of ours gives",
        "As traits and protocols declare it; the contract suite holds it to that. A named lease takes a *Scheduler*.",
        _given(),
        *("\n\n".join([f"## {cls.__name__}", prose(cls.__doc__), members(cls)]) for cls in protocols),
    )


_OURS = (
    "http://host", "sqlite:///file.db", "redis://host", "redis+cluster://host", "sqs://queue?region=x",
    "swf://domain/list?region=x", "sfn://arn:aws:states:x:123456789012:activity:a?region=x", "memory://",
)  # fmt: skip


def _given() -> str:
    """A row for each trait and protocol, a column for each backend: nothing is opened for that."""
    ours = {url.partition("://")[0]: open_backend(url, worker="docs") for url in _OURS}
    rows = [
        (code(name), *(_said(getattr(one.traits, name)) for one in ours.values()))
        for name in Traits.__dataclass_fields__
    ]
    rows += [
        (code(cls.__name__), *(_said(isinstance(one, cls)) for one in ours.values()))
        for cls in (backend.Intake, backend.Scheduler, backend.Roster)
    ]
    return table(("", *map(code, ours)), rows)


def _said(value: object) -> str:
    if value is None:
        return "any"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"


def calls() -> str:
    return page(
        "Calls",
        "What users call. A method whose name begins with `a` is the same from an event loop.",
        *(
            "\n\n".join([f"## {cls.__name__}", prose(cls.__doc__), members(cls)])
            for cls in (Client, Tasks, Lease, Worker, Idle)
        ),
        "## Values",
        "`Task` is what a claim gives, `NewTask` [what is scheduled](settings.md#a-task).",
        entry(
            "Status",
            Status.__doc__,
            ", ".join(map(code, Status)) + ". [How a lease lives](../life.md#a-task) has the table.",
        ),
        entry("TaskInfo", TaskInfo.__doc__, fields_of(TaskInfo, struct_defaults(TaskInfo))),
        "## Functions",
        *(entry(function.__name__, function.__doc__, called=function) for function in (connect, lease, leased)),
    )


class _Told(backend.Backend, backend.Scheduler):
    """What a backend for tests does like all others."""


def for_tests() -> str:
    sections: list[str] = []
    for module in (faults, proxy, effects, clock, memory):
        sections.append(f"## {module.__name__}")
        sections += [_public(module, name, said) for name, said in documented(module).items() if said]
    return page("For tests", "Nothing here is needed in production, and nothing in production needs it.", *sections)


def _public(module: ModuleType, name: str, said: str) -> str:
    value = getattr(module, name)
    if inspect.isclass(value):
        return entry(name, said, members(value, level=4, told=_Told))
    return entry(name, said, called=value if inspect.isfunction(value) else None)


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "errors": error_tree,
    "hooks": events,
    "backends": seam,
    "calls": calls,
    "testing": for_tests,
}
"""File name in docs/reference → what writes it."""
