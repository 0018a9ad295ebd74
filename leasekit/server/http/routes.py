"""The operations of `/v1`, `/metrics` and the health checks: they translate for the engine, and decide nothing.

The classes in `leasekit.wire` and `leasekit._lifecycle.validation` define what a request may contain.
"""

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from leasekit.errors import BackendError, Refused
from leasekit.server.access import Access
from leasekit.server.engine import Engine
from leasekit.server.http.events import Chain
from leasekit.server.http.metrics import CONTENT_TYPE
from leasekit.server.http.needs import ANYBODY, Where, check_successors, needs
from leasekit.server.http.operations import Operation, get, patch, post
from leasekit.server.http.operator_routes import OPERATOR_OPERATIONS
from leasekit.server.http.pages import ALL, ANY, READS, WRITES, NamePage, page_of
from leasekit.server.http.problems import UnknownTask
from leasekit.server.http.request import ApiRequest
from leasekit.server.http.sending import ClaimResponse
from leasekit.server.kind_leases import CONSUMER
from leasekit.server.roles.audit import the_one
from leasekit.server.roles.unmet import waiting
from leasekit.task import (
    ChainCancelled,
    Claimed,
    Ended,
    Matched,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    TaskInfo,
    Vacuumed,
    Verdict,
    WorkerInfo,
)
from leasekit.wire import (
    MAX_WAIT,
    AwaitedTask,
    BeatsRequest,
    CancelMatchingRequest,
    CancelRequest,
    CancelsRequest,
    ChainRequest,
    ChangedTask,
    ClaimAnswer,
    ClaimRequest,
    EndedRequest,
    OptionalName,
    PurgeRequest,
    RedriveRequest,
    RescheduleMatchingRequest,
    RescheduleRequest,
    ResultsRequest,
    ScheduleAnswer,
    ScheduleRequest,
    TaskFilters,
    VacuumRequest,
    VerdictsAnswer,
)

_T = TypeVar("_T")


class BulkChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request that changes many tasks: the name of the client, for their history."""

    worker: OptionalName = UNSET


class EventFilters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: OptionalName = UNSET
    task: OptionalName = UNSET
    root: OptionalName = UNSET
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
    unmet: dict[str, list[dict[str, str]]] = {}
    """Kind → the labels that due tasks require, and no worker has that claimed the kind lately; `{}`: no worker has
    claimed the kind at all."""
    cursor: str | None = None
    """Where the next page begins; null: this is the last page."""


class WorkersAnswer(Struct, frozen=True, kw_only=True):
    """The workers that hold leases or have sent a request recently."""

    workers: list[WorkerInfo]
    cursor: str | None = None
    """Where the next page begins; null: this is the last page."""


class NodesAnswer(Struct, frozen=True, kw_only=True):
    """The nodes of the service, also those that have left lately: up to a thousand, the last ones that were seen."""

    nodes: list[NodeInfo]


@post("/v1/tasks", needs("submit", kinds=Where.TASKS), WRITES)
async def schedule(request: ApiRequest, body: ScheduleRequest) -> ScheduleAnswer:
    """Schedule tasks, which are durable when the answer is sent. An id, or a live dedupe key, makes one task only."""
    scheduled = await request.parts.engine.schedule(body.tasks)
    return ScheduleAnswer(tasks=await request.without_foreign(scheduled))


@get(
    "/v1/tasks/{task_id}",
    needs("read", kinds=Where.TASK),
    READS | {404: "There is no task with this id."},
    answer=TaskInfo,
)
async def get_task(request: ApiRequest, params: AwaitedTask) -> TaskInfo | Response:
    """Get everything about one task, and how its runs ended; with `wait`, once it has ended.

    After `wait` seconds (60 at most) the answer comes in any case. So ask again while `status` is no end.
    """
    parts, wait = request.parts, min(params.wait, MAX_WAIT)

    async def found() -> TaskInfo:
        info = await parts.engine.queries.get(params.task_id, wait=wait)
        if info is None or not request.access.kinds.match(info.kind):  # it may be another one than when the wait began
            raise UnknownTask(params.task_id)
        return info

    if not wait:
        return await found()
    info = await request.wait(parts.waits, found())
    return Response() if info is None else parts.sending.of_task(info)  # None: the client has disconnected


@patch(
    "/v1/tasks/{task_id}",
    needs("submit", "operate", kinds=Where.TASK),
    WRITES | {404: "There is no task with this id."},
)
async def reschedule(request: ApiRequest, params: ChangedTask, body: RescheduleRequest) -> Rescheduled:
    """Give a task that waits another due time or priority; `delay` 0: it is due now. What is not given stays.

    A task that runs or has ended is refused. Other tasks for which it waits, gates, limits and the turn of its key hold
    as before. `worker` is for its history.
    """
    by, operations = request.client_name(params.worker), request.parts.engine.operations
    note = request.note_of_operator("task.reschedule", target=params.task_id, fields=body, worker=params.worker)
    answer = await operations.reschedule(params.task_id, body, by=by, kinds=request.kinds, note=note)
    if answer is None:
        raise UnknownTask(params.task_id)
    return answer


@get("/v1/tasks", needs("read", kinds=Where.SELECTED), READS, answer=Page)
async def list_tasks(request: ApiRequest, params: TaskFilters) -> Page | Response:
    """List the tasks that match all filters, oldest or (`newest=true`) newest first; `cursor` begins the next page."""
    parts = request.parts
    wanted = {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not UNSET}
    page = await request.wait(parts.waits, parts.engine.queries.list_tasks(kinds=request.kinds, **wanted))
    return Response() if page is None else page  # None: the client has disconnected


@post("/v1/tasks/ended", needs("read", kinds=Where.ITEMS), WRITES, answer=Ended)
async def ended(request: ApiRequest, body: EndedRequest) -> Ended | Response:
    """Get those of some tasks that have ended; with `wait`, once one of them has.

    After `wait` seconds (60 at most) the answer comes in any case. So ask again for those that are left. An answer has
    about 4 MiB of values: more tasks may have ended than it tells of, if it tells of any.
    """
    parts, wait = request.parts, min(body.wait, MAX_WAIT)
    parts.sending.check_reads()
    own = await request.own(body.ids)
    if strange := [task_id for task_id in body.ids if task_id not in own]:
        return Ended(unknown=strange)
    found = _without_others(request, parts.engine.queries.ended(body.ids, wait=wait))
    if not wait:
        return await found
    answer = await request.wait(parts.waits, found)
    return Response() if answer is None else answer  # None: the client has disconnected


async def _without_others(request: ApiRequest, ended: Awaitable[Ended]) -> Ended:
    """Answer like those that do not exist tasks that were foreign ones under the same ids when they were read."""
    answer, match = await ended, request.access.kinds.match
    if not (foreign := [task.id for task in answer.tasks if not match(task.kind)]):
        return answer
    own = [task for task in answer.tasks if match(task.kind)]
    return Ended(tasks=own, unknown=[*answer.unknown, *foreign])


@post("/v1/tasks/cancel", needs("submit", "operate", kinds=Where.ITEMS), WRITES)
async def cancel(request: ApiRequest, body: CancelRequest) -> VerdictsAnswer:
    """Cancel: `cancelled` if a task waits, `cancel_requested` if it runs, `gone` if it has ended or is unknown."""
    note = request.note_of_operator("tasks.cancel", target=the_one(body.ids))
    return VerdictsAnswer(verdicts=await request.parts.engine.cancel(body.ids, kinds=request.kinds, note=note))


@post("/v1/tasks/cancel-matching", needs("operate", kinds=Where.SELECTED), WRITES, answer=Matched)
async def cancel_matching(request: ApiRequest, body: CancelMatchingRequest) -> Matched | Response:
    """Cancel all tasks that match and have not ended, one step: the `cursor` of the answer begins the next.

    `dry_run` only counts, and its answer has the `token` that the act takes, and further steps. No task is touched that
    was scheduled after the first step of the dry run.
    """
    note = request.note("tasks.cancel-matching", target=body.kind, fields=body)
    acting = request.parts.engine.operations.cancel_matching(body, kinds=request.kinds, note=note)
    return await _acted(request, acting, is_dry=body.dry_run)


@post("/v1/tasks/reschedule-matching", needs("operate", kinds=Where.SELECTED), WRITES, answer=Matched)
async def reschedule_matching(
    request: ApiRequest, params: BulkChange, body: RescheduleMatchingRequest
) -> Matched | Response:
    """Give all tasks that match and wait another due time or priority, in steps with a dry run, as a bulk cancel.

    `worker` is for their history.
    """
    by = request.client_name(params.worker)
    note = request.note("tasks.reschedule-matching", target=body.kind, fields=body, worker=params.worker)
    acting = request.parts.engine.operations.reschedule_matching(body, by=by, kinds=request.kinds, note=note)
    return await _acted(request, acting, is_dry=body.dry_run)


async def _acted(request: ApiRequest, acting: Coroutine[Any, Any, _T], *, is_dry: bool) -> _T | Response:
    """Return the answer of a bulk act. A dry run ends when its client has gone."""
    answer = await (request.wait(request.parts.waits, acting) if is_dry else acting)
    return Response() if answer is None else answer


@post("/v1/chains/cancel", needs("submit", "operate", kinds=Where.ALL), WRITES)
async def cancel_chain(request: ApiRequest, body: ChainRequest) -> ChainCancelled:
    """Cancel the tasks that came from one, and that one, in steps. Tasks that come later are cancelled too."""
    note = request.note_of_operator("chain.cancel", target=body.id)
    return await request.parts.engine.cancel_chain(body, note=note)


def _check_worker(name: str) -> None:
    if name.startswith(CONSUMER):  # consumers count one another by these names
        detail = f"names that begin with {CONSUMER!r} are those of the server's consumers: take another"
        raise Refused(detail, errors=[{"field": "worker", "detail": detail}])


@post("/v1/cancels", needs("work", kinds=Where.LISTED), WRITES)
async def cancels(request: ApiRequest, body: CancelsRequest) -> VerdictsAnswer:
    """Wait for a cancel request of a task that the worker holds: a hint to send its next heartbeat now."""
    _check_worker(body.worker)
    waiting = request.parts.engine.cancels(worker=body.worker, wait=min(body.wait, MAX_WAIT))
    ids = await request.wait(request.parts.polls, waiting) or ()  # none: the client has disconnected
    own = await request.own(ids, is_vital=True) if ids else ()
    return VerdictsAnswer(
        verdicts=[Verdict(id=task_id, verdict="cancel_requested") for task_id in ids if task_id in own]
    )


@post("/v1/tasks/redrive", needs("operate", kinds=Where.SELECTED), WRITES, answer=Redriven)
async def redrive(request: ApiRequest, body: RedriveRequest) -> Redriven | Response:
    """Redrive: make dead tasks ready again, as new lives. Each task has its own verdict, by position.

    `redriven`; `redrivable` in a dry run; `gone` if unknown; `failed` with a `reason` if the task cannot be redriven,
    for example because its dedupe key belongs to another live task by now. `cursor` of the answer: where the filters
    go on.
    """
    target = body.kind or the_one(body.ids)
    note = request.note("tasks.redrive", target=target, fields=body, worker=body.worker)
    acting = request.parts.engine.operations.redrive(body, kinds=request.kinds, note=note)
    return await _acted(request, acting, is_dry=body.dry_run)


@post("/v1/tasks/purge", needs("operate", kinds=Where.SELECTED), WRITES, answer=Purged)
async def purge(request: ApiRequest, body: PurgeRequest) -> Purged | Response:
    """Remove ended tasks, one step: the `cursor` of the answer begins the next. `dry_run` counts all at once instead.

    Tasks that have not ended are never removed. A step that is repeated removes what is left, and counts only that.
    """
    note = request.note("tasks.purge", target=body.kind, fields=body)
    acting = request.parts.engine.operations.purge(body, kinds=request.kinds, note=note)
    return await _acted(request, acting, is_dry=body.dry_run)


@post("/v1/vacuum", needs("operate", kinds=Where.ALL), WRITES)
async def vacuum(request: ApiRequest, body: VacuumRequest) -> Vacuumed:
    """Shorten the store's file by a part of its free space; repeat the request until `left` is 0, or `freed` is."""
    return await request.parts.engine.operations.vacuum(note=request.note("store.vacuum"))


@post("/v1/claims", needs("work", kinds=Where.KINDS), WRITES, answer=ClaimAnswer)
async def claim(request: ApiRequest, body: ClaimRequest) -> ClaimResponse:
    """Claim up to `limit` tasks; wait up to `wait` seconds for the first. Claims may be repeated by `claim_id`.

    A repeat with `limit` 0 ends the claim: nothing is granted to it from then on, and the answer has no payloads.

    `tickets` are what messages of queues say: only these tasks are claimed, and the claim does not wait. `refused` has
    the ids of those that are of no use any longer; another one that is not granted may be tried again.

    A worker that an operator drains is answered at once, without tasks, and with `draining`: it finishes what it holds,
    claims nothing more, and stops. `age` says how long ago its process started: an earlier drain is not about it.
    """
    _check_worker(body.worker)
    # A claim is that of its access token: nobody else gets its tasks by a repeat, or ends it. Names have no slash.
    by = request.access.token_id
    parts, key = request.parts, (body.worker, body.claim_id if by is None else f"{by}/{body.claim_id}")
    parts.engine.fleet.note_window(body.worker, body.window)
    if body.limit:
        await parts.sending.wait(key)
    wait = 0.0 if body.tickets else min(body.wait, MAX_WAIT)
    claiming = parts.engine.claim(
        worker=body.worker,
        kinds=body.kinds,
        limit=body.limit,
        wait=wait,
        claim_id=key[1],
        tickets=body.tickets,
        labels=body.labels,
        since=None if body.age is None else parts.engine.clock.peek() - body.age,
    )
    claimed = await (request.wait(parts.polls, claiming) if wait else claiming) or Claimed(tasks=[])
    if body.tickets and not request.access.has_all_kinds:  # those of foreign tasks are refused like those of none
        ids, refused = [ticket.id for ticket in body.tickets], {*claimed.refused}
        own = await request.own(ids, is_vital=True)
        claimed = replace(claimed, refused=[each for each in ids if each in refused or each not in own])
    return parts.sending.begin(key, claimed)  # without tasks also if the client has disconnected


@post("/v1/heartbeats", needs("work", kinds=Where.ITEMS), WRITES)
async def heartbeat(request: ApiRequest, body: BeatsRequest) -> VerdictsAnswer:
    """Renew leases. Each beat has its own verdict, by position: `renewed`, `gone` or `throttled`."""
    _check_worker(body.worker)
    request.parts.engine.fleet.note_window(body.worker, body.window)
    renew = functools.partial(request.parts.engine.heartbeat, body.worker)
    return VerdictsAnswer(verdicts=await request.each_lease(body.beats, renew))


@post("/v1/results", needs("work", kinds=Where.ITEMS), WRITES)
async def results(request: ApiRequest, body: ResultsRequest) -> VerdictsAnswer:
    """Settle runs. Each result has its own verdict, by position: `settled`, `gone`, `failed` or `throttled`."""
    _check_worker(body.worker)
    check_successors(request.access, body.results)
    ids = [result.id for result in body.results]
    settle = functools.partial(request.parts.engine.results, body.worker)
    return VerdictsAnswer(verdicts=await request.each(body.results, ids, settle))


@get("/v1/stats", needs("read", kinds=Where.LISTED), READS)
async def stats(request: ApiRequest, params: NamePage) -> StatsAnswer:
    """Count the tasks of each kind in each status; the `cursor` of the answer begins the next page of kinds."""
    queries = request.parts.engine.queries
    counts = await queries.counts()
    own = (kind for kind in counts if request.access.kinds.match(kind))
    names, cursor = await asyncio.to_thread(page_of, own, params)
    kinds = {name: counts[name] for name in names}
    return StatsAnswer(kinds=kinds, unmet=await queries.unmet(list(waiting(kinds))), cursor=cursor)


@get("/v1/workers", needs("read", kinds=Where.LISTED), READS)
async def workers(request: ApiRequest, params: NamePage) -> WorkersAnswer:
    """List the workers that hold leases or called lately; the `cursor` of the answer begins the next page."""
    after = "" if params.cursor is UNSET else params.cursor
    found, has_more = await request.parts.engine.fleet.page(request.kinds, after=after, limit=params.limit)
    return WorkersAnswer(workers=found, cursor=found[-1].name if has_more else None)


@get("/v1/nodes", needs("read", kinds=Where.ALL), READS)
async def nodes(request: ApiRequest) -> NodesAnswer:
    """List the servers, and other processes that have the store open; those that have left, for ten minutes more."""
    return NodesAnswer(nodes=await request.parts.engine.fleet.nodes())


@get("/v1/events", needs("read", kinds=Where.LISTED), READS, media_type="text/event-stream")
async def events(request: ApiRequest, params: EventFilters) -> StreamingResponse:
    """Stream the events of tasks and workers, as Server-Sent Events; `kind`, `task` and `root` are filters.

    `event` is `scheduled`, `enqueued` (moved to a queue), `claimed`, `started`, `settled`, `expired`,
    `cancel_requested`, `cancelled`, `dropped`, `rescheduled`, `replaced` or `redriven`; of workers `joined`, `left`,
    `draining` or `undrained`; of kinds `kind_changed`; of gates `gate_changed`; of periodic tasks `periodic_changed`
    and `firing`. `data` is JSON: `event`, `at`, and if they apply, `id`, `kind`, `status` (after the event), `worker`,
    `outcome`, `collection`, `mode`, `periodic`, `root` (of a task that is scheduled in a chain). A client that
    reconnects with `Last-Event-ID` gets the events since then, after a `missed` if some are no longer kept. A client
    that reads too slowly is dropped. Comments show a live stream.

    `root` selects the tasks of a chain, by its first task: the 10,000 latest ones, and those that are scheduled from
    now on.

    Events of other servers of the same database come too, from a few seconds after the stream began. Some of these may
    be lost, without a `missed`. A worker joins and leaves each server by itself.
    """
    after = None if params.last_event_id is UNSET else params.last_event_id
    engine, access = request.parts.engine, request.access
    chain = Chain(params.root) if params.root else None
    stream = engine.feed.follow(
        kind=params.kind or None, task=params.task or None, chain=chain, after=after, of=access.kinds.match
    )
    if chain is not None:  # once events are kept, so that no task is missed between the two
        await engine.queries.know_chain(chain, access.kinds)
    if access.may_end:
        stream = _while_valid(stream, engine, access)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def _while_valid(stream: AsyncGenerator[bytes], engine: Engine, access: Access) -> AsyncGenerator[bytes]:
    """Pass a stream on until the rights with which it began are no longer known to be valid."""
    over = asyncio.Event()
    leave, ended = engine.tokens.watch(access, over.set), asyncio.ensure_future(over.wait())
    part: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            part = asyncio.ensure_future(anext(stream, None))
            await asyncio.wait((part, ended), return_when=asyncio.FIRST_COMPLETED)
            if over.is_set() or not await _is_valid(engine, access) or (data := part.result()) is None:
                return
            yield data
    finally:
        leave()
        ended.cancel()
        if part is not None:
            part.cancel()
            await asyncio.wait((part,))
        await stream.aclose()


async def _is_valid(engine: Engine, access: Access) -> bool:
    with suppress(BackendError):
        return await engine.token_watch.is_valid(access)
    return False


@get("/metrics", needs("read", kinds=Where.ALL), ALL, media_type="text/plain")
async def prometheus(request: ApiRequest) -> Response:
    """Get the server's metrics, in the text format of Prometheus."""
    text = await request.parts.metrics.exposition()
    return Response(text, media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})


@get("/healthz", ANYBODY, ANY)
async def healthz(request: ApiRequest) -> HealthAnswer:
    """Check that this process answers."""
    return HealthAnswer(status="ok")


@get("/readyz", ANYBODY, ANY | {503: "Not ready; `detail` says why."})
async def readyz(request: ApiRequest) -> HealthAnswer:
    """Check that the store can be written, is not damaged, and has tables that this server can use.

    `detail` says why it accepts no new tasks.
    """
    reason = await request.parts.engine.ready()
    if reason is not None:
        raise HTTPException(503, reason)
    engine = request.parts.engine
    tables = None if engine.neighbours is None else Tables(*engine.neighbours.tables)
    return HealthAnswer(status="ready", detail=engine.room.lack, tables=tables)


OPERATIONS: Sequence[Operation] = (
    schedule, list_tasks, ended, cancel, cancel_chain, cancels, redrive, purge, cancel_matching,
    reschedule_matching, get_task, reschedule,
    claim, heartbeat, results, stats,
    workers, nodes, *OPERATOR_OPERATIONS, vacuum, events, prometheus, healthz, readyz,
)  # fmt: skip
"""All but that for the OpenAPI document itself, which lists these."""
