"""The OpenAPI document: it says what the router does, no more and no less."""

import json
import logging
import re
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from starlette.routing import Route

from leasekit import wire
from leasekit.server.http.app import Api, _document
from leasekit.server.http.openapi import EXAMPLES
from leasekit.task import TaskSelection
from leasekit.tokens import digest_of
from tests.server.http.conftest import Running

# Not answered in JSON; they have tests of their own.
TEXTS = {("GET", "/v1/events"), ("GET", "/metrics")}
UNDOCUMENTED = {("GET", "/openapi.json")}


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    server.give_token()
    return server.get("/openapi.json")


def with_names(path: str) -> str:
    """A path with something in place of each parameter."""
    return re.sub(r"\{\w+\}", "nobody", path)


def operations(document: Any) -> dict[tuple[str, str], Any]:
    return {(method.upper(), path): op for path, item in document["paths"].items() for method, op in item.items()}


def test_every_route_is_documented_and_every_documented_route_exists(document: Any) -> None:
    routes = {
        (method, route.path)
        for route in Api(Mock()).routes  # nothing is called
        if isinstance(route, Route)
        for method in route.methods or ()
        if method not in {"HEAD", "OPTIONS"}
    }
    assert routes - UNDOCUMENTED == set(operations(document))


def test_every_documented_route_answers(server: Running, document: Any) -> None:
    for method, path in operations(document).keys() - TEXTS:
        answer = server.call(method, with_names(path), b"" if method in {"POST", "PUT", "PATCH"} else None)
        assert answer.status in {200, 400, 404}, (method, path, answer)
        assert answer.json.get("detail") != "there is no such route"


def test_every_post_tells_its_body_its_answer_and_its_refusals(document: Any) -> None:
    for (method, path), operation in operations(document).items():
        answers = operation["responses"]
        assert operation["description"], path
        if (method, path) in TEXTS:
            continue
        assert "$ref" in answers["200"]["content"]["application/json"]["schema"], path
        if method in {"POST", "PUT", "PATCH"}:
            assert "$ref" in operation["requestBody"]["content"]["application/json"]["schema"], path
            assert {"400", "408", "413", "415", "422", "429"} <= answers.keys(), path


def test_every_refusal_is_a_problem_document(document: Any) -> None:
    for (_, path), operation in operations(document).items():
        for status, answer in operation["responses"].items():
            if status != "200":
                schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
                assert answer["content"] == {"application/problem+json": schema}, (path, status)


def test_every_reference_leads_somewhere(document: Any) -> None:
    components = document["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert references <= components.keys()
    assert "\\Z" not in json.dumps(document)  # Python's, not JSON Schema's


def test_every_field_of_every_class_is_there(document: Any) -> None:
    components = document["components"]["schemas"]
    for name in components.keys() & vars(wire).keys() - {"Status"}:
        fields = {field.encode_name for field in msgspec.structs.fields(vars(wire)[name])}
        assert fields == components[name]["properties"].keys(), name


def test_bounds_are_in_the_schemas(document: Any) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["BeatsRequest"]["properties"]["beats"]["maxItems"] == 1000
    assert schemas["NewTaskItem"]["properties"]["priority"]["maximum"] == 4
    assert schemas["NewTaskItem"]["properties"]["kind"]["maxLength"] == 128
    assert schemas["NewTaskItem"]["additionalProperties"] is False
    assert schemas["NewTaskItem"]["properties"]["after"]["maxItems"] == 100


def test_parameters_are_told_with_their_bounds(document: Any) -> None:
    parameters = {p["name"]: p for p in document["paths"]["/v1/tasks"]["get"]["parameters"]}
    selection = set(TaskSelection.__struct_fields__)
    assert parameters.keys() == (selection - {"tags"}) | {"tag", "worker", "root", "newest", "cursor", "limit"}
    assert parameters["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    assert parameters["kind"]["schema"]["maxLength"] == 128
    assert "null" not in json.dumps(parameters)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_the_server_takes(server: Running, document: Any, name: str) -> None:
    reference = f"#/components/schemas/{name}"
    (method, path), *_ = [
        place
        for place, op in operations(document).items()
        if op.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {}).get("$ref")
        == reference
    ]
    (example,) = document["components"]["schemas"][name]["examples"]
    if name == "DrainRequest":  # of a worker that is known
        server.call("POST", "/v1/claims", {"worker": "nobody", "kinds": ["k"], "claim_id": "known"})
    if path.startswith("/v1/periodic/"):  # of a periodic task that is there
        (task,) = document["components"]["schemas"]["PeriodicTaskItem"]["examples"]
        assert server.call("PUT", with_names("/v1/periodic/{name}"), task).status == 200
    if name == "RotateRequest":
        path = path.replace("{token}", "everything")
        example = example | {"digest": digest_of(server.token or "").hex()}  # of the secret that the test goes on with
    assert server.call(method, with_names(path), {**example, "wait": 0} if "wait" in example else example).status == 200


def test_options_tells_every_method_of_a_path(server: Running, document: Any) -> None:
    for path, item in document["paths"].items():
        answer = server.call("OPTIONS", with_names(path))
        assert answer.status == 204
        assert {method.upper() for method in item} | {"OPTIONS"} <= set(answer.headers["allow"].split(", ")), path


def test_the_document_leaves_the_logs_as_they_are(server: Running, document: Any) -> None:
    def state() -> dict[str, Any]:
        loggers = {"": logging.root} | {
            name: logger
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
        }
        return {name: (log.level, log.disabled, log.propagate, [*log.handlers]) for name, log in loggers.items()}

    _document.cache_clear()
    before = state(), logging.root.manager.disable
    server.get("/openapi.json")
    assert (state(), logging.root.manager.disable) == before
