"""The operations of `/v1`, `/metrics` and the health checks: they translate for the engine, and decide nothing.

The classes in `leasekit.wire` and `leasekit._lifecycle.validation` define what a request may contain.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from leasekit.server.http.metrics import CONTENT_TYPE
from leasekit.server.http.operations import Operation, delete, get, post, put
from leasekit.server.http.problems import UnknownKind, UnknownTask
from leasekit.server.http.request import ApiRequest
from leasekit.server.http.sending import ClaimResponse
from leasekit.server.roles import gates
from leasekit.task import (
    ChainCancelled,
    GateInfo,
    KindInfo,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    TaskInfo,
    Vacuumed,
    Verdict,
    WorkerInfo,
)
from leasekit.wire import (
    MAX_BATCH,
    MAX_WAIT,
    BeatsRequest,
    CancelRequest,
    CancelsRequest,
    ChainRequest,
    ChangedCollection,
    ChangedKind,
    ClaimAnswer,
    ClaimRequest,
    GateRequest,
    KindRequest,
    OneKind,
    OneTask,
    OptionalName,
    PurgeRequest,
    RedriveRequest,
    ResultsRequest,
    ScheduleAnswer,
    ScheduleRequest,
    TaskFilters,
    VacuumRequest,
    VerdictsAnswer,
)


class NamePage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cursor: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = MAX_BATCH


class EventFilters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: OptionalName = UNSET
    task: OptionalName = UNSET
    last_event_id: Annotated[str, Meta(max_length=128, extra={"header": "Last-Event-ID"})] | UnsetType = UNSET


class Tables(Struct, frozen=True):
    """The version of the tables that a server has found, and the one that it needs: one more or less will do."""

    found: int
    needs: int


class HealthAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: str
    detail: str | None = None
    """Why no new tasks are accepted, although all else is served."""
    tables: Tables | None = None
    """The version of the tables in a database."""


class StatsAnswer(Struct, frozen=True, kw_only=True):
    """The number of tasks of each kind in each status."""

    kinds: dict[str, dict[str, int]]
    cursor: str | None = None
    """Where the next page begins; null: this is the last page."""


class WorkersAnswer(Struct, frozen=True, kw_only=True):
    """The workers that hold leases or have sent a request recently."""

    workers: list[WorkerInfo]
    cursor: str | None = None
    """Where the next page begins; null: this is the last page."""


class KindsAnswer(Struct, frozen=True, kw_only=True):
    """The kinds that have settings."""

    kinds: list[KindInfo]
    cursor: str | None = None
    """Where the next page begins; null: this is the last page."""


class KindDeleted(Struct, frozen=True, kw_only=True):
    """A kind that has no settings any longer."""

    kind: str


class GatesAnswer(Struct, frozen=True, kw_only=True):
    """The closed gates, a thousand at most: those of kinds, then those of collections, sorted by name."""

    gates: list[GateInfo]


class GateOpened(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kind or a collection that is open."""

    kind: str | None = None
    collection: str | None = None


class NodesAnswer(Struct, frozen=True, kw_only=True):
    """The nodes of the service, also those that have left lately: up to a thousand, the last ones that were seen."""

    nodes: list[NodeInfo]


_ANY = {
    400: "The request has several `Host` headers.",
    403: "The `Host` header does not name this machine, or the request comes from a web page of another origin.",
    422: "A parameter does not fit; `errors` names it.",
}
_READS = _ANY | {
    429: (
        "CapacityExceeded: nothing was applied, except if two answers to the same claim are still being sent. "
        "Repeat the request after `Retry-After` seconds."
    ),
    503: "The store does not answer: whether the request was applied is unknown, and it may be repeated.",
}
_WRITES = _READS | {
    400: "The body is not JSON.",
    408: "The body took too long to arrive.",
    413: "The body is too big.",
    415: "The body is not `application/json`.",
    422: "The body does not fit the schema or the bounds: nothing was applied. `errors` names items and fields.",
}


@post("/v1/tasks", _WRITES)
async def schedule(request: ApiRequest, body: ScheduleRequest) -> ScheduleAnswer:
    """Schedule tasks, which are durable when the answer is sent. An id, or a live dedupe key, makes one task only."""
    return ScheduleAnswer(tasks=await request.parts.engine.schedule(body.tasks))


@get("/v1/tasks/{task_id}", _READS | {404: "There is no task with this id."})
async def get_task(request: ApiRequest, params: OneTask) -> TaskInfo:
    """Get everything about one task, and how its runs ended."""
    info = await request.parts.engine.get(params.task_id)
    if info is None:
        raise UnknownTask(params.task_id)
    return info


@get("/v1/tasks", _READS)
async def list_tasks(request: ApiRequest, params: TaskFilters) -> Page:
    """List the tasks that match all filters, oldest or (`newest=true`) newest first; `cursor` begins the next page."""
    return await request.parts.engine.list_tasks(
        kind=params.kind or None,
        status=params.status or None,
        collection=params.collection or None,
        worker=params.worker or None,
        root=params.root or None,
        newest=params.newest,
        cursor=params.cursor or None,
        limit=params.limit,
    )


@post("/v1/tasks/cancel", _WRITES)
async def cancel(request: ApiRequest, body: CancelRequest) -> VerdictsAnswer:
    """Cancel: `cancelled` if a task waits, `cancel_requested` if it runs, `gone` if it has ended or is unknown."""
    return VerdictsAnswer(verdicts=await request.parts.engine.cancel(body.ids))


@post("/v1/chains/cancel", _WRITES)
async def cancel_chain(request: ApiRequest, body: ChainRequest) -> ChainCancelled:
    """Cancel the tasks that came from one, and that one, in steps. Tasks that come later are cancelled too."""
    return await request.parts.engine.cancel_chain(body)


@post("/v1/cancels", _WRITES)
async def cancels(request: ApiRequest, body: CancelsRequest) -> VerdictsAnswer:
    """Wait for a cancel request of a task that the worker holds: a hint to send its next heartbeat now."""
    ids = await request.parts.engine.cancels(worker=body.worker, wait=min(body.wait, MAX_WAIT))
    return VerdictsAnswer(verdicts=[Verdict(id=task_id, verdict="cancel_requested") for task_id in ids])


@post("/v1/tasks/redrive", _WRITES)
async def redrive(request: ApiRequest, body: RedriveRequest) -> Redriven:
    """Redrive: make dead tasks ready again, as new lives. Each task has its own verdict, by position.

    `redriven`; `redrivable` in a dry run; `gone` if unknown; `failed` with a `reason` if the task cannot be redriven,
    for example because its dedupe key belongs to another live task by now. `cursor` of the answer: where the filters
    go on.
    """
    return await request.parts.engine.redrive(body)


@post("/v1/tasks/purge", _WRITES)
async def purge(request: ApiRequest, body: PurgeRequest) -> Purged:
    """Remove ended tasks, one step: the `cursor` of the answer begins the next. `dry_run` counts all at once instead.

    Tasks that have not ended are never removed. A step that is repeated removes what is left, and counts only that.
    """
    return await request.parts.engine.purge(body)


@post("/v1/vacuum", _WRITES)
async def vacuum(request: ApiRequest, body: VacuumRequest) -> Vacuumed:
    """Shorten the store's file by a part of its free space; repeat the request until `left` is 0, or `freed` is."""
    return await request.parts.engine.vacuum()


@post("/v1/claims", _WRITES, answer=ClaimAnswer)
async def claim(request: ApiRequest, body: ClaimRequest) -> ClaimResponse:
    """Claim up to `limit` tasks; wait up to `wait` seconds for the first. Claims may be repeated by `claim_id`.

    A repeat with `limit` 0 ends the claim: nothing is granted to it from then on, and the answer has no payloads.
    """
    parts, key = request.parts, (body.worker, body.claim_id)
    if body.limit:
        await parts.sending.wait(key)
    wait = min(body.wait, MAX_WAIT)
    claiming = parts.engine.claim(
        worker=body.worker, kinds=body.kinds, limit=body.limit, wait=wait, claim_id=body.claim_id
    )
    claimed = await (parts.polls.wait(claiming, request.receive) if wait else claiming)
    return parts.sending.begin(key, claimed)


@post("/v1/heartbeats", _WRITES)
async def heartbeat(request: ApiRequest, body: BeatsRequest) -> VerdictsAnswer:
    """Renew leases. Each beat has its own verdict, by position: `renewed`, `gone` or `throttled`."""
    return VerdictsAnswer(verdicts=await request.parts.engine.heartbeat(body.worker, body.beats))


@post("/v1/results", _WRITES)
async def results(request: ApiRequest, body: ResultsRequest) -> VerdictsAnswer:
    """Settle runs. Each result has its own verdict, by position: `settled`, `gone`, `failed` or `throttled`."""
    return VerdictsAnswer(verdicts=await request.parts.engine.results(body.worker, body.results))


@get("/v1/stats", _READS)
async def stats(request: ApiRequest, params: NamePage) -> StatsAnswer:
    """Count the tasks of each kind in each status; the `cursor` of the answer begins the next page of kinds."""
    kinds = (await request.parts.engine.stats()).kinds
    names, cursor = _page(kinds, params)
    return StatsAnswer(kinds={name: kinds[name] for name in names}, cursor=cursor)


@get("/v1/workers", _READS)
async def workers(request: ApiRequest, params: NamePage) -> WorkersAnswer:
    """List the workers that hold leases or called lately; the `cursor` of the answer begins the next page."""
    found = {worker.name: worker for worker in await request.parts.engine.workers()}
    names, cursor = _page(found, params)
    return WorkersAnswer(workers=[found[name] for name in names], cursor=cursor)


@get("/v1/nodes", _READS)
async def nodes(request: ApiRequest) -> NodesAnswer:
    """List the servers, and other processes that have the store open; those that have left, for ten minutes more."""
    return NodesAnswer(nodes=await request.parts.engine.nodes())


def _page(names: Iterable[str], wanted: NamePage) -> tuple[list[str], str | None]:
    """Return the names of a page, in order, and its cursor: the last of them, or None if no more follow."""
    after = sorted(name for name in names if wanted.cursor is UNSET or name > wanted.cursor)
    page = after[: wanted.limit]
    return page, page[-1] if len(page) < len(after) else None


@get("/v1/kinds", _READS)
async def list_kinds(request: ApiRequest, params: NamePage) -> KindsAnswer:
    """List the kinds that have settings; the `cursor` of the answer begins the next page."""
    found = {info.kind: info for info in await request.parts.engine.kinds()}
    names, cursor = _page(found, params)
    return KindsAnswer(kinds=[found[name] for name in names], cursor=cursor)


@get("/v1/kinds/{kind}", _READS | {404: "The kind has no settings."})
async def get_kind(request: ApiRequest, params: OneKind) -> KindInfo:
    """Get the settings of a kind: what its tasks have where a submission does not say otherwise."""
    for info in await request.parts.engine.kinds():
        if info.kind == params.kind:
            return info
    raise UnknownKind(params.kind)


@put("/v1/kinds/{kind}", _WRITES)
async def set_kind(request: ApiRequest, params: ChangedKind, body: KindRequest) -> KindInfo:
    """Replace all settings of a kind, for tasks that are scheduled from then on; its limits hold at once. `worker` is
    for the log.
    """
    info = await request.parts.engine.set_kind(params.kind, body, by=_client(request, params.worker))
    assert info is not None  # noqa: S101 - it was just set
    return info


@delete("/v1/kinds/{kind}", _READS)
async def delete_kind(request: ApiRequest, params: ChangedKind) -> KindDeleted:
    """Remove the settings of a kind, if it has any. `worker` is for the log."""
    await request.parts.engine.set_kind(params.kind, None, by=_client(request, params.worker))
    return KindDeleted(kind=params.kind)


@get("/v1/gates", _READS)
async def list_gates(request: ApiRequest) -> GatesAnswer:
    """List the closed gates: the kinds and collections whose tasks are not started."""
    return GatesAnswer(gates=await request.parts.engine.gates())


@put("/v1/gates/kinds/{kind}", _WRITES)
async def close_kind(request: ApiRequest, params: ChangedKind, body: GateRequest) -> GateInfo:
    """Close the gate of a kind: its tasks are not started. Those that run are left alone. `worker` is for the log.

    It holds for every claim that is answered from then on. Due tasks wait (`pause`), or end as *cancelled* (`drop`).
    """
    return await _close(request, gates.Gated.kind(params.kind), params.worker, body)


@put("/v1/gates/collections/{collection}", _WRITES)
async def close_collection(request: ApiRequest, params: ChangedCollection, body: GateRequest) -> GateInfo:
    """Close the gate of a collection, as that of a kind."""
    return await _close(request, gates.Gated.collection(params.collection), params.worker, body)


@delete("/v1/gates/kinds/{kind}", _READS)
async def open_kind(request: ApiRequest, params: ChangedKind) -> GateOpened:
    """Open the gate of a kind, if it is closed: its tasks can be claimed again. `worker` is for the log."""
    await request.parts.engine.set_gate(gates.Gated.kind(params.kind).opened(_client(request, params.worker)))
    return GateOpened(kind=params.kind)


@delete("/v1/gates/collections/{collection}", _READS)
async def open_collection(request: ApiRequest, params: ChangedCollection) -> GateOpened:
    """Open the gate of a collection, if it is closed. `worker` is for the log."""
    gated = gates.Gated.collection(params.collection)
    await request.parts.engine.set_gate(gated.opened(_client(request, params.worker)))
    return GateOpened(collection=params.collection)


async def _close(request: ApiRequest, gated: gates.Gated, worker: str | UnsetType, body: GateRequest) -> GateInfo:
    info = await request.parts.engine.set_gate(gated.closed(body, _client(request, worker)))
    assert info is not None  # noqa: S101 - it was just closed
    return info


def _client(request: ApiRequest, worker: str | UnsetType) -> str | None:
    return worker or (None if request.client is None else request.client.host)


@get("/v1/events", _READS, media_type="text/event-stream")
async def events(request: ApiRequest, params: EventFilters) -> StreamingResponse:
    """Stream the events of tasks and workers, as Server-Sent Events; `kind` and `task` are filters.

    `event` is `scheduled`, `claimed`, `started`, `settled`, `expired`, `cancel_requested`, `cancelled`, `dropped` or
    `redriven`; of workers `joined` or `left`; of kinds `kind_changed`; of gates `gate_changed`. `data` is JSON:
    `event`, `at`, and if they apply, `id`, `kind`, `status` (after the event), `worker`, `outcome`, `collection`,
    `mode`. A client that reconnects with `Last-Event-ID` gets the events since then, after a `missed` if some are no
    longer kept. A client that reads too slowly is dropped. Comments show a live stream.

    Events of other servers of the same database come too, from a few seconds after the stream began. Some of these may
    be lost, without a `missed`. A worker joins and leaves each server by itself.
    """
    after = None if params.last_event_id is UNSET else params.last_event_id
    stream = request.parts.engine.feed.follow(kind=params.kind or None, task=params.task or None, after=after)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


@get("/metrics", _ANY, media_type="text/plain")
async def prometheus(request: ApiRequest) -> Response:
    """Get the server's metrics, in the text format of Prometheus."""
    text = await request.parts.metrics.exposition()
    return Response(text, media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})


@get("/healthz", _ANY)
async def healthz(request: ApiRequest) -> HealthAnswer:
    """Check that this process answers."""
    return HealthAnswer(status="ok")


@get("/readyz", _ANY | {503: "Not ready; `detail` says why."})
async def readyz(request: ApiRequest) -> HealthAnswer:
    """Check that the store can be written, is not damaged, and has tables that this server can use.

    `detail` says why it accepts no new tasks.
    """
    reason = await request.parts.engine.ready()
    if reason is not None:
        raise HTTPException(503, reason)
    engine = request.parts.engine
    tables = None if engine.neighbours is None else Tables(*engine.neighbours.tables)
    return HealthAnswer(status="ready", detail=engine.cramped, tables=tables)


OPERATIONS: Sequence[Operation] = (
    schedule, list_tasks, cancel, cancel_chain, cancels, redrive, purge, get_task, claim, heartbeat, results, stats,
    workers, nodes, list_kinds, get_kind, set_kind, delete_kind, list_gates, close_kind, close_collection, open_kind,
    open_collection, vacuum, events, prometheus, healthz, readyz,
)  # fmt: skip
"""All but that for the OpenAPI document itself, which lists these."""
