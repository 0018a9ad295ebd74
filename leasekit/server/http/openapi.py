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
from leasekit.task import Status, TaskSelection
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
    "KindRequest": {
        "max_attempts": 3,
        "retry": {"policy": "polynomial"},
        "retention": 604800,
        "concurrency": 4,
        "key_concurrency": 1,
    },
    "GateRequest": {"mode": "pause", "duration": 3600, "reason": "the printer is on fire"},
    "DrainRequest": {},
    "PurgeRequest": {"kind": "report", "status": "success", "older_than": 604800},
    "PeriodicTaskItem": {"kind": "report", "cron": "0 7 * * MON-FRI", "tz": "Europe/Berlin", "payload": {"to": "all"}},
    "PauseRequest": {"is_paused": True},
    "TokenRequest": {
        "id": "0197f3a2-5d10-7c3e-9b1a-2f4e6d8c0b1a",
        "name": "workers",
        "digest": "7d865e959b2466918c9863afca942d0fb89d7c9ac0c99bafc3749504ded97730",
        "scopes": ["work"],
        "kinds": ["report", "mail.*"],
    },
    "RotateRequest": {
        "digest": "baa5a0964d3320fbc0c6a922140453c8513ea24ab8fd0577034804a967248096",
        "overlap": 3600,
    },
    "TriggerRequest": {},
    "VacuumRequest": {},
    "RedriveRequest": {"kind": "report", "status": "dead", "limit": 200, "dry_run": True},
}
"""An example of each class of requests, by class name."""

_THEN = [{"properties": {"outcome": {"enum": sorted(ENDS)}}}, {"properties": {"then": {"maxItems": 0}}}]
"""The outcomes that may have successors; `validation` checks this rule, which the types cannot express."""

_FILTERS = TaskSelection.__struct_fields__
_NO_FILTERS: dict[str, Any] = {name: {"type": "null"} for name in _FILTERS}
_NO_IDS = {"properties": {"ids": {"maxItems": 0}}}
_SELECTIONS = [
    {"required": ["ids"], "properties": {"ids": {"minItems": 1}} | _NO_FILTERS},
    {
        **_NO_IDS,
        "anyOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in _FILTERS],
    },
]
"""How a redrive says which tasks it is for; `RedriveRequest` checks this rule. A purge need not say anything."""


_RULES = [
    {"required": ["cron"], "properties": {"cron": {"type": "string"}, "every": {"type": "null"}}},
    {
        "required": ["every"],
        "properties": {"every": {"type": "integer"}, "cron": {"type": "null"}, "tz": {"type": "null"}},
    },
]
"""How a periodic task says when it fires; `PeriodicTask` checks this rule."""


_NULL = {"type": "null"}
_AT_OR_DELAY = {"anyOf": [{"properties": {name: _NULL}} for name in ("at", "delay")]}
"""Not both; the constructors of the messages check this rule."""

_CHANGES = {
    "anyOf": [{"required": [name], "properties": {name: {"not": _NULL}}} for name in ("at", "delay", "priority")]
}
"""What a reschedule changes; `RescheduleRequest` checks this rule."""

_DEDUPE_KEPT = {"properties": {"dedupe_scope": {"const": "kept"}}}
_NO_DEBOUNCE = {"properties": {"debounce": _NULL}}
_DEDUPE = {
    "anyOf": [
        {"allOf": [_NO_DEBOUNCE, _DEDUPE_KEPT]},
        {
            "required": ["dedupe_key"],
            "properties": {"dedupe_key": {"type": "string"}},
            "anyOf": [_NO_DEBOUNCE, {"allOf": [_DEDUPE_KEPT, {"properties": {"after": {"maxItems": 0}}}]}],
        },
    ]
}
"""How a dedupe key counts; `NewTask` checks this rule."""

_PREFERENCE = {
    "anyOf": [
        {"properties": {"prefers": {"maxProperties": 0}, "prefer_for": _NULL}},
        {"required": ["prefers"], "properties": {"prefers": {"minProperties": 1}, "key": _NULL}},
    ]
}
"""How a task prefers workers; `check_preference` checks this rule, and that it does not prefer what it requires."""

_LIVE_STATUS = {"enum": [str(it) for it in Status if not it.ended]}
_BULK = [
    _SELECTIONS[1]["anyOf"],
    [
        {"required": ["dry_run"], "properties": {"dry_run": {"const": True}}},
        {"required": ["token"], "properties": {"token": {"type": "string"}}},
    ],
]
"""What a bulk act selects, and that it follows a dry run; `CancelMatchingRequest` checks this rule."""

_ORDER = [
    {"properties": {"ordered": {"const": False}}},
    {"not": {"anyOf": [{"required": ["key_concurrency"]}, {"required": ["key_rate"]}]}},
]
"""The limits of keys that cannot be given where keys are ordered; `KindSettings` checks this rule."""

_NEW_TOKEN = {
    "properties": {
        "name": {"pattern": r"^(?!-)(?!local\Z)"},
        "kinds": {"items": {"pattern": r"^[^*]*\*?\Z"}},
    }
}
"""Which names mean nothing else, and where a pattern may have a `*`; the role of tokens checks this rule."""

_ACCESS_TOKEN = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "lk_ and 49 characters of 0-9, A-Z and a-z",
    "description": "An access token. Servers of this machine need none as long as their store never had one. `x-needs` "
    "of an operation says which scope the token must have, and where the kinds are found that it must be for.",
}


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
        "components": {"schemas": _with_examples(schemas), "securitySchemes": {"accessToken": _ACCESS_TOKEN}},
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
        "security": [] if operation.needs.is_open else [{"accessToken": []}, {}],
        "x-needs": str(operation.needs),
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


def _with_examples(schemas: dict[str, Any]) -> dict[str, Any]:
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example]
    schemas["NewTaskItem"]["allOf"] = [_AT_OR_DELAY, _DEDUPE, _PREFERENCE]
    schemas["RescheduleRequest"]["allOf"] = [_AT_OR_DELAY, _CHANGES]
    schemas["CancelMatchingRequest"]["allOf"] = [{"anyOf": rule} for rule in _BULK]
    schemas["RescheduleMatchingRequest"]["allOf"] = [*({"anyOf": rule} for rule in _BULK), _AT_OR_DELAY, _CHANGES]
    for name in ("CancelMatchingRequest", "RescheduleMatchingRequest"):
        schemas[name]["properties"]["status"]["anyOf"][0] = _LIVE_STATUS
    schemas["TokenRequest"]["allOf"] = [_NEW_TOKEN]
    schemas["GateRequest"]["anyOf"] = [{"properties": {name: {"type": "null"}}} for name in ("until", "duration")]
    schemas["PeriodicTaskItem"]["oneOf"] = _RULES
    schemas["PeriodicTaskItem"]["allOf"] = [_PREFERENCE]
    schemas["SettlementItem"]["anyOf"] = _THEN
    schemas["RedriveRequest"]["oneOf"] = _SELECTIONS
    schemas["PurgeRequest"]["anyOf"] = [_NO_IDS, {"properties": _NO_FILTERS}]
    schemas["KindRequest"]["dependentRequired"] = {"burst": ["rate"], "key_burst": ["key_rate"]}
    schemas["KindRequest"]["anyOf"] = _ORDER
    schemas["PurgeRequest"]["properties"]["status"]["anyOf"][0] = {"enum": [str(it) for it in Status if it.ended]}
    return {name: schemas[name] for name in sorted(schemas)}
