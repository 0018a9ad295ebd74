"""The operations of operators: settings of kinds, gates, drains, periodic tasks, access tokens, and the audit log."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.structs import replace

from leasekit.periodic import PeriodicInfo, PeriodicTaskItem
from leasekit.server.http.needs import Where, check_kinds, needs
from leasekit.server.http.operations import Operation, delete, get, post, put
from leasekit.server.http.pages import READS, WRITES, NamePage, page_of
from leasekit.server.http.problems import Forbidden, UnknownKind, UnknownPeriodic, UnknownToken, UnknownWorker
from leasekit.server.http.request import ApiRequest
from leasekit.server.roles import gates, kinds, periodic, tokens
from leasekit.server.roles.audit import Note
from leasekit.task import GateInfo, KindInfo, KindSettings, Scheduled, WorkerInfo
from leasekit.tokens import AuditPage, TokenInfo
from leasekit.wire import (
    MAX_BATCH,
    ChangedCollection,
    ChangedKind,
    ChangedToken,
    ChangedWorker,
    DrainRequest,
    GateRequest,
    KindRequest,
    OneKind,
    OnePeriodic,
    OneToken,
    OptionalName,
    RotateRequest,
    TokenRequest,
    TriggerRequest,
)

_PERIODICS = 100  # of one page, with payloads of up to 64 KiB


class ChangedSettings(ChangedKind, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes the settings of a kind: also which it was seen to have, as JSON."""

    was: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET

    @property
    def seen(self) -> KindSettings | None:
        """The settings that the kind was seen to have; None: whatever it has. Raises `Refused`."""
        return None if self.was is UNSET else kinds.settings_in(self.was)


class PutKind(ChangedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that sets a kind: also whether the code of a worker says so."""

    is_declared: bool = False


class ChangedPeriodic(OnePeriodic, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that changes a periodic task: which, and the name of the client, for the log."""

    worker: OptionalName = UNSET


class PutPeriodic(ChangedPeriodic, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a request that sets a periodic task: also whether the code of a worker says so."""

    is_declared: bool = False


class PeriodicsAnswer(Struct, frozen=True):
    """The periodic tasks, sorted by name."""

    periodic: list[PeriodicInfo]
    cursor: str | None


class PeriodicDeleted(Struct, frozen=True):
    """A periodic task that is gone."""

    name: str


class PauseRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whether a periodic task fires by itself."""

    is_paused: bool = True
    """False: it is resumed."""


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


class WorkerUndrained(Struct, frozen=True, kw_only=True):
    """A worker that no operator drains."""

    name: str


class TokensAnswer(Struct, frozen=True, kw_only=True):
    """The access tokens, a thousand at most, the oldest first, without their secrets."""

    tokens: list[TokenInfo]


class NewTokenParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter of a request for a new access token: the name of the client, for the audit log."""

    worker: OptionalName = UNSET


class AuditParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of a page of the audit log."""

    cursor: Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f-]+\Z")] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 100


@get("/v1/kinds", needs("read", kinds=Where.LISTED), READS)
async def list_kinds(request: ApiRequest, params: NamePage) -> KindsAnswer:
    """List the kinds that have settings; the `cursor` of the answer begins the next page."""
    match = request.access.kinds.match
    found = {info.kind: info for info in await request.parts.engine.queries.kinds() if match(info.kind)}
    names, cursor = page_of(found, params)
    return KindsAnswer(kinds=[found[name] for name in names], cursor=cursor)


@get("/v1/kinds/{kind}", needs("read", kinds=Where.PATH), READS | {404: "The kind has no settings."})
async def get_kind(request: ApiRequest, params: OneKind) -> KindInfo:
    """Get the settings of a kind: what its tasks have where a submission does not say otherwise."""
    for info in await request.parts.engine.queries.kinds():
        if info.kind == params.kind:
            return info
    raise UnknownKind(params.kind)


_CHANGED = {409: "The settings of the kind are not those of `was`: others have changed them."}


@put("/v1/kinds/{kind}", needs("operate", kinds=Where.PATH), WRITES | _CHANGED)
async def set_kind(request: ApiRequest, params: PutKind, body: KindRequest) -> KindInfo:
    """Replace all settings of a kind, for tasks that are scheduled from then on; its limits hold at once. `worker` is
    for the log. With `is_declared`, the code of a worker says so: that takes effect once, for the settings in which it
    differs from what code declared before, and older code does not undo newer code. With `was`, the settings as JSON
    that the client has seen (`{}`: none), a change of others is refused.
    """
    by, act = request.client_name(params.worker), "kind.declare" if params.is_declared else "kind.set"
    note = request.note(act, target=params.kind, fields=body, worker=params.worker)
    info = await request.parts.engine.operations.set_kind(
        params.kind, body, by=by, is_declared=params.is_declared, was=params.seen, note=note
    )
    assert info is not None  # noqa: S101 - it was just set
    if "read" in request.access.scopes:
        return info
    return replace(info, settings=body, declared=body if params.is_declared else None)  # what it has sent


@delete("/v1/kinds/{kind}", needs("operate", kinds=Where.PATH), READS | _CHANGED)
async def delete_kind(request: ApiRequest, params: ChangedSettings) -> KindDeleted:
    """Remove the settings of a kind, if it has any. `worker` is for the log, and `was` as in a change."""
    note, by = request.note("kind.delete", target=params.kind, worker=params.worker), request.client_name(params.worker)
    await request.parts.engine.operations.set_kind(params.kind, None, by=by, was=params.seen, note=note)
    return KindDeleted(kind=params.kind)


@get("/v1/gates", needs("read", kinds=Where.LISTED), READS)
async def list_gates(request: ApiRequest) -> GatesAnswer:
    """List the closed gates: the kinds and collections whose tasks are not started."""
    match = request.access.kinds.match
    return GatesAnswer(gates=[gate for gate in await request.parts.engine.queries.gates() if match(gate.kind)])


@put("/v1/gates/kinds/{kind}", needs("operate", kinds=Where.PATH), WRITES)
async def close_kind(request: ApiRequest, params: ChangedKind, body: GateRequest) -> GateInfo:
    """Close the gate of a kind: its tasks are not started. Those that run are left alone. `worker` is for the log.

    It holds for every claim that is answered from then on. Due tasks wait (`pause`), or end as *cancelled* (`drop`).
    """
    return await _close(request, gates.Gated.kind(params.kind), params.worker, body)


@put("/v1/gates/collections/{collection}", needs("operate", kinds=Where.ALL), WRITES)
async def close_collection(request: ApiRequest, params: ChangedCollection, body: GateRequest) -> GateInfo:
    """Close the gate of a collection, as that of a kind."""
    return await _close(request, gates.Gated.collection(params.collection), params.worker, body)


@delete("/v1/gates/kinds/{kind}", needs("operate", kinds=Where.PATH), READS)
async def open_kind(request: ApiRequest, params: ChangedKind) -> GateOpened:
    """Open the gate of a kind, if it is closed: its tasks can be claimed again. `worker` is for the log."""
    await _open(request, gates.Gated.kind(params.kind), params.worker)
    return GateOpened(kind=params.kind)


@delete("/v1/gates/collections/{collection}", needs("operate", kinds=Where.ALL), READS)
async def open_collection(request: ApiRequest, params: ChangedCollection) -> GateOpened:
    """Open the gate of a collection, if it is closed. `worker` is for the log."""
    await _open(request, gates.Gated.collection(params.collection), params.worker)
    return GateOpened(collection=params.collection)


async def _close(request: ApiRequest, gated: gates.Gated, worker: str | UnsetType, body: GateRequest) -> GateInfo:
    note = request.note(f"{gated.scope}.{body.mode}", target=gated.name, fields=body, worker=worker)
    change = gated.closed(body, request.client_name(worker))._replace(has_all_kinds=request.access.has_all_kinds)
    info = await request.parts.engine.operations.set_gate(change, note=note)
    assert info is not None  # noqa: S101 - it was just closed
    return info


async def _open(request: ApiRequest, gated: gates.Gated, worker: str | UnsetType) -> None:
    note = request.note(f"{gated.scope}.open", target=gated.name, worker=worker)
    await request.parts.engine.operations.set_gate(gated.opened(request.client_name(worker)), note=note)


@put(
    "/v1/workers/{name}/drain",
    needs("operate", kinds=Where.ALL),
    WRITES | {404: "No worker of this name holds tasks, or has called lately."},
)
async def drain_worker(request: ApiRequest, params: ChangedWorker, body: DrainRequest) -> WorkerInfo:
    """Have a worker finish what it holds, take nothing new, and stop. `worker` is for the log.

    It is granted nothing from then on, and its claims are answered at once, with `draining`. That ends when it is taken
    back, when a process that started later claims under the same name, and ten minutes after the worker was last heard
    of.
    """
    note = request.note("worker.drain", target=params.name, worker=params.worker)
    by = request.client_name(params.worker)
    if (info := await request.parts.engine.operations.drain(params.name, by=by, note=note)) is None:
        raise UnknownWorker(params.name)
    return info


@delete("/v1/workers/{name}/drain", needs("operate", kinds=Where.ALL), READS)
async def undrain_worker(request: ApiRequest, params: ChangedWorker) -> WorkerUndrained:
    """Take the drain of a worker back, if there is one: it is granted tasks again, unless it has stopped by now."""
    note = request.note("worker.undrain", target=params.name, worker=params.worker)
    by = request.client_name(params.worker)
    await request.parts.engine.operations.undrain(params.name, by=by, note=note)
    return WorkerUndrained(name=params.name)


@get("/v1/periodic", needs("read", kinds=Where.LISTED), READS)
async def list_periodic(request: ApiRequest, params: NamePage) -> PeriodicsAnswer:
    """List the periodic tasks, each with its next firing; the `cursor` of the answer begins the next page."""
    match, after, limit = request.access.kinds.match, params.cursor or "", min(params.limit, _PERIODICS)
    own: list[PeriodicInfo] = []
    most = limit
    while len(own) < limit and (found := await request.parts.engine.queries.periodics(after=after, limit=most)):
        own += [info for info in found if match(info.task.kind)]  # and no cursor names one of another kind
        after, most = found[-1].name, _PERIODICS
    return PeriodicsAnswer(own[:limit], own[limit - 1].name if len(own) >= limit else None)


@get("/v1/periodic/{name}", needs("read", kinds=Where.PERIODIC), READS | {404: "There is no such periodic task."})
async def get_periodic(request: ApiRequest, params: OnePeriodic) -> PeriodicInfo:
    """Get a periodic task, with its next five firings and what became of the latest twenty."""
    info = await request.parts.engine.queries.periodic(params.name)
    if info is None or not request.access.kinds.match(info.task.kind):
        raise UnknownPeriodic(params.name)
    return info


@put("/v1/periodic/{name}", needs("submit", "operate", kinds=Where.PERIODIC), WRITES)
async def set_periodic(request: ApiRequest, params: PutPeriodic, body: PeriodicTaskItem) -> PeriodicInfo:
    """Add a periodic task, or replace when it fires and what is scheduled. A pause stays. `worker` is for the log.
    With `is_declared`, the code of a worker says so: that takes effect once, and older code does not undo newer code.
    Without it, an operator says so: that needs `operate`.
    """
    if not (params.is_declared or "operate" in request.access.scopes):
        detail = "lacks the scope operate: without it, a periodic task is set with is_declared=true only"
        raise Forbidden(f"the access token {request.access.name!r} {detail}")
    check_kinds(request.access, ["submit", "operate"], [body.kind])
    by = request.author(params.worker)
    change = periodic.Put(params.name, body, by, params.is_declared, kinds=request.kinds)
    act = "periodic.declare" if params.is_declared else "periodic.set"
    return await _changed(request, change, request.note(act, target=params.name, fields=body, worker=params.worker))


@delete("/v1/periodic/{name}", needs("operate", kinds=Where.PERIODIC), READS)
async def delete_periodic(request: ApiRequest, params: ChangedPeriodic) -> PeriodicDeleted:
    """Remove a periodic task, if there is one; the tasks that it has scheduled stay. `worker` is for the log."""
    change = periodic.Remove(params.name, request.author(params.worker), kinds=request.kinds)
    note = request.note("periodic.delete", target=params.name, worker=params.worker)
    await request.parts.engine.operations.change_periodic(change, note=note)
    return PeriodicDeleted(params.name)


@post(
    "/v1/periodic/{name}/pause",
    needs("operate", kinds=Where.PERIODIC),
    WRITES | {404: "There is no such periodic task."},
)
async def pause_periodic(request: ApiRequest, params: ChangedPeriodic, body: PauseRequest) -> PeriodicInfo:
    """Pause a periodic task, or resume it: what falls into a pause is not made up for. `worker` is for the log."""
    change = periodic.Pause(params.name, body.is_paused, request.author(params.worker), kinds=request.kinds)
    act = "periodic.pause" if body.is_paused else "periodic.resume"
    return await _changed(request, change, request.note(act, target=params.name, worker=params.worker))


@post(
    "/v1/periodic/{name}/trigger",
    needs("operate", kinds=Where.PERIODIC),
    WRITES | {404: "There is no such periodic task."},
)
async def trigger_periodic(request: ApiRequest, params: ChangedPeriodic, body: TriggerRequest) -> Scheduled:
    """Let a periodic task fire once, whatever its overlap policy says, and also if it is paused. `worker` is for the
    log.
    """
    at = None if body.at is None else body.at.timestamp()
    change = periodic.Trigger(params.name, at, request.author(params.worker), kinds=request.kinds)
    note = request.note("periodic.trigger", target=params.name, worker=params.worker)
    answer = await request.parts.engine.operations.change_periodic(change, note=note)
    if not isinstance(answer, Scheduled):
        raise UnknownPeriodic(params.name)
    (answer,) = await request.without_foreign([answer])
    return answer


async def _changed(request: ApiRequest, change: periodic.Change, note: Note) -> PeriodicInfo:
    info = await request.parts.engine.operations.change_periodic(change, note=note)
    if not isinstance(info, PeriodicInfo):
        if isinstance(change, periodic.Put):
            raise Forbidden(
                f"the access token is not for the kind of the periodic task {change.name!r}: take another name"
            )
        raise UnknownPeriodic(change.name)
    sent = bytes(change.task.payload) if isinstance(change, periodic.Put) else None
    if "read" in request.access.scopes or bytes(info.task.payload) == sent:
        return info
    return replace(info, task=replace(info.task, payload=Raw(b"null")))  # whoever may not read gets what it sent only


_IN_USE = {409: "The id, the name or the secret is that of another access token, or this one has ended."}
_NO_TOKEN = {404: "There is no such access token, or its caller may not see it."}


@get("/v1/tokens", needs("operate", kinds=Where.TOKENS), READS)
async def list_tokens(request: ApiRequest) -> TokensAnswer:
    """List the access tokens, also those that have ended lately: those that allow nothing that the caller may not do.

    Nobody sees a secret after it was made: servers keep its SHA-256 only.
    """
    return TokensAnswer(tokens=await request.parts.engine.queries.list_tokens(request.access))


@get("/v1/tokens/{token}", needs("operate", kinds=Where.TOKENS), READS | _NO_TOKEN)
async def get_token(request: ApiRequest, params: OneToken) -> TokenInfo:
    """Get an access token by its id, or by its name if it is valid."""
    if (info := await request.parts.engine.queries.get_token(params.token, request.access)) is None:
        raise UnknownToken(params.token)
    return info


@post("/v1/tokens", needs("operate", kinds=Where.TOKENS), WRITES | _IN_USE)
async def create_token(request: ApiRequest, params: NewTokenParameters, body: TokenRequest) -> TokenInfo:
    """Make an access token. The client makes its secret, and sends the SHA-256 of it: so a repeat makes no second one.

    A secret is `lk_`, 43 random characters of 0-9, A-Z and a-z, and 6 more: the CRC-32 of these 43, in base 62 with the
    same digits. A new token allows nothing that its maker may not do, and ends no later than that of its maker.
    """
    note = request.note("token.create", target=body.name, fields=body, worker=params.worker)
    info = await request.parts.engine.operations.change_token(tokens.Create(body, request.access), note=note)
    assert info is not None  # noqa: S101 - it was just made
    return info


@delete("/v1/tokens/{token}", needs("operate", kinds=Where.TOKENS), READS | _NO_TOKEN)
async def revoke_token(request: ApiRequest, params: ChangedToken) -> TokenInfo:
    """Revoke an access token, for good: within a second no server of the store takes it any longer.

    What waits for its claims and events ends. Leases that were granted to it end as they would without heartbeats.
    """
    note = request.note("token.revoke", target=params.token, worker=params.worker)
    return await _token(request, tokens.Revoke(params.token, request.access), note)


@post("/v1/tokens/{token}/rotate", needs("operate", kinds=Where.TOKENS), WRITES | _NO_TOKEN | _IN_USE)
async def rotate_token(request: ApiRequest, params: ChangedToken, body: RotateRequest) -> TokenInfo:
    """Give an access token another secret; with `overlap`, the one before it is taken too for some time."""
    note = request.note("token.rotate", target=params.token, fields=body, worker=params.worker)
    return await _token(request, tokens.Rotate(params.token, body, request.access), note)


async def _token(request: ApiRequest, change: tokens.Revoke | tokens.Rotate, note: Note) -> TokenInfo:
    if (info := await request.parts.engine.operations.change_token(change, note=note)) is None:
        raise UnknownToken(change.token)
    return info


@get("/v1/audit", needs("operate", kinds=Where.ALL), READS)
async def list_audit(request: ApiRequest, params: AuditParameters) -> AuditPage:
    """List what operators did, the latest first: who, what, to how many, and when; kept for a year.

    An entry is written in the transaction of its change, and never changed. It has names, and no values.
    """
    cursor = None if params.cursor is UNSET else params.cursor
    return await request.parts.engine.queries.audit(cursor=cursor, limit=params.limit)


OPERATOR_OPERATIONS: Sequence[Operation] = (
    list_kinds, get_kind, set_kind, delete_kind, list_gates, close_kind, close_collection, open_kind, open_collection,
    drain_worker, undrain_worker,
    list_periodic, get_periodic, set_periodic, delete_periodic, pause_periodic, trigger_periodic,
    list_tokens, get_token, create_token, revoke_token, rotate_token, list_audit,
)  # fmt: skip
"""The operations of this module."""
