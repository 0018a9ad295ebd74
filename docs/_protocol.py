"""The protocol, from what the server runs on: its routes, and the values of the wire."""

import json
from typing import Any, get_args

import msgspec

from _reference import code, fields_of, struct_defaults, table
from leasekit.server.openapi import EXAMPLES, document
from leasekit.server.routes import PROVIDED, ROUTES
from leasekit.server.states import NEXT, Event
from leasekit.task import Beat, Scheduled, Settlement, Status, Task, Verdict, VerdictWord
from leasekit.wire import (
    MAX_BATCH,
    MAX_BODY,
    MAX_ERROR,
    MAX_KINDS,
    MAX_NAMES,
    MAX_NESTING,
    MAX_NODES,
    MAX_NODES_TOGETHER,
    MAX_PAYLOAD,
    MAX_PROGRESS,
    MAX_SUCCESSORS,
    MAX_THEN,
    MAX_WAIT,
    ClaimRequest,
)

__all__ = ["bounds", "calls", "items", "refusals", "states"]


def _operations() -> list[tuple[str, str, dict[str, Any]]]:
    paths = document(ROUTES, PROVIDED)["paths"]
    return [
        (method.upper(), path, operation) for path, methods in paths.items() for method, operation in methods.items()
    ]


def _schema(content: dict[str, Any]) -> str:
    shown: str = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return shown.rpartition("/")[2]


def calls() -> str:
    """Every route, what it takes and what it answers."""
    rows: list[tuple[str, ...]] = []
    for method, path, operation in _operations():
        body = _schema(operation.get("requestBody", {}).get("content", {}))
        parameters = [code(one["name"]) for one in operation.get("parameters", ()) if one["in"] == "query"]
        answers = operation["responses"]["200"]["content"]
        about = operation.get("description", "").partition("\n\n")[0]
        answer = _schema(answers) or next(iter(answers))
        rows.append((code(f"{method} {path}"), code(body) if body else ", ".join(parameters), code(answer), about))
    shown = [f"`{name}`, for example:\n\n```json\n{json.dumps(example)}\n```" for name, example in EXAMPLES.items()]
    return "\n\n".join([table(("call", "takes", "answers", ""), rows), *shown])


def items() -> str:
    """What batches are made of."""
    about: dict[type[msgspec.Struct], str] = {
        Scheduled: "The answer to one scheduled task. What goes in is in [settings](reference/settings.md#a-task).",
        ClaimRequest: "A claim.",
        Task: "A task in the answer to a claim.",
        Beat: "An item of a heartbeat.",
        Settlement: "An item of results.",
        Verdict: f"The answer to one item: {', '.join(map(code, get_args(VerdictWord)))}; a server says no *failed*.",
    }
    return "\n\n".join(
        f"### {cls.__name__}\n\n{said}\n\n{fields_of(cls, struct_defaults(cls))}" for cls, said in about.items()
    )


def refusals() -> str:
    """Every status that is no 200."""
    said: dict[str, list[str]] = {}
    for _, _, operation in _operations():
        for status, one in operation["responses"].items():
            reasons = said.setdefault(status, [])
            if (reason := one["description"]) not in reasons:
                reasons.append(reason)
    return table(("status", "meaning"), [(code(s), " Or: ".join(said[s])) for s in sorted(said) if s >= "400"])


def bounds() -> str:
    """How much of anything."""
    rows = [
        ("a body", f"{MAX_BODY // 1024**2} MiB"),
        ("a batch", f"{MAX_BATCH:,d} items"),
        ("a payload, a result", f"{MAX_PAYLOAD // 1024**2} MiB of JSON"),
        ("progress", f"{MAX_PROGRESS // 1024} KiB of JSON"),
        ("an error", f"{MAX_ERROR // 1024} KiB of JSON"),
        ("all successors of one task", f"{MAX_THEN // 1024 // 1024} MiB of JSON"),
        ("nesting", f"{MAX_NESTING} levels"),
        ("arrays and objects in one value", f"{MAX_NODES:,d}"),
        ("arrays and objects in all values of a body", f"{MAX_NODES_TOGETHER:,d}"),
        ("a body, or an item, beside the values above and `then`", f"{MAX_NAMES // 1024} KiB"),
        ("successors (`then`) of all results in a body", f"{MAX_SUCCESSORS:,d}"),
        ("the kinds of a claim", f"{MAX_KINDS}"),
        ("the wait of a claim", f"{MAX_WAIT:g} s; more is cut"),
    ]
    return table(("of", "at most"), rows)


def states() -> str:
    """(status, event) → status."""
    rows = [(f"*{event}*", *(row.get(event, "") for row in NEXT.values())) for event in Event]
    ends = ", ".join(code(status) for status in Status if status.ended)
    return table(("", *map(code, NEXT)), rows) + f"\n\nNothing follows {ends}."
