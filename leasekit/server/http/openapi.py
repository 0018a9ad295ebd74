"""The OpenAPI document: routes from Litestar, schemas that msgspec generates from the classes of `leasekit.wire`.

The server runs on the same routes and classes, so the document cannot contradict it. Only the examples are written by
hand; the tests send them.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Litestar
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Schema
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition

from leasekit._lifecycle.validation import ENDS
from leasekit.server.http.request import ApiRequest

__all__ = ["EXAMPLES", "document"]

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
        "results": [
            {"id": "report-7", "token": "a-token-from-a-claim", "outcome": "success", "result": {"pages": 12}},
        ],
    },
    "CancelRequest": {"ids": ["report-7"]},
}
"""An example of each class of requests, by class name."""

_THEN = [
    {"properties": {"outcome": {"enum": sorted(ENDS)}}},
    {"properties": {"then": {"maxItems": 0}}},
]
"""The outcomes that may have successors; `validation` checks this rule, which the types cannot express."""


def document(routes: Sequence[HTTPRouteHandler], provided: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes; `provided` names parameters that do not come from a request."""
    schemas = _Schemas()
    # A second application, which serves nothing: in the serving one, Litestar would add its own pages and 404s.
    app = Litestar(
        route_handlers=list(routes),
        request_class=ApiRequest,
        logging_config=None,
        plugins=[schemas],
        dependencies={name: Provide(lambda: None, sync_to_thread=False) for name in provided},
        openapi_config=OpenAPIConfig(
            title="leasekit",
            version=version("leasekit"),
            description="Hands out tasks under leases. Every call is a batch and can be repeated. "
            "A request may have a `Leasekit-Request` header: its answer has the same.",
            use_handler_docstrings=True,
            operation_id_creator=lambda handler, _method, _path: handler.handler_name,
        ),
    )
    description = app.openapi_schema.to_schema()
    description["components"] = {"schemas": schemas.components()}
    for path in description["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter["schema"])
            _drop_litestar_error(operation)
            _drop_schema_of_events(operation)
    return _portable(description)


class _Schemas(OpenAPISchemaPlugin):
    """Makes every class of `leasekit.wire` a component, and collects these classes for msgspec."""

    def __init__(self) -> None:
        self._classes: dict[str, type[msgspec.Struct]] = {}

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return not field_definition.is_union and field_definition.is_subclass_of(msgspec.Struct)

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Schema:
        self._classes[field_definition.annotation.__name__] = field_definition.annotation
        schema: Schema = schema_creator.create_component_schema(field_definition, required=[], property_fields={})
        return schema

    def components(self) -> dict[str, Any]:
        """Return the schemas of the collected classes and the classes nested in them, by name."""
        _, schemas = msgspec.json.schema_components(self._classes.values(), ref_template=_REF)
        for name, example in EXAMPLES.items():
            schemas[name]["examples"] = [example]
        if "SettlementItem" in schemas:
            schemas["SettlementItem"]["anyOf"] = _THEN
        if "NewTaskItem" in schemas:
            schemas["NewTaskItem"]["properties"]["after"]["maxItems"] = 0  # only other services accept `after`
        return {name: schemas[name] for name in sorted(schemas)}


def _portable(description: dict[str, Any]) -> dict[str, Any]:
    r"""Return the document with Python's `\Z` in patterns replaced by JSON Schema's `$`."""
    return msgspec.json.decode(msgspec.json.encode(description).replace(rb"\\Z", b"$"), type=dict[str, Any])


def _drop_null(schema: dict[str, Any]) -> None:
    """Remove null from a parameter's schema: handlers mark optional ones by `X | None`, but none is ever null."""
    for arm in schema.pop("oneOf", ()):
        if arm != {"type": "null"}:
            schema.update(arm)


def _drop_litestar_error(operation: dict[str, Any]) -> None:
    # Litestar adds its own 400 to each route with parameters; this server answers with problem documents.
    refusal = operation["responses"].get("400", {"content": {}})
    if "application/json" in refusal["content"]:
        del operation["responses"]["400"]


def _drop_schema_of_events(operation: dict[str, Any]) -> None:
    # The schema would be read as that of each event: OpenAPI 3.1 cannot describe the form of a stream.
    answers = operation["responses"].get("200", {}).get("content", {})
    if "text/event-stream" in answers:
        answers["text/event-stream"] = {}
