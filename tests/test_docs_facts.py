"""What pages and pictures say of the code in numbers, names and tables is what the code has: correct the page."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from leasekit import Exponential, Heartbeats, Status
from leasekit._core.cycle import Cycle, Early
from leasekit._lifecycle.states import NEXT, Event
from leasekit.server import end_waits, long_poll
from leasekit.server.http import protocol
from leasekit.server.http.openapi import EXAMPLES, document
from leasekit.server.http.routes import OPERATIONS
from leasekit.task import DEFAULTS, TaskOptions
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
    MAX_WAITS,
)

DOCS = Path(__file__).parents[1] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def labels(picture: str) -> list[str]:
    """What stands in a picture, text by text."""
    return re.findall(r"<text[^>]*>([^<]+)</text>", page(f"pictures/{picture}.svg"))


def table(name: str, heading: str) -> list[list[str]]:
    """The first table below a heading, its head included, without marks of code and emphasis."""
    below = page(name).partition(f"\n{heading}\n")[2]
    found = re.search(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", below, re.M)
    assert found is not None, f"{name} has no table below {heading}"
    lines = [line for line in found[0].splitlines() if not line.startswith("|-")]
    return [[cell.strip().strip("`*") for cell in line.strip("|").split("|")] for line in lines]


# Pictures -----------------------------------------------------------------------------------------------------


def test_the_picture_of_a_task_has_every_status_that_is_reached_and_every_event() -> None:
    shown = set(re.findall(r"\w+", " ".join(labels("life"))))
    statuses = {*NEXT, *(status for row in NEXT.values() for status in row.values())}
    assert {*statuses, *Event} <= shown


def test_the_picture_of_the_cycle_has_every_place_where_a_lease_can_be() -> None:
    cycle = Cycle(Heartbeats(), now=0, random=random.Random(0).random, early=Early())
    # What is in flight is drawn apart, and what has news is in another place as well.
    others = {"_calls", "_news", "_late_news"}
    places = {name.strip("_") for name, value in vars(cycle).items() if isinstance(value, dict) and name not in others}
    assert places
    assert places <= set(labels("cycle"))


def test_the_picture_of_a_grant_has_the_numbers_of_the_default_rhythm() -> None:
    heartbeats = Heartbeats()
    moments = [0.0, heartbeats.cycle, heartbeats.slack, heartbeats.trust, heartbeats.ttl]
    assert [label.partition(" s")[0] for label in labels("lease")] == [f"{at:g}" for at in moments]


# The rhythm, the states ---------------------------------------------------------------------------------------


def test_the_table_of_rhythms_is_what_follows_from_each_ttl() -> None:
    head, *rows = table("configuring.md", "## Another ttl")
    for row in rows:
        heartbeats = Heartbeats().for_ttl(float(row[0]))
        numbers = [getattr(heartbeats, name.replace(" ", "_")) for name in head]
        assert row == [f"{number:,d}" if isinstance(number, int) else f"{number:.3g}" for number in numbers]


def test_the_table_of_states_is_that_of_the_server() -> None:
    head, *rows = table("life.md", "## A task")
    assert head[1:] == list(NEXT)
    assert rows == [[event, *(row.get(event, "") for row in NEXT.values())] for event in Event]
    ends = ", ".join(f"`{status}`" for status in Status if status.ended)
    assert f"Nothing follows {ends}." in page("life.md")


def test_the_table_of_waits_is_that_of_the_default_policy() -> None:
    head, waits = table("scheduling.md", "## Retries")
    for failures, shown in zip(head[1:], waits[1:], strict=True):
        longest = Exponential(jitter=0).wait(int(failures.split()[0]), random.Random(0))
        assert shown == f"{longest / 2:g} to {longest:g}"
    assert Exponential().jitter == 0.5


def test_the_table_of_options_has_every_option_and_its_default() -> None:
    defaults = {option: row[1] for row in table("scheduling.md", "## Options")[1:] for option in row[0].split("`, `")}
    elsewhere = {"id", "dedupe_key", "dedupe_window", "dedupe_scope", "debounce", "enqueue_timeout", "traceparent"}
    assert {*defaults} == TaskOptions.__optional_keys__ - elsewhere
    task = DEFAULTS
    assert (task.max_runtime, task.claim_timeout, task.retry) == (None, None, Exponential())
    assert [defaults[name] for name in ("max_attempts", "retry", "max_crashes", "priority", "heartbeat_timeout")] == [
        f"{task.max_attempts}", f"{Exponential().first:g} s, doubled up to {Exponential().max / 3600:g} h",
        f"{task.max_crashes}", f"{task.priority}", f"{task.heartbeat_timeout:g} s",
    ]  # fmt: skip


# The protocol -------------------------------------------------------------------------------------------------


def operations() -> list[tuple[str, dict[str, Any]]]:
    paths: dict[str, dict[str, Any]] = json.loads(document(OPERATIONS))["paths"]
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]


def schema(content: dict[str, Any]) -> str:
    """The name of a body's schema, or its media type where it is not JSON."""
    reference: str = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return reference.rpartition("/")[2] or next(iter(content), "")


def test_the_table_of_calls_has_what_each_takes_answers_and_does() -> None:
    rows = table("protocol.md", "## Calls")[1:]
    shown = {row[0]: [row[1].replace("`", ""), *row[2:-1], row[-1].replace("`", "")] for row in rows}
    for call, operation in operations():
        parameters = ", ".join(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
        takes = schema(operation.get("requestBody", {}).get("content", {})) or parameters
        does = " ".join(operation["description"].partition("\n\n")[0].split())
        needs = operation["x-needs"].replace("`", "")
        assert shown.pop(call) == [takes, schema(operation["responses"]["200"]["content"]), does, needs]
    assert not shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_body_is_that_of_the_openapi_document(name: str) -> None:
    assert f"`{name}`, for example:\n\n```json\n{json.dumps(EXAMPLES[name])}\n```" in page("protocol.md")


def test_the_table_of_refusals_has_every_status_and_its_meanings() -> None:
    shown = dict(table("protocol.md", "## Refusals")[1:])
    meanings: dict[str, list[str]] = {}
    for _, operation in operations():
        for status, answer in operation["responses"].items():
            meanings.setdefault(status, []).append(answer["description"])
    assert shown == {status: " Or: ".join(_distinct(said)) for status, said in meanings.items() if status >= "400"}


def _distinct(meanings: list[str]) -> list[str]:
    """Return each meaning once, without those with which a longer one begins."""
    return [
        meaning
        for meaning in dict.fromkeys(meanings)
        if not any(other.startswith(f"{meaning} Or: ") for other in meanings)
    ]


def test_the_table_of_bounds_has_what_the_server_checks() -> None:
    mib = 1024 * 1024
    assert [most for _, most in table("protocol.md", "## Bounds")[1:]] == [
        f"{protocol.MAX_HEAD // 1024} KiB, {protocol.MAX_FIELDS} fields",
        f"{protocol.MAX_TARGET // 1024} KiB, {protocol.MAX_FIELDS} fields (`414` beyond that)",
        f"{MAX_BODY // mib} MiB",
        f"{MAX_BATCH:,} items",
        f"{MAX_PAYLOAD // mib} MiB of JSON",
        f"{MAX_PROGRESS // 1024} KiB of JSON",
        f"{MAX_ERROR // 1024} KiB of JSON",
        f"{MAX_THEN // mib} MiB of JSON",
        f"{MAX_NESTING} levels",
        f"{MAX_NODES:,}",
        f"{MAX_NODES_TOGETHER:,}",
        f"{MAX_NAMES // 1024} KiB",
        f"{MAX_SUCCESSORS:,}",
        f"{MAX_WAITS:,}",
        f"{MAX_KINDS}",
        f"{MAX_WAIT:g} s; more is cut",
        f"{long_poll._MOST:,} and {long_poll._KINDS:,} at one server; claims beyond that are refused (`429`)",
        f"{end_waits._MOST:,} at one server; beyond that the answer is a refusal (`429` of the table above)",
    ]
