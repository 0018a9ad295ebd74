"""The OpenAPI document: the operations of the server, with schemas that msgspec generates from their classes.

The server runs these operations, so the document cannot contradict it. Only the examples are written by hand; the
tests send them.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from leasekit._lifecycle.validation import ENDS
from leasekit.server.http.operations import JSON, Operation, header_of
from leasekit.server.http.problems import MEDIA_TYPE
from leasekit.task import Status
from leasekit.wire import Problem

_REF = "#/components/schemas/{name}"

EXAMPLES: dict[str, Any] = {
    "ScheduleRequest": {
        "tasks": [
            {"id": "report-7", "kind": "report", "payload": {"month": "2026-01"}, "priority": 1},
            {"kind": "thumbnail", "payload": {"image": 42}, "max_attempts": 5, "retry": {"policy": "polynomial"}},
        ]
    },
    "ClaimRequest": {"worker": "host-1", "kinds": ["report"], "limit": 10, "wait": 20, "claim_id": "host-1-000001"},
    "BeatsRequest": {
        "worker": "host-1",
        "beats": [{"id": "report-7", "token": "a-token-from-a-claim", "progress": {"page": 3}}],
    },
    "ResultsRequest": {
        "worker": "host-1",
        "results": [{"id": "report-7", "token": "a-token-from-a-claim", "outcome": "success", "result": {"pages": 12}}],
    },
    "CancelRequest": {"ids": ["report-7"]},
    "ChainRequest": {"id": "report-7"},
    "KindRequest": {"max_attempts": 3, "retry": {"policy": "polynomial"}, "retention": 604800, "concurrency": 4},
    "GateRequest": {"mode": "pause", "duration": 3600, "reason": "the printer is on fire"},
    "PurgeRequest": {"kind": "report", "status": "success", "older_than": 604800},
    "VacuumRequest": {},
    "RedriveRequest": {"kind": "report", "status": "dead", "limit": 200, "dry_run": True},
}
"""An example of each class of requests, by class name."""

_THEN = [{"properties": {"outcome": {"enum": sorted(ENDS)}}}, {"properties": {"then": {"maxItems": 0}}}]
"""The outcomes that may have successors; `validation` checks this rule, which the types cannot express."""

_FILTERS = ("kind", "status", "collection")
_SELECTIONS = [
    {"required": ["ids"], "properties": {"ids": {"minItems": 1}} | {name: {"type": "null"} for name in _FILTERS}},
    {
        "properties": {"ids": {"maxItems": 0}},
        "anyOf": [{"required": [name], "properties": {name: {"type": "string"}}} for name in _FILTERS],
    },
]
"""How a redrive says which tasks it is for; `RedriveRequest` checks this rule."""


def document(operations: Sequence[Operation]) -> bytes:
    types = {
        type_ for each in operations for type_ in (each.params, each.body, each.answer, Problem) if _is_struct(type_)
    }
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schemas)
    for operation in operations:
        if operation.params is not None:
            schemas.pop(operation.params.__name__, None)
    described = {
        "openapi": "3.1.0",
        "info": {
            "title": "leasekit",
            "version": version("leasekit"),
            "description": "Hands out tasks under leases. Every call is a batch and can be repeated. "
            "A request may have a `Leasekit-Request` header: its answer has the same.",
        },
        "paths": paths,
        "components": {"schemas": _with_examples(schemas)},
    }
    return msgspec.json.encode(described).replace(rb"\\Z", b"$")  # JSON Schema has no `\Z`


def _is_struct(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, Struct)


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    is_json = operation.media_type == JSON
    # OpenAPI 3.1 cannot describe the form of a text: a schema would be read as that of each event.
    answer: dict[str, dict[str, Any]] = {operation.media_type: _reference(operation.answer) if is_json else {}}
    problem = {MEDIA_TYPE: _reference(Problem)}
    responses: dict[str, Any] = {"200": {"description": "Done." if is_json else "The text.", "content": answer}}
    responses |= {str(status): {"description": why, "content": problem} for status, why in operation.refusals.items()}
    described: dict[str, Any] = {
        "operationId": operation.run.__name__,
        "description": re.sub(r"\n +", "\n", operation.run.__doc__ or "").strip(),
        "responses": responses,
    }
    if operation.params is not None:
        described["parameters"] = _parameters(operation, schemas[operation.params.__name__])
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: _reference(operation.body)}}
    return described


def _reference(type_: type[Any]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=type_.__name__)}}


def _parameters(operation: Operation, schema: dict[str, Any]) -> list[dict[str, Any]]:
    assert operation.params is not None  # noqa: S101
    headers = {field.encode_name: header_of(field.type) for field in msgspec.structs.fields(operation.params)}
    return [
        {
            "name": headers[name] or name,
            "in": "header" if headers[name] else "path" if f"{{{name}}}" in operation.path else "query",
            "required": name in schema["required"],
            "schema": schema_of_field,
        }
        for name, schema_of_field in schema["properties"].items()
    ]


_CURSORS = {"RedriveRequest": r"^[0-9]{1,18}\Z", "PurgeRequest": r"^[0-9]{1,12}(\.[0-9]{1,20})?/[0-9]{1,18}\Z"}


def _with_examples(schemas: dict[str, Any]) -> dict[str, Any]:
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example]
    schemas["NewTaskItem"]["anyOf"] = [{"properties": {name: {"type": "null"}}} for name in ("at", "delay")]  # not both
    schemas["GateRequest"]["anyOf"] = [{"properties": {name: {"type": "null"}}} for name in ("until", "duration")]
    schemas["SettlementItem"]["anyOf"] = _THEN
    schemas["RedriveRequest"]["oneOf"] = _SELECTIONS
    schemas["KindRequest"]["dependentRequired"] = {"burst": ["rate"]}
    for name, pattern in _CURSORS.items():
        schemas[name]["properties"]["cursor"]["anyOf"][0]["pattern"] = pattern
    schemas["PurgeRequest"]["properties"]["status"]["anyOf"][0] = {"enum": [str(it) for it in Status if it.ended]}
    return {name: schemas[name] for name in sorted(schemas)}
