"""The OpenAPI document: routes as Litestar knows them, schemas as msgspec draws them from the wire's classes.

Both are what the server runs on, so there is nothing here that could be described wrongly. What is written by hand are
the examples; the tests send them.
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
"""One request of each class, by its name."""

_THEN = [
    {"properties": {"outcome": {"enum": sorted(ENDS)}}},
    {"properties": {"then": {"maxItems": 0}}},
]
"""Which outcomes may have successors: `bounds` checks it, for the types cannot say it."""


def document(routes: Sequence[HTTPRouteHandler], provided: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes; `provided` are parameters that do not come from a request."""
    schemas = _Schemas()
    # An application of its own, that serves nothing: the one that serves would add Litestar's pages (and its 404s).
    app = Litestar(
        route_handlers=list(routes),
        request_class=ApiRequest,
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
    drawn = app.openapi_schema.to_schema()
    drawn["components"] = {"schemas": schemas.components()}
    for path in drawn["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter["schema"])
            _drop_litestar_error(operation)
            _drop_schema_of_events(operation)
    return _portable(drawn)


class _Schemas(OpenAPISchemaPlugin):
    """Makes every class of the wire a component, and remembers which, for msgspec to draw."""

    def __init__(self) -> None:
        self._classes: dict[str, type[msgspec.Struct]] = {}

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return not field_definition.is_union and field_definition.is_subclass_of(msgspec.Struct)

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Schema:
        self._classes[field_definition.annotation.__name__] = field_definition.annotation
        schema: Schema = schema_creator.create_component_schema(field_definition, required=[], property_fields={})
        return schema

    def components(self) -> dict[str, Any]:
        """All schemas by name, those of nested classes too."""
        _, drawn = msgspec.json.schema_components(self._classes.values(), ref_template=_REF)
        for name, example in EXAMPLES.items():
            drawn[name]["examples"] = [example]
        if "SettlementItem" in drawn:
            drawn["SettlementItem"]["anyOf"] = _THEN
        if "NewTaskItem" in drawn:
            drawn["NewTaskItem"]["properties"]["after"]["maxItems"] = 0  # other services have it: `bounds` refuses it
        return {name: drawn[name] for name in sorted(drawn)}


def _portable(drawn: dict[str, Any]) -> dict[str, Any]:
    r"""The same document, with Python's `\Z` in patterns as JSON Schema's `$`."""
    return msgspec.json.decode(msgspec.json.encode(drawn).replace(rb"\\Z", b"$"), type=dict[str, Any])


def _drop_null(schema: dict[str, Any]) -> None:
    # `X | None` is how a handler says that a parameter may be absent; none is ever null.
    for arm in schema.pop("oneOf", ()):
        if arm != {"type": "null"}:
            schema.update(arm)


def _drop_litestar_error(operation: dict[str, Any]) -> None:
    # Litestar adds its own 400 wherever there are parameters; ours are problem documents.
    refusal = operation["responses"].get("400", {"content": {}})
    if "application/json" in refusal["content"]:
        del operation["responses"]["400"]


def _drop_schema_of_events(operation: dict[str, Any]) -> None:
    # It would be read as one of each event: OpenAPI 3.1 has no word for the form of a stream.
    answers = operation["responses"].get("200", {}).get("content", {})
    if "text/event-stream" in answers:
        answers["text/event-stream"] = {}
