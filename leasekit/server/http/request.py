"""Request bodies: untrusted bytes, read up to a maximum size and time, decoded once, and validated.

The decoder goes directly from bytes to the classes of `leasekit.wire`, in which users' JSON stays bytes. The checks of
`validation` happen here, for every operation.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct, UnsetType
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from leasekit._lifecycle.validation import read
from leasekit.server.access import Access, KindPatterns
from leasekit.server.commit import resolve
from leasekit.server.engine import Engine
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.auth import Authenticator
from leasekit.server.http.bodies import Bodies
from leasekit.server.http.disconnect import DisconnectWatch
from leasekit.server.http.lease_kinds import LeaseKinds
from leasekit.server.http.metrics import Metrics
from leasekit.server.http.problems import Malformed, TooDeep, Unauthenticated
from leasekit.server.http.sending import Sending
from leasekit.server.roles.audit import Note, names_of
from leasekit.task import Beat, Scheduled, Status, Verdict
from leasekit.wire import MAX_BODY

_T = TypeVar("_T")

_CLOSE = {"connection": "close"}  # the rest of the body is under way, and will not be read


@dataclass(frozen=True)
class Parts:
    """The parts of an application that operations use."""

    engine: Engine
    polls: DisconnectWatch
    waits: DisconnectWatch
    metrics: Metrics
    sending: Sending
    bodies: Bodies
    auth: Authenticator
    lease_kinds: LeaseKinds


class ApiRequest(Request):
    """A request whose body is JSON of a known class, of bounded size, complete within the time of `Bodies`.

    Refuses a body with 415 (another content type), 413 (too big), 408 (too slow), 400 (not JSON), or `Refused` (422:
    JSON that does not fit).
    """

    def __init__(self, scope: Scope, receive: Receive, parts: Parts) -> None:
        super().__init__(scope, receive)
        self.parts = parts
        self.access = NOBODY
        """Who makes this request, once `authenticate` has found that out."""

    async def authenticate(self) -> None:
        """Find out who makes this request. Raises `Unauthenticated` and `Throttled`."""
        self.access = await self.parts.auth.access_of(self)
        CALLER.set(self.access.caller)

    @property
    def kinds(self) -> KindPatterns | None:
        """The kinds that the caller may touch; None: all."""
        return None if self.access.has_all_kinds else self.access.kinds

    async def own(self, ids: Collection[str], *, is_vital: bool = False) -> Container[str]:
        """Return those of these tasks that are of the caller's kinds; what holders of leases need is vital."""
        if self.access.has_all_kinds:
            return ids
        kinds = await self.parts.engine.queries.kinds_of(set(ids), is_vital=is_vital)
        return {task_id for task_id, kind in kinds.items() if self.access.kinds.match(kind)}

    async def without_foreign(self, scheduled: Sequence[Scheduled]) -> list[Scheduled]:
        """Take the status out of answers about tasks of other kinds whose ids a caller wanted to use."""
        taken = [answer.id for answer in scheduled if answer.conflict]
        own = await self.own(taken) if taken else ()
        return [
            replace(answer, status=Status.NEW) if answer.conflict and answer.id not in own else answer
            for answer in scheduled
        ]

    async def each(
        self, items: Sequence[_T], ids: Sequence[str], act: Callable[[Sequence[_T]], Awaitable[list[Verdict]]]
    ) -> list[Verdict]:
        """Return a verdict for each item: *gone* for tasks that are not of the caller's kinds, or do not exist."""
        if self.access.has_all_kinds:
            return await act(items)
        own = await self.own(ids, is_vital=True)
        return await _judged(items, ids, [task_id in own for task_id in ids], act)

    async def each_lease(
        self, beats: Sequence[Beat], act: Callable[[Sequence[Beat]], Awaitable[list[Verdict]]]
    ) -> list[Verdict]:
        """Do what `each` does, for leases that are renewed again and again."""
        if self.access.has_all_kinds:
            return await act(beats)
        own = [self.access.kinds.match(kind) for kind in await self.parts.lease_kinds.of(beats)]
        return await _judged(beats, [beat.id for beat in beats], own, act)

    def client_name(self, worker: str | UnsetType) -> str | None:
        """Return the name that a client gave itself, or else the address that it called from."""
        return worker or (None if self.client is None else self.client.host)

    def author(self, worker: str | UnsetType) -> str | None:
        """Return the name of the caller's access token, or what `client_name` returns for callers that need none.

        The firings of one author do not keep out those of another, so that no client may choose this name freely.
        """
        return self.client_name(worker) if self.access.token_id is None else self.access.name

    def note(
        self,
        act: str,
        *,
        target: str | None = None,
        fields: Struct | None = None,
        worker: str | UnsetType | None = None,
    ) -> Note:
        """Return the entry of this request in the audit log, with the names of the `fields` that were given."""
        names = [] if fields is None else names_of(fields)
        return Note(act, self.access, target, names, worker or None)

    def note_of_operator(
        self,
        act: str,
        *,
        target: str | None,
        fields: Struct | None = None,
        worker: str | UnsetType | None = None,
    ) -> Note | None:
        """Return what `note` does, but None for a caller without a token of the scope `operate`.

        For acts that submitters may do too: the audit log lists acts of operators only.
        """
        is_operator = self.access.token_id is not None and "operate" in self.access.scopes
        return self.note(act, target=target, fields=fields, worker=worker) if is_operator else None

    async def wait(self, watch: DisconnectWatch, answer: Coroutine[Any, Any, _T]) -> _T | None:
        """Do what `watch.wait` does. Raises `Unauthenticated` once the access token is no longer valid."""
        if not self.access.may_end:
            return await watch.wait(answer, self.receive)
        over: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        leave = self.parts.engine.tokens.watch(self.access, functools.partial(resolve, over, _OVER))
        try:
            result = await watch.wait(answer, functools.partial(_first, self.receive, over))
        finally:
            leave()
        await self.check_token()
        return result

    async def check_token(self) -> None:
        """Raise `Unauthenticated` if the access token has become invalid while the request waited, or arrived.

        Raises `Unavailable` if that is not known.
        """
        if not await self.parts.engine.token_watch.is_valid(self.access):
            raise Unauthenticated("the access token was revoked, or has expired, while the request waited or arrived")

    async def decode(self, type_: type[Struct]) -> Any:
        """Read and decode the body. Raises what this class says, and what `check_token` does: it may take its time."""
        body = await self._decode(type_)
        await self.check_token()
        return body

    async def _decode(self, type_: type[Struct]) -> Any:
        with self.parts.bodies.arriving() as count:
            body = await self._read(count)
            try:
                return await self.parts.bodies.decoded(len(body), functools.partial(read, body, type_))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Malformed(f"the body is not JSON: {error}") from None
            except RecursionError:
                raise TooDeep("the body is nested too deeply") from None

    async def _read(self, count: Callable[[int], None]) -> bytes:
        """Read the whole body: at most `MAX_BODY` bytes, and at least one."""
        self._check_headers()
        try:
            body = await self.parts.bodies.wait(self._receive_all(count))
        except TimeoutError:
            raise HTTPException(408, "the body took too long to arrive: repeat it", _CLOSE) from None
        if not body:
            raise Malformed("the body is empty")
        return body

    def _check_headers(self) -> None:
        media_type, _, parameters = self.headers.get("content-type", "").lower().partition(";")
        if media_type.strip() != "application/json" or parameters.strip() not in _UTF_8:
            raise HTTPException(415, "the body must be application/json in UTF-8", _CLOSE)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "send the body without content-encoding", _CLOSE)
        # The HTTP parser has checked that the value is a number.
        if int(self.headers.get("content-length", 0)) > MAX_BODY:
            _refuse_size()

    async def _receive_all(self, count: Callable[[int], None]) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            event = await self.receive()
            if event["type"] != "http.request":
                raise Malformed("the client disconnected before the body was complete")
            count(len(event["body"]))
            chunks.append(event["body"])
            size += len(event["body"])
            if size > MAX_BODY:
                _refuse_size()
            if not event["more_body"]:
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _judged(
    items: Sequence[_T],
    ids: Sequence[str],
    own: Sequence[bool],
    act: Callable[[Sequence[_T]], Awaitable[list[Verdict]]],
) -> list[Verdict]:
    """Return the verdicts of `act` on a caller's own items, and *gone* for the others."""
    verdicts = iter(await act(list(compress(items, own))))
    judged = zip(ids, own, strict=True)
    return [next(verdicts) if is_own else Verdict(id=task_id, verdict="gone") for task_id, is_own in judged]


NOBODY = Access(name="nobody", scopes=frozenset(), kinds=KindPatterns(()))
"""The caller of a request that was not authenticated."""

_OVER: Message = {"type": "http.disconnect"}


async def _first(receive: Receive, over: "asyncio.Future[Message]") -> Message:
    """Return the first to come of the next message and `over`, the message that stands for the end of a token."""
    received = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((received, over), return_when=asyncio.FIRST_COMPLETED)
        return over.result() if over.done() else received.result()
    finally:
        received.cancel()


_UTF_8 = frozenset({"", "charset=utf-8", 'charset="utf-8"'})


def _refuse_size() -> NoReturn:
    raise HTTPException(413, f"the body is larger than {MAX_BODY:,} bytes: split the batch", _CLOSE)
