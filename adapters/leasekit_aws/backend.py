"""`AwsBackend`: the backend interface over an AWS service whose calls concern one task each.

Each heartbeat is a request of its own, so `max_batch` is 1: the keeper spreads the requests evenly, at most `rate` a
second, while a batch would send them in bursts.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from leasekit.backend import Capabilities, check_kinds
from leasekit.errors import BackendError, Refused, Throttled
from leasekit.task import Beat, Claimed, Settlement, Verdict
from leasekit_aws.boto_clients import BotoClients, Call
from leasekit_aws.daemon_threads import CallThreads
from leasekit_aws.errors import Answered, Forbidden, Unreached, verdict_of
from leasekit_aws.polls import Polls
from leasekit_aws.service import Service

logger = logging.getLogger("leasekit")

_AT_ONCE = 10  # calls of one connection at the same time
_LONGEST_KEEP = 30.0  # seconds, at most, for which a task that came too late for its claim is kept for the next one
_LONGEST_TOKEN = 2048
_CLOSING = 5.0


class AwsBackend:
    """Claim, renew and settle the tasks of one service."""

    capabilities: Capabilities

    def __init__(self, service: Service, clients: BotoClients) -> None:
        self.capabilities = service.capabilities
        self._service = service
        self._clients = clients
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._threads = CallThreads()
        self._sent = _SentSettlements()
        self._polls = Polls(
            ask=lambda kind: clients.send(service.polls[kind], is_poll=True),
            read=service.read,
            give_back=self._give_back,
            keep=min(_LONGEST_KEEP, (service.ttl or 0.0) / 4),
        )

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take one task of these kinds; wait up to `wait` seconds for it.

        The service does not know claims by id. A claim that is given up leaves its poll to the next claim. The service
        does not say how long a claim had waited, so it counts as not having waited (trust counts from when the request
        left). The time of a grant to an earlier claim's poll is unknown: that lease is trusted from its first
        heartbeat.
        """
        check_kinds(kinds)
        sources = [kind for kind in self._service.polls if kind is None or kind in kinds]
        if not sources:
            await asyncio.sleep(wait)
            return Claimed(tasks=[])
        try:
            taken = await self._polls.take(kinds, sources, wait=wait)
        except Forbidden as error:
            raise error.refusing() from error
        if taken is None:
            return Claimed(tasks=[])
        task, is_granted_since = taken
        return Claimed(tasks=[task], waited=0.0 if is_granted_since else None)

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        calls = [self._service.beat(beat, item=item) for item, beat in enumerate(beats)]
        return await asyncio.gather(*(self._renew(*pair) for pair in zip(beats, calls, strict=True)))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        calls = [self._service.settle(settlement, item=item) for item, settlement in enumerate(settlements)]
        return await asyncio.gather(*(self._end(*pair) for pair in zip(settlements, calls, strict=True)))

    async def aclose(self) -> None:
        """Release the tasks that no claim has taken, and close the connections. Leases are not touched."""
        await self._polls.aclose(within=_CLOSING)
        self._clients.close()

    async def _send(self, call: Call) -> dict[str, Any]:
        async with self._at_once:
            return await asyncio.wrap_future(self._threads.start(lambda: self._clients.send(call)))

    async def _renew(self, beat: Beat, call: Call) -> Verdict:
        try:
            cancel_requested = self._service.cancel_requested(await self._send(call))
        except BackendError as error:
            if reason := self._reason_gone(error):
                return _gone(beat.id, "settled" if self._sent.has(beat.token) else reason)
            return verdict_of(beat.id, error)
        ttl = self._service.ttl
        return Verdict(id=beat.id, verdict="renewed", ttl=ttl, cancel_requested=cancel_requested)

    async def _end(self, settlement: Settlement, call: Call) -> Verdict:
        """Send a settlement, which `_sent` notes before. Raises `Refused` if the service refuses its content.

        The service answers a repeat as if the task were gone: one that was noted before is *settled*.
        """
        content = (settlement.id, call)
        is_repeat = self._sent.note(settlement.token, content)
        try:
            await self._send(call)
        except BackendError as error:
            if reason := self._reason_gone(error):
                if is_repeat:
                    return Verdict(id=settlement.id, verdict="settled")
                self._sent.forget(settlement.token, content)
                return _gone(settlement.id, "settled" if self._sent.has(settlement.token) else reason)
            if not is_repeat and isinstance(error, (Forbidden, Refused, Throttled, Unreached)):
                self._sent.forget(settlement.token, content)
            if isinstance(error, Refused) and (not isinstance(error, Answered) or error.is_about_content):
                raise
            return verdict_of(settlement.id, error)
        return Verdict(id=settlement.id, verdict="settled")

    def _reason_gone(self, error: BackendError) -> str | None:
        return self._service.gone(error.code, str(error)) if isinstance(error, Answered) else None

    def _give_back(self, answer: Mapping[str, Any]) -> None:
        """Release the task in an answer. Blocks. A failure does no harm: the lease expires by itself."""
        token = answer.get("taskToken")
        if isinstance(token, str) and 0 < len(token) <= _LONGEST_TOKEN:
            try:
                self._clients.send(self._service.settle(Settlement(id="", token=token, outcome="release"), item=0))
            except BackendError as error:
                logger.debug("a task that no claim has taken could not be released: %s", error)


class _SentSettlements:
    """The first settlement that was sent of each lease, for the latest ten thousand leases.

    A settlement is noted before it is sent, because its answer may be lost; the note is removed if the settlement was
    certainly not applied.
    """

    _MOST = 10_000

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, token: str, content: object) -> bool:
        """Note a settlement to be sent if its lease has none. Return whether the same one was noted before."""
        key, digest = _digest(token), _digest(content)
        known = self._digests.get(key)
        if known is None:
            self._digests[key] = digest
            if len(self._digests) > self._MOST:
                self._digests.popitem(last=False)
        return known == digest

    def forget(self, token: str, content: object) -> None:
        if self._digests.get(_digest(token)) == _digest(content):
            del self._digests[_digest(token)]

    def has(self, token: str) -> bool:
        """Return whether a settlement of this lease is noted: this backend has settled the lease, or tried to."""
        return _digest(token) in self._digests


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _gone(task_id: str, reason: str) -> Verdict:
    return Verdict(id=task_id, verdict="gone", reason=reason)
