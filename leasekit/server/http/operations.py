"""Operations: what the server does at one path by one method. The OpenAPI document lists them.

The types of an operation are those of its function: `body` and `params` are the classes of the body and of the
parameters, the function's result is the class of the answer, and its docstring is the description.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPMethod
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from leasekit._lifecycle.validation import converted
from leasekit.errors import Refused
from leasekit.server.http.needs import Needs, check
from leasekit.server.http.request import ApiRequest

JSON = "application/json"

_Run = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Operation:
    """A method of a path."""

    method: HTTPMethod
    path: str
    run: _Run
    params: type[Struct] | None
    body: type[Struct] | None
    answer: type[Any]
    media_type: str
    refusals: Mapping[int, str]
    """The reason of each refusal, by status."""
    needs: Needs
    """What its caller must be allowed to do."""

    async def __call__(self, request: ApiRequest) -> Any:
        given: dict[str, Any] = {}
        if self.params is not None:
            given["params"] = _parameters(request, self.params)
        if self.body is not None:
            given["body"] = await request.decode(self.body)
        await check(self.needs, request.access, request.parts.engine, given)
        return await self.run(request, **given)


def get(
    path: str, needs: Needs, refusals: Mapping[int, str], *, media_type: str = JSON, answer: type[Struct] | None = None
) -> Callable[[_Run], Operation]:
    return lambda run: _operation(HTTPMethod.GET, path, run, needs, media_type, refusals, answer)


def post(
    path: str, needs: Needs, refusals: Mapping[int, str], *, answer: type[Struct] | None = None
) -> Callable[[_Run], Operation]:
    return lambda run: _operation(HTTPMethod.POST, path, run, needs, JSON, refusals, answer)


def put(path: str, needs: Needs, refusals: Mapping[int, str]) -> Callable[[_Run], Operation]:
    return lambda run: _operation(HTTPMethod.PUT, path, run, needs, JSON, refusals)


def patch(path: str, needs: Needs, refusals: Mapping[int, str]) -> Callable[[_Run], Operation]:
    return lambda run: _operation(HTTPMethod.PATCH, path, run, needs, JSON, refusals)


def delete(path: str, needs: Needs, refusals: Mapping[int, str]) -> Callable[[_Run], Operation]:
    return lambda run: _operation(HTTPMethod.DELETE, path, run, needs, JSON, refusals)


def _operation(
    method: HTTPMethod,
    path: str,
    run: _Run,
    needs: Needs,
    media_type: str,
    refusals: Mapping[int, str],
    answer: type[Struct] | None = None,
) -> Operation:
    types = get_type_hints(run)
    params, body = types.get("params"), types.get("body")
    return Operation(method, path, run, params, body, answer or types["return"], media_type, refusals, needs)


def _parameters(request: ApiRequest, type_: type[Struct]) -> Struct:
    """Read the parameters from path, query and headers. Raises `Refused` for one that is unknown, or given twice.

    A parameter whose type is a list may be given several times.
    """
    given: dict[str, str | list[str]] = dict(request.path_params)
    lists = _lists(type_)
    for name, value in parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name in lists:
            values = given.setdefault(name, [])
            assert isinstance(values, list)  # noqa: S101 - no path has such a parameter
            values.append(value)
            continue
        if name in given:
            detail = "is given twice"
            raise Refused(f"the parameter {name[:100]!r} {detail}", errors=[{"field": name[:100], "detail": detail}])
        given[name] = value
    for field in msgspec.structs.fields(type_):
        if (name := header_of(field.type)) in request.headers:
            given[field.encode_name] = request.headers[name]
    return converted(given, type_)


@functools.cache
def _lists(type_: type[Struct]) -> frozenset[str]:
    """Return the names of the parameters whose values are lists."""
    return frozenset(
        field.encode_name
        for field in msgspec.structs.fields(type_)
        if any(get_origin(_bare(arm)) is list for arm in get_args(field.type) or ())
    )


def _bare(type_: Any) -> Any:
    return get_args(type_)[0] if get_origin(type_) is Annotated else type_


def header_of(type_: Any) -> str:
    """Return the name of the header that a parameter comes from; empty if it comes from path or query."""
    for arm in get_args(type_) if get_origin(type_) is not Annotated else (type_,):
        for meta in getattr(arm, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.extra:
                return str(meta.extra["header"])
    return ""
