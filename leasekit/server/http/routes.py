"""The routes of `/v1`, `/metrics` and the health checks: they translate for the engine, and decide nothing.

The classes in `leasekit.wire` and `leasekit._lifecycle.validation` define what a request may contain. A handler's
docstring is the description of its route in the OpenAPI document.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args

from litestar import get, post, route
from litestar.di import NamedDependency
from litestar.exceptions import HTTPException, ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromQuery, HeaderParameter, JSONBody, PathParameter, QueryParameter
from litestar.response import Response, Stream
from msgspec import Struct

from leasekit.server.engine import Engine
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.metrics import CONTENT_TYPE, Metrics
from leasekit.server.http.problems import MEDIA_TYPE, UnknownTask
from leasekit.server.http.request import ApiRequest
from leasekit.server.http.sending import Sending
from leasekit.task import Claimed, Name, Page, Status, TaskInfo, WorkerInfo
from leasekit.wire import (
    MAX_BATCH,
    MAX_WAIT,
    BeatsRequest,
    CancelRequest,
    ClaimAnswer,
    ClaimRequest,
    Problem,
    ResultsRequest,
    ScheduleAnswer,
    ScheduleRequest,
    VerdictsAnswer,
)

__all__ = ["OPTIONS", "PROVIDED", "ROUTES", "HealthAnswer", "StatsAnswer", "WorkersAnswer"]

PROVIDED = ("engine", "polls", "metrics", "sending")
"""Parameters that the application gives to routes (see `create_app`); clients do not send them."""

_Engine: TypeAlias = NamedDependency[Engine]
_Polls: TypeAlias = NamedDependency[DisconnectWatch]
_Metrics: TypeAlias = NamedDependency[Metrics]
_Sending: TypeAlias = NamedDependency[Sending]

# Litestar takes the bounds of a parameter from its marker, not from its type.
_NAME: dict[str, Any] = {key: getattr(get_args(Name)[1], key) for key in ("min_length", "max_length", "pattern")}
_Filter: TypeAlias = Annotated[str | None, QueryParameter(**_NAME)]


class HealthAnswer(Struct, frozen=True, kw_only=True):
    status: str


class StatsAnswer(Struct, frozen=True, kw_only=True):
    """The number of tasks of each kind in each status."""

    kinds: dict[str, dict[str, int]]


class WorkersAnswer(Struct, frozen=True, kw_only=True):
    """The workers that hold leases or have sent a request recently."""

    workers: list[WorkerInfo]


def _refusals(reasons: Mapping[int, str]) -> dict[int, ResponseSpec]:
    """Describe the problem documents that a route may answer with, for the OpenAPI document."""
    return {
        status: ResponseSpec(Problem, description=reason, media_type=MEDIA_TYPE, generate_examples=False)
        for status, reason in sorted(reasons.items())
    }


def _text(description: str, media_type: str) -> dict[int, ResponseSpec]:
    """Describe an answer that is not JSON, for the OpenAPI document."""
    return {200: ResponseSpec(str, description=description, media_type=media_type, generate_examples=False)}


_FOREIGN_HOST = {403: "The `Host` header does not name this machine."}
_ENGINE = _FOREIGN_HOST | {
    429: (
        "CapacityExceeded: nothing was applied, except if two answers to the same claim are still being sent. "
        "Repeat the request after `Retry-After` seconds."
    ),
    503: "The store does not answer: whether the request was applied is unknown, and it may be repeated.",
}
_READS = _refusals(_ENGINE | {422: "A parameter does not fit; `errors` names it."})
_WRITES = _refusals(
    _ENGINE
    | {
        400: "The body is not JSON.",
        408: "The body took too long to arrive.",
        413: "The body is too big.",
        415: "The body is not `application/json`.",
        422: "The body does not fit the schema or the bounds: nothing was applied. `errors` names items and fields.",
    }
)


@post("/v1/tasks", status_code=200, responses=_WRITES)
async def schedule(data: JSONBody[ScheduleRequest], engine: _Engine) -> ScheduleAnswer:
    """Schedule tasks, which are durable when the answer is sent. An id, or a live dedupe key, makes one task only."""
    return ScheduleAnswer(tasks=await engine.schedule(data.tasks))


@get(
    "/v1/tasks/{task_id:str}",
    responses={**_READS, **_refusals({404: "There is no task with this id."})},
)
async def get_task(task_id: Annotated[str, PathParameter(**_NAME)], engine: _Engine) -> TaskInfo:
    """Get everything about one task, and how its runs ended."""
    return await _get(task_id, engine)


@get("/v1/tasks/cancel", include_in_schema=False)
async def get_task_named_cancel(engine: _Engine) -> TaskInfo:
    """Get the task with the id *cancel*: without this route, its path would only accept POST."""
    return await _get("cancel", engine)


async def _get(task_id: str, engine: Engine) -> TaskInfo:
    info = await engine.get(task_id)
    if info is None:
        raise UnknownTask(f"there is no task {task_id!r}")
    return info


@get("/v1/tasks", responses=_READS)
async def list_tasks(
    engine: _Engine,
    request: ApiRequest,
    kind: _Filter = None,
    status: FromQuery[Status | None] = None,
    collection: _Filter = None,
    worker: _Filter = None,
    cursor: Annotated[str | None, QueryParameter(pattern=r"^[0-9]{1,18}\Z")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_BATCH)] = 100,
) -> Page:
    """List the tasks that match all given filters, oldest first; the `cursor` of the answer begins the next page."""
    if status is None and "status" in request.query_params:
        # Litestar reads the value *null* as None: the answer would be all tasks.
        raise ValidationException(extra=[{"key": "status", "message": "Invalid enum value 'null'"}])
    return await engine.list_tasks(
        kind=kind, status=status, collection=collection, worker=worker, cursor=cursor, limit=limit
    )


@post("/v1/tasks/cancel", status_code=200, responses=_WRITES)
async def cancel(data: JSONBody[CancelRequest], engine: _Engine) -> VerdictsAnswer:
    """Cancel: `cancelled` if a task waits, `cancel_requested` if it runs, `gone` if it has ended or is unknown."""
    return VerdictsAnswer(verdicts=await engine.cancel(data.ids))


@post("/v1/claims", status_code=200, responses=_WRITES)
async def claim(
    data: JSONBody[ClaimRequest], engine: _Engine, polls: _Polls, sending: _Sending, request: ApiRequest
) -> Response[ClaimAnswer]:
    """Claim up to `limit` tasks; wait up to `wait` seconds for the first. Claims may be repeated by `claim_id`.

    A repeat with `limit` 0 ends the claim: nothing is granted to it from then on, and the answer has no payloads.
    """
    key = (data.worker, data.claim_id)
    if data.limit:
        await sending.wait(key)
    wait = min(data.wait, MAX_WAIT)
    claiming = engine.claim(worker=data.worker, kinds=data.kinds, limit=data.limit, wait=wait, claim_id=data.claim_id)
    claimed: Claimed = await (polls.wait(claiming, request.receive) if wait else claiming)
    return sending.begin(key, claimed)


@post("/v1/heartbeats", status_code=200, responses=_WRITES)
async def heartbeat(data: JSONBody[BeatsRequest], engine: _Engine) -> VerdictsAnswer:
    """Renew leases. Each beat has its own verdict, by position: `renewed`, `gone` or `throttled`."""
    return VerdictsAnswer(verdicts=await engine.heartbeat(data.worker, data.beats))


@post("/v1/results", status_code=200, responses=_WRITES)
async def results(data: JSONBody[ResultsRequest], engine: _Engine) -> VerdictsAnswer:
    """Settle runs. Each result has its own verdict, by position: `settled`, `gone` or `failed`."""
    return VerdictsAnswer(verdicts=await engine.results(data.worker, data.results))


@get("/v1/stats", responses=_refusals(_ENGINE))
async def stats(engine: _Engine) -> StatsAnswer:
    """Count the tasks of each kind in each status."""
    return StatsAnswer(kinds=(await engine.stats()).kinds)


@get("/v1/workers", responses=_refusals(_ENGINE))
async def workers(engine: _Engine) -> WorkersAnswer:
    """List the workers that hold leases or have sent a request recently."""
    return WorkersAnswer(workers=await engine.workers())


@get(
    "/v1/events",
    media_type="text/event-stream",
    responses={
        **_READS,
        **_text("Events, until one side ends it.", "text/event-stream"),
    },
)
async def events(
    engine: _Engine,
    kind: _Filter = None,
    task: _Filter = None,
    last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", max_length=128)] = None,
) -> Stream:
    """Stream the events of tasks and workers, as Server-Sent Events; `kind` and `task` are filters.

    `event` is `scheduled`, `claimed`, `started`, `settled`, `expired`, `cancel_requested` or `cancelled`; of
    workers `joined` or `left`. `data` is JSON: `event`, `at`, and if they apply, `id`, `kind`, `status` (after the
    event), `worker`, `outcome`. A client that reconnects with `Last-Event-ID` gets the events since then, after a
    `missed` if some are no longer kept. A client that reads too slowly is dropped. Comments show a live stream.
    """
    stream = engine.feed.follow(kind=kind, task=task, after=last_event_id)
    return Stream(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


@get(
    "/metrics",
    responses={**_refusals(_FOREIGN_HOST), **_text("The metrics.", "text/plain")},
)
async def prometheus(metrics: _Metrics) -> Response[bytes]:
    """Get the server's metrics, in the text format of Prometheus."""
    return Response(await metrics.exposition(), media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})


@get("/healthz", responses=_refusals(_FOREIGN_HOST))
async def healthz() -> HealthAnswer:
    """Check that this process answers."""
    return HealthAnswer(status="ok")


@get("/readyz", responses=_refusals(_FOREIGN_HOST | {503: "Not ready; `detail` says why."}))
async def readyz(engine: _Engine) -> HealthAnswer:
    """Check that this process can serve requests: its store answers."""
    reason = await engine.ready()
    if reason is not None:
        raise HTTPException(reason, status_code=503)
    return HealthAnswer(status="ready")


ROUTES: Sequence[HTTPRouteHandler] = (
    schedule, list_tasks, get_task, get_task_named_cancel, cancel, claim, heartbeat, results, stats, workers, events,
    prometheus, healthz, readyz,
)  # fmt: skip


def _options(path: str, methods: set[str]) -> HTTPRouteHandler:
    # Litestar's own answer lists only the methods of the first handler of a path.
    allow = ", ".join(sorted(methods | {"OPTIONS"}))

    @route(path, http_method="OPTIONS", status_code=204, include_in_schema=False, sync_to_thread=False)
    def options() -> Response[None]:
        return Response(None, headers={"allow": allow})

    return options


_METHODS: dict[str, set[str]] = {}
for _handler in ROUTES:
    for _path in _handler.paths:
        _METHODS.setdefault(_path, set()).update(_handler.http_methods)

OPTIONS: Sequence[HTTPRouteHandler] = [_options(path, methods) for path, methods in _METHODS.items()]
"""The OPTIONS route of each path. These are registered first: for a path without one, Litestar adds its own."""
