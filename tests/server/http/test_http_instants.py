"""Instants at the ends of the calendar: each field that takes one refuses those that some time zone cannot express."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from leasekit.server.http.openapi import EXAMPLES, document
from leasekit.server.http.routes import OPERATIONS
from tests.server.http.conftest import Running

DOCUMENT = json.loads(document(OPERATIONS))
BEYOND = [
    "9999-12-31T23:59:59-23:59",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T00:00:00.000001Z",
    "0001-01-01T23:59:59.999999Z",
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
]
WITHIN = [
    "9999-12-31T00:00:00Z",
    "9999-12-31T23:59:00+23:59",
    "9999-12-30T00:01:00-23:59",
    "1970-01-01T00:00:00.000001Z",
    "1969-12-31T23:59:59.999999Z",
    "0001-01-02T00:00:00Z",
    "0001-01-01T00:01:00-23:59",
]


class Field(NamedTuple):
    """A field of a request that is an instant."""

    method: str
    path: str
    steps: tuple[str, ...]
    """The way to it in the body, or the name of a parameter of the query."""

    def __str__(self) -> str:
        return f"{self.method} {self.path} {'.'.join(self.steps)}"


def fields() -> Iterator[Field]:
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                yield from (Field(method, path, (parameter["name"],)) for _ in instants(parameter["schema"]))
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            yield from (Field(method, path, steps) for steps in instants(body))


def instants(schema: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the ways to all values of the format `date-time`."""
    schema = resolved(schema)
    if schema.get("format") == "date-time":
        yield steps
    for branch in schema.get("anyOf", ()):
        yield from instants(branch, steps)
    for name, value in schema.get("properties", {}).items():
        yield from instants(value, (*steps, name))
    if "items" in schema:
        yield from instants(schema["items"], steps)


def resolved(schema: Any) -> Any:
    return DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


FIELDS = list(fields())


def call(server: Running, field: Field, instant: str) -> Any:
    path = field.path
    for name in ("name", "kind", "collection", "task_id"):
        path = path.replace(f"{{{name}}}", "there")
    if field.method == "get":
        return server.call("GET", f"{path}?{field.steps[0]}={quote(instant)}")
    return server.call(field.method.upper(), path, body_of(field, instant))


def body_of(field: Field, instant: str) -> Any:
    schema = DOCUMENT["paths"][field.path][field.method]["requestBody"]["content"]["application/json"]["schema"]
    body = deepcopy(EXAMPLES.get(schema["$ref"].rpartition("/")[2], {}))
    if "matching" in field.path:
        body = {"kind": "there", "dry_run": True} | ({"delay": 0} if "reschedule" in field.path else {})
        body.pop("delay" if field.steps == ("at",) else "", None)
    for other in ("ids", "duration", "older_than"):
        body.pop(other, None)
    place = body
    for step in field.steps[:-1]:
        if step not in place:
            place[step] = [{"kind": "there"}]
        place = place[step][0]
    place[field.steps[-1]] = instant
    return body


@pytest.fixture(scope="module", autouse=True)
def there(server: Running) -> None:
    """A task and a periodic task that fields can be about."""
    server.post("/v1/tasks", {"tasks": [{"kind": "there", "id": "there", "delay": 86400}]})
    assert server.call("PUT", "/v1/periodic/there", {"kind": "there", "every": 86400}).status == 200
    server.give_token()


def test_all_fields_are_found() -> None:
    assert {field.steps[-1] for field in FIELDS} == {"at", "until", "since", "expires_at"}
    assert len(FIELDS) > 15


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_an_instant_that_some_time_zone_cannot_express_is_refused_with_its_field(server: Running, field: Field) -> None:
    for instant in BEYOND:
        answer = call(server, field, instant)
        assert answer.status == 422, (instant, answer)
        (error,) = answer.json["errors"]
        assert error["field"].endswith(field.steps[-1])
        assert "from 0001-01-02T00:00:00Z to 9999-12-31T00:00:00Z" in error["detail"]
        assert answer.json["detail"].count("from 0001-01-02") == 1


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_an_instant_that_can_be_expressed_is_taken_or_refused_for_a_reason(server: Running, field: Field) -> None:
    for instant in WITHIN:
        answer = call(server, field, instant)
        assert answer.status < 500, (instant, answer)
        assert "0001-01-02" not in answer.raw.decode(), instant
    for path in ("/v1/tasks?limit=1000", "/v1/tasks/there", "/v1/periodic", "/v1/gates", "/v1/tokens", "/v1/audit"):
        assert server.get(path)
