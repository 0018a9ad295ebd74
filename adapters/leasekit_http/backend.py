"""`HttpBackend`: the backend interface over HTTP. Each method is one request.

A body that is too large for the server is sent in halves. Apart from that nothing is tried twice at one address:
heartbeats are repeated by the cycle, other requests by the client.
"""

import logging
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from leasekit.backend import Capabilities, dead_ones, unknown_task
from leasekit.config import check_number
from leasekit.errors import ConfigError, ProtocolError, Refused
from leasekit.periodic import PeriodicInfo, PeriodicTask
from leasekit.task import (
    Beat,
    ChainCancelled,
    Claimed,
    Ended,
    GateInfo,
    KindInfo,
    KindSettings,
    Matched,
    NewTask,
    NodeInfo,
    Page,
    Purged,
    Redriven,
    Rescheduled,
    Scheduled,
    Settlement,
    Stats,
    TaskInfo,
    Ticket,
    Vacuumed,
    Verdict,
    VerdictWord,
    WorkerInfo,
)
from leasekit.tokens import AuditPage, TokenInfo
from leasekit.wire import MAX_BATCH, MAX_BODY, MAX_PAYLOAD, MAX_PROGRESS, MAX_WAIT, decoder_of, given
from leasekit_http import answers
from leasekit_http.addresses import addresses, socket_address
from leasekit_http.headers import checked_headers, has_token, headers_of_environment, token_of_environment, with_token
from leasekit_http.transport import MAX_ANSWER, NotThere, Transport
from leasekit_http.way import Way, is_loopback

logger = logging.getLogger("leasekit")

T = TypeVar("T")
P = TypeVar("P", answers.StatsPage, answers.WorkersPage, answers.KindsPage, answers.PeriodicsPage)
Item = TypeVar("Item", NewTask, Beat, Settlement, str)

_MOST_PAGES = 1000  # of a listing: a million kinds or workers
_encode = msgspec.json.Encoder().encode
_ENDED = decoder_of(Ended)
_TASK = decoder_of(TaskInfo)
_PAGE = decoder_of(Page)
_PURGED = msgspec.json.Decoder(Purged)
_VACUUMED = msgspec.json.Decoder(Vacuumed)
_CHAIN = msgspec.json.Decoder(ChainCancelled)
_GATE = msgspec.json.Decoder(GateInfo)
_KIND = msgspec.json.Decoder(KindInfo)
_PERIODIC = decoder_of(PeriodicInfo)
_SCHEDULED = msgspec.json.Decoder(Scheduled)
_RESCHEDULED = decoder_of(Rescheduled)
_MATCHED = msgspec.json.Decoder(Matched)
_TOKEN = msgspec.json.Decoder(TokenInfo)
_WORKER = msgspec.json.Decoder(WorkerInfo)
_AUDIT = msgspec.json.Decoder(AuditPage)
_ANY: msgspec.json.Decoder[Any] = decoder_of(object)

_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})  # and others, whose names nobody knows

_BEAT: frozenset[VerdictWord] = frozenset({"renewed", "gone", "throttled"})
_SETTLE: frozenset[VerdictWord] = frozenset({"settled", "gone", "throttled"})
_CANCEL: frozenset[VerdictWord] = frozenset({"cancelled", "cancel_requested", "gone", "throttled"})


_FOR_A_SOCKET = "http+unix:// is a socket of this machine, without ca=, proxy=, token= and cert=: leave them out"


def connect(
    url: str,
    *,
    worker: str,
    headers: Mapping[str, str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    proxy: str | None = None,
    token: str | None = None,
    cert: str | os.PathLike[str] | None = None,
    plain_http: bool = False,
) -> "HttpBackend":
    """Return the backend for the service at this URL; a path is kept as a prefix. Nothing is opened yet.

    `http://a:8077,b:8077/prefix` names two addresses of the same service: while one does not answer, requests go to the
    other. `http+unix:///run/tasks.sock` names a socket of this machine. Without `headers` and `token`, those in
    `LEASEKIT_HEADERS`, `LEASEKIT_TOKEN_FILE` and `LEASEKIT_TOKEN` are sent to the service of `LEASEKIT_URL`. A token is
    not sent over plain `http://` to another machine, unless `plain_http`. Raises `ConfigError` if the URL or an option
    is wrong; the message has neither the URL nor a header, the token or the proxy, which may hold a password.
    """
    if url.startswith("http+unix://"):
        if not (ca is proxy is token is cert is None):
            raise ConfigError(_FOR_A_SOCKET)
        return HttpBackend(socket_address(url), worker=worker, headers=checked_headers(headers or {}))
    headers = headers_of_environment(url) if headers is None else checked_headers(headers)
    headers = with_token(headers, token_of_environment(url) if token is None else token)
    urls = addresses(url)
    _check_privacy(headers, urls, plain_http=plain_http)
    backend = HttpBackend(*urls, worker=worker, headers=headers, way=Way(ca=ca, proxy=proxy, cert=cert))
    backend.url = url  # with all addresses
    return backend


def _check_privacy(headers: Mapping[str, str], urls: Sequence[str], *, plain_http: bool) -> None:
    """Warn of credentials that travel in the clear. Raises `ConfigError` for an access token, unless `plain_http`."""
    if _CREDENTIALS.isdisjoint(headers) or not (open_to := next(filter(_is_in_the_clear, urls), None)):
        return
    if has_token(headers) and not plain_http:
        raise ConfigError(
            f"the access token for {open_to} would travel in the clear: use https://, or say plain_http=True "
            "(--plain-http) if the way there is safe"
        )
    logger.warning("credentials for %s travel in the clear: use https://", open_to)


def _is_in_the_clear(url: str) -> bool:
    return url.startswith("http:") and not is_loopback(url)


class HttpBackend:
    """A leasekit service at one or several addresses. `timeout` is for one request, in addition to the wait of a claim.

    A request that one address leaves unanswered goes to the next one, and the address that answered last is asked
    first. A heartbeat is tried once: after a failure the next heartbeat goes to the next address.
    """

    capabilities = Capabilities(
        max_batch=MAX_BATCH,
        max_claim=MAX_BATCH,
        dependencies=True,
        keys=True,
        debounce=True,
        start_deadlines=True,
        tags=True,
        labels=True,
    )

    def __init__(
        self,
        base_url: str,
        *others: str,
        worker: str,
        timeout: float = 10.0,
        headers: Mapping[str, str] | None = None,
        way: Way | None = None,
    ) -> None:
        self.url = base_url
        self._worker = worker
        self._began_at = time.monotonic()
        check_number("timeout", timeout)
        self._timeout = timeout
        self._window: dict[str, Any] = {}  # what claims and heartbeats say of it
        self._transport = Transport(base_url, *others, headers=headers or {}, way=way or Way())

    async def claim(
        self,
        kinds: Sequence[str],
        *,
        limit: int,
        wait: float,
        claim_id: str,
        labels: Mapping[str, str] | None = None,
    ) -> Claimed:
        wanted = {"kinds": kinds, "limit": limit, "wait": min(wait, MAX_WAIT), "claim_id": claim_id}
        return await self._claim({**wanted, "labels": labels} if labels else wanted)

    async def claim_tickets(
        self, kinds: Sequence[str], tickets: Sequence[Ticket], *, limit: int, claim_id: str
    ) -> Claimed:
        return await self._claim({"kinds": kinds, "tickets": tickets, "limit": limit, "wait": 0, "claim_id": claim_id})

    async def _claim(self, wanted: Mapping[str, Any]) -> Claimed:
        kinds, wait = wanted["kinds"], wanted["wait"]
        most = wanted["limit"] or MAX_BATCH  # limit 0 ends a claim: its answer has the tasks that it was granted before
        age = round(time.monotonic() - self._began_at, 3)
        body = {"worker": self._worker, **wanted, **self._window, "age": age}
        return await self._transport.post(
            "/v1/claims",
            _encode(body),
            partial(answers.claimed, kinds=kinds, limit=most),
            timeout=wait + self._timeout,
            owed_after=wait,
            # An answer that is rejected would lose its tasks, so it may be as large as the largest tasks allow.
            at_most=MAX_ANSWER + most * (MAX_PAYLOAD + MAX_PROGRESS),
            must_be_named=operator.attrgetter("draining"),  # it ends the worker
        )

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        return await self._verdicts("/v1/heartbeats", "beats", beats, [b.id for b in beats], _BEAT)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        return await self._verdicts("/v1/results", "results", settlements, [s.id for s in settlements], _SETTLE)

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        return await self._verdicts("/v1/tasks/cancel", "ids", task_ids, task_ids, _CANCEL)

    async def cancels(self, *, wait: float) -> list[str]:
        body = _encode({"worker": self._worker, "wait": wait})
        return await self._transport.post(
            "/v1/cancels", body, answers.ids, timeout=wait + self._timeout, owed_after=wait, is_one_try=True
        )

    async def redrive(self, task_ids: Sequence[str] = (), *, rate: int | None = None, **options: Any) -> Redriven:
        body = {"ids": task_ids, "worker": self._worker, **options}
        read = partial(answers.redriven, ids=task_ids, dry_run=bool(options.get("dry_run")))
        return await self._transport.post("/v1/tasks/redrive", _encoded(body), read, timeout=self._timeout)

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        def read(raw: bytes, part: slice) -> list[Scheduled]:
            return answers.scheduled(raw, count=len(tasks[part]))

        return await self._post_items("/v1/tasks", {}, "tasks", tasks, read)

    async def get(self, task_id: str) -> TaskInfo | None:
        try:
            return await self._get(f"/v1/tasks/{_segment(task_id)}", _TASK)
        except NotThere:
            return None

    async def ended(self, task_ids: Sequence[str], *, wait: float) -> Ended:
        wait = min(wait, MAX_WAIT)
        body, read = _encode({"ids": task_ids, "wait": wait}), partial(answers.decode, decoder=_ENDED)
        return await self._transport.wait("/v1/tasks/ended", body, read, timeout=wait + self._timeout, owed_after=wait)

    async def stats(self) -> Stats:
        pages = await self._pages("/v1/stats", answers.STATS)
        kinds = {kind: counts for page in pages for kind, counts in page.kinds.items()}
        damaged = {kind: count for page in pages for kind, count in page.damaged.items()}
        unmet = {kind: labels for page in pages for kind, labels in page.unmet.items()}
        return Stats(kinds=kinds, damaged=damaged, unmet=unmet)

    async def workers(self) -> list[WorkerInfo]:
        return [worker for page in await self._pages("/v1/workers", answers.WORKERS) for worker in page.workers]

    async def drain_worker(self, worker: str) -> WorkerInfo:
        return await self._change("PUT", self._path_of_drain(worker), b"{}", _WORKER)

    async def undrain_worker(self, worker: str) -> None:
        await self._change("DELETE", self._path_of_drain(worker), None, _ANY)

    def _path_of_drain(self, worker: str) -> str:
        return f"/v1/workers/{_segment(worker)}/drain?worker={_quoted(self._worker)}"

    async def tell_window(self, size: int, waiting: int) -> None:
        """Have the next claims and heartbeats tell the server: see `WindowListener`."""
        self._window = {"window": {"size": size, "waiting": waiting}}

    async def nodes(self) -> list[NodeInfo]:
        return (await self._get("/v1/nodes", answers.NODES)).nodes

    async def kinds(self) -> list[KindInfo]:
        return [info for page in await self._pages("/v1/kinds", answers.KINDS) for info in page.kinds]

    async def kind(self, kind: str) -> KindInfo | None:
        try:
            return await self._get(f"/v1/kinds/{_segment(kind)}", _KIND)
        except NotThere:
            return None

    async def set_kind(
        self, kind: str, settings: KindSettings, *, is_declared: bool = False, was: KindSettings | None = None
    ) -> KindInfo:
        path = self._path_of_kind(kind, was) + "&is_declared=true" * is_declared
        return await self._change("PUT", path, _encoded(given(settings)), _KIND)

    async def delete_kind(self, kind: str, *, was: KindSettings | None = None) -> None:
        await self._change("DELETE", self._path_of_kind(kind, was), None, _ANY)

    def _path_of_kind(self, kind: str, was: KindSettings | None) -> str:
        seen = "" if was is None else f"&was={_quoted(_encoded(given(was)).decode())}"
        return f"/v1/kinds/{_segment(kind)}?worker={_quoted(self._worker)}{seen}"

    async def list_periodic(self) -> list[PeriodicInfo]:
        return [info for page in await self._pages("/v1/periodic", answers.PERIODICS) for info in page.periodic]

    async def get_periodic(self, name: str) -> PeriodicInfo | None:
        try:
            return await self._get(f"/v1/periodic/{_segment(name)}", _PERIODIC)
        except NotThere:
            return None

    async def set_periodic(self, name: str, task: PeriodicTask, *, is_declared: bool = False) -> PeriodicInfo:
        path = self._path_of_periodic(name) + "&is_declared=true" * is_declared
        return await self._change("PUT", path, _encoded(given(task)), _PERIODIC)

    async def pause_periodic(self, name: str, *, is_paused: bool = True) -> PeriodicInfo:
        body = _encoded({"is_paused": is_paused})
        return await self._change("POST", self._path_of_periodic(name, "/pause"), body, _PERIODIC)

    async def trigger_periodic(self, name: str, *, at: datetime) -> Scheduled:
        return await self._change("POST", self._path_of_periodic(name, "/trigger"), _encoded({"at": at}), _SCHEDULED)

    async def delete_periodic(self, name: str) -> None:
        await self._change("DELETE", self._path_of_periodic(name), None, _ANY)

    def _path_of_periodic(self, name: str, what: str = "") -> str:
        return f"/v1/periodic/{_segment(name)}{what}?worker={_quoted(self._worker)}"

    async def tokens(self) -> list[TokenInfo]:
        return (await self._get("/v1/tokens", answers.TOKENS)).tokens

    async def token(self, token: str) -> TokenInfo | None:
        try:
            return await self._get(f"/v1/tokens/{_segment(token)}", _TOKEN)
        except NotThere:
            return None

    async def create_token(self, *, token_id: str, **wanted: Any) -> TokenInfo:
        body = {name: value for name, value in wanted.items() if value is not None}
        path = f"/v1/tokens?worker={_quoted(self._worker)}"
        return await self._change("POST", path, _encoded({"id": token_id, **body}), _TOKEN)

    async def revoke_token(self, token: str) -> TokenInfo:
        return await self._change("DELETE", self._path_of_token(token), None, _TOKEN)

    async def rotate_token(self, token: str, *, digest: str, overlap: float = 0.0) -> TokenInfo:
        body = _encoded({"digest": digest, "overlap": overlap})
        return await self._change("POST", self._path_of_token(token, "/rotate"), body, _TOKEN)

    def _path_of_token(self, token: str, what: str = "") -> str:
        return f"/v1/tokens/{_segment(token)}{what}?worker={_quoted(self._worker)}"

    async def audit(self, *, cursor: str | None = None, limit: int = 100) -> AuditPage:
        page = "" if cursor is None else f"&cursor={_quoted(cursor)}"
        return await self._get(f"/v1/audit?limit={limit}{page}", _AUDIT)

    async def gates(self) -> list[GateInfo]:
        return (await self._get("/v1/gates", answers.GATES)).gates

    async def set_gate(self, *, kind: str | None = None, collection: str | None = None, **wanted: Any) -> GateInfo:
        body = {name: value for name, value in wanted.items() if value is not None}
        return await self._change("PUT", self._path_of_gate(kind, collection), _encoded(body), _GATE)

    async def open_gate(self, *, kind: str | None = None, collection: str | None = None) -> None:
        await self._change("DELETE", self._path_of_gate(kind, collection), None, _ANY)

    async def cancel_chain(self, task_id: str, *, cursor: str | None = None) -> ChainCancelled:
        body = {"id": task_id} if cursor is None else {"id": task_id, "cursor": cursor}
        return await self._operate("/v1/chains/cancel", body, _CHAIN)

    def _path_of_gate(self, kind: str | None, collection: str | None) -> str:
        if (kind is None) is (collection is None):
            raise Refused("a gate is that of a kind or of a collection: give one of them")
        of = f"collections/{_segment(collection or '')}" if kind is None else f"kinds/{_segment(kind)}"
        return f"/v1/gates/{of}?worker={_quoted(self._worker)}"

    async def _change(self, method: str, path: str, body: bytes | None, decoder: msgspec.json.Decoder[T]) -> T:
        read = partial(answers.decode, decoder=decoder)
        return await self._transport.send(method, path, body, read, timeout=self._timeout)

    async def reschedule(self, task_id: str, **wanted: Any) -> Rescheduled:
        path = f"/v1/tasks/{_segment(task_id)}?worker={_quoted(self._worker)}"
        body = {name: value for name, value in wanted.items() if value is not None}
        try:
            return await self._change("PATCH", path, _encoded(body), _RESCHEDULED)
        except NotThere:
            raise Refused(unknown_task(task_id)) from None

    async def cancel_matching(self, **wanted: Any) -> Matched:
        return await self._operate("/v1/tasks/cancel-matching", wanted, _MATCHED)

    async def reschedule_matching(self, **wanted: Any) -> Matched:
        return await self._operate(f"/v1/tasks/reschedule-matching?worker={_quoted(self._worker)}", wanted, _MATCHED)

    async def purge(self, task_ids: Sequence[str] = (), **options: Any) -> Purged:
        return await self._operate("/v1/tasks/purge", {"ids": task_ids, **options}, _PURGED)

    async def list_dead(self, *, cursor: str | None = None, limit: int = 100, **wanted: Any) -> Page:
        return await self.list_tasks(cursor=cursor, limit=limit, **dead_ones(wanted))

    async def vacuum(self) -> Vacuumed:
        return await self._operate("/v1/vacuum", {}, _VACUUMED)

    async def _operate(self, path: str, body: Mapping[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
        read = partial(answers.decode, decoder=decoder)
        return await self._transport.post(path, _encoded(dict(body)), read, timeout=self._timeout)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        return await self._transport.get(path, partial(answers.decode, decoder=decoder), timeout=self._timeout)

    async def _pages(self, path: str, decoder: msgspec.json.Decoder[P]) -> list[P]:
        """Return all pages of a listing. Raises `ProtocolError` if the listing does not end."""
        pages = [await self._get(path, decoder)]
        while (cursor := pages[-1].cursor) is not None:
            if len(pages) == _MOST_PAGES:
                raise ProtocolError(f"{path} has more than {_MOST_PAGES:,} pages")
            pages.append(await self._get(f"{path}?cursor={quote(cursor, safe='')}", decoder))
        return pages

    async def _verdicts(
        self, path: str, field: str, items: Sequence[Item], ids: Sequence[str], words: frozenset[VerdictWord]
    ) -> list[Verdict]:
        def read(raw: bytes, part: slice) -> list[Verdict]:
            return answers.verdicts(raw, ids=ids[part], words=words)

        head = {} if field == "ids" else {"worker": self._worker, **(self._window if field == "beats" else {})}
        return await self._post_items(path, head, field, items, read)

    async def _post_items(
        self,
        path: str,
        head: dict[str, Any],
        field: str,
        items: Sequence[Item],
        read: Callable[[bytes, slice], list[T]],
        first: int = 0,
    ) -> list[T]:
        """Send items as `field` of a request, or in halves if too large; `first` is the position of items[0] in all."""
        if not items:
            return []
        body = _encoded({**head, field: items})
        if len(body) > MAX_BODY and len(items) > 1:
            middle = len(items) // 2
            left = await self._post_items(path, head, field, items[:middle], read, first)
            return left + await self._post_items(path, head, field, items[middle:], read, first + middle)
        if len(body) > MAX_BODY:
            raise _too_large(items[0], len(body), first)
        try:
            part = slice(first, first + len(items))
            return await self._transport.post(
                path,
                body,
                lambda raw: read(raw, part),
                timeout=self._timeout,
                is_one_try=field == "beats",
                is_patient=field in ("tasks", "ids"),
            )
        except Refused as refused:
            raise _moved(refused, by=first) from None

    async def list_tasks(self, *, newest: bool = False, limit: int = 100, **filters: Any) -> Page:
        if newest:
            filters["newest"] = "true"
        given = [("tag", tag) for tag in filters.pop("tags", None) or ()] + list(filters.items())
        query = "&".join(f"{name}={_quoted(_text(value))}" for name, value in given if value is not None)
        return await self._get(f"/v1/tasks?limit={limit}&{query}".rstrip("&"), _PAGE)


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return _encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # `Refused`, not `Unavailable`, because another try would fail too.
        raise Refused(f"a value cannot be sent as JSON: {error}") from error


def _too_large(item: Any, size: int, position: int) -> Refused:
    """Return the refusal of an item that no request can hold: the server would break off without a reason."""
    fields = msgspec.json.decode(_encode(item), type=dict[str, msgspec.Raw])
    most, field = max((len(bytes(value)), name) for name, value in fields.items())
    detail = f"has {most:,} bytes as JSON, and a request for this item alone {size:,}: at most {MAX_BODY:,} are allowed"
    return Refused(f"item {position}: {field} {detail}", errors=[{"item": position, "field": field, "detail": detail}])


def _moved(refused: Refused, *, by: int) -> Refused:
    errors = [{**error, "item": error["item"] + by} if "item" in error else error for error in refused.errors]
    return Refused(str(refused), errors=errors)


def _segment(name: str) -> str:
    """Return an id or a kind as one segment of a path. Dots are quoted too: `..` would be resolved before sending."""
    if not name or "/" in name:  # a server, or a proxy before it, takes %2F for a slash
        raise Refused(f"{name!r} cannot be the name of anything: give a name that is not empty and has no slash")
    return _quoted(name).replace(".", "%2E")


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _quoted(name: str) -> str:
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise Refused(f"a name cannot be sent: {error}") from None
