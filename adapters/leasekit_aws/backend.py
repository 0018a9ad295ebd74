"""`AwsBackend`: the seam over a service of Amazon's that knows one task a call.

A heartbeat is a request of its own, so `max_batch` is 1: the keeper spreads them evenly, at most `rate` a second,
where a batch would only make them burst.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from leasekit.backend import Traits
from leasekit.errors import BackendError, Refused, Throttled
from leasekit.task import Beat, Claimed, Settlement, Verdict
from leasekit.wire import check_kinds
from leasekit_aws.clients import Call, Clients
from leasekit_aws.errors import Answered, Forbidden, Unreached
from leasekit_aws.polls import Polls
from leasekit_aws.service import Service
from leasekit_aws.threads import in_thread

__all__ = ["AwsBackend"]

logger = logging.getLogger("leasekit")

_AT_ONCE = 10  # calls of one connection
_LONGEST_KEEP = 30.0  # a task that came too late for its claim waits so long for the next one
_LONGEST_TOKEN = 2048
_CLOSING = 5.0


class AwsBackend:
    """Leases of one service."""

    traits: Traits

    def __init__(self, service: Service, clients: Clients) -> None:
        self.traits = service.traits
        self._service = service
        self._clients = clients
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._said = _Said()
        self._polls = Polls(
            ask=lambda kind: clients.send(service.polls[kind], is_poll=True),
            read=service.read,
            give_back=self._give_back,
            keep=min(_LONGEST_KEEP, (service.ttl or 0.0) / 4),
        )

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str) -> Claimed:
        """Take one task of these kinds; wait up to `wait` seconds for it.

        The service does not know claims by id. A claim that is given up leaves its poll to the next one. The service
        does not say how long a claim had waited either: it had not waited at all, at least (trust counts from when it
        left). What an earlier claim's poll brings was granted nobody knows when: its first beat decides.
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
        """Renew leases: `renewed`, `gone`, `throttled` or `failed` for each, in order."""
        calls = [self._service.beat(beat, item=item) for item, beat in enumerate(beats)]
        return await asyncio.gather(*(self._renew(*one) for one in zip(beats, calls, strict=True)))

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        """End leases: `settled`, `gone`, `throttled` or `failed` for each, in order."""
        calls = [self._service.settle(said, item=item) for item, said in enumerate(settlements)]
        return await asyncio.gather(*(self._end(*one) for one in zip(settlements, calls, strict=True)))

    async def aclose(self) -> None:
        """Give back what was claimed for nobody, and let go of connections. Leases are not touched."""
        await self._polls.aclose(within=_CLOSING)
        self._clients.close()

    async def _send(self, call: Call) -> dict[str, Any]:
        async with self._at_once:
            return await asyncio.wrap_future(in_thread(lambda: self._clients.send(call)))

    async def _renew(self, beat: Beat, call: Call) -> Verdict:
        try:
            order = self._service.order(await self._send(call))
        except BackendError as error:
            if reason := self._over(error):
                return _gone(beat.id, "settled" if self._said.ended(beat.token) else reason)
            return _no_verdict(beat.id, error)
        return Verdict(id=beat.id, verdict="renewed", ttl=self._service.ttl, order=order)

    async def _end(self, settlement: Settlement, call: Call) -> Verdict:
        """One settlement. The service knows none that it has taken; we do: its repeat is *settled* as well."""
        said = (settlement.id, call)
        is_repeat = self._said.before(settlement.token, said)
        try:
            await self._send(call)
        except BackendError as error:
            if reason := self._over(error):
                if is_repeat:
                    return Verdict(id=settlement.id, verdict="settled")
                self._said.taken_back(settlement.token, said)
                return _gone(settlement.id, "settled" if self._said.ended(settlement.token) else reason)
            if not is_repeat and isinstance(error, (Forbidden, Refused, Throttled, Unreached)):
                self._said.taken_back(settlement.token, said)
            if isinstance(error, Refused) and (not isinstance(error, Answered) or error.is_about_content):
                raise
            return _no_verdict(settlement.id, error)
        return Verdict(id=settlement.id, verdict="settled")

    def _over(self, error: BackendError) -> str | None:
        """Why the lease is gone, where that is what the service has answered."""
        return self._service.gone(error.code, str(error)) if isinstance(error, Answered) else None

    def _give_back(self, answer: Mapping[str, Any]) -> None:
        """Blocking. A courtesy: where it fails, the lease runs out by itself."""
        token = answer.get("taskToken")
        if isinstance(token, str) and 0 < len(token) <= _LONGEST_TOKEN:
            try:
                self._clients.send(self._service.settle(Settlement(id="", token=token, outcome="release"), item=0))
            except BackendError as error:
                logger.debug("a task that came for nobody could not be given back: %s", error)


class _Said:
    """What was said last of each lease at its end: the latest ten thousand.

    It is noted before it is sent, because its answer may be lost; and taken back where it certainly was not applied.
    """

    _MOST = 10_000

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def before(self, token: str, said: object) -> bool:
        """Note a settlement that is about to be sent. True where it was sent before."""
        key, digest = _digest(token), _digest(said)
        known = self._digests.get(key)
        if known is None:
            self._digests[key] = digest
            if len(self._digests) > self._MOST:
                self._digests.popitem(last=False)
        return known == digest

    def taken_back(self, token: str, said: object) -> None:
        """It was certainly not applied."""
        if self._digests.get(_digest(token)) == _digest(said):
            del self._digests[_digest(token)]

    def ended(self, token: str) -> bool:
        """Whether the end of this lease has been reported from here."""
        return _digest(token) in self._digests


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _gone(task_id: str, reason: str) -> Verdict:
    return Verdict(id=task_id, verdict="gone", reason=reason)


def _no_verdict(task_id: str, error: BackendError) -> Verdict:
    if isinstance(error, Throttled):
        return Verdict(id=task_id, verdict="throttled", retry_after=error.retry_after)
    return Verdict(id=task_id, verdict="failed", reason=f"{type(error).__name__}: {error}")
