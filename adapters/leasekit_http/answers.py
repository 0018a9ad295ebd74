"""Answers of a server, judged before anyone believes them.

What is no answer to the question raises `ProtocolError`. A single verdict that makes no sense is *failed*: its
neighbours count.
"""

import math
import operator
from collections.abc import Sequence
from typing import TypedDict, TypeVar

import msgspec

from leasekit.errors import ProtocolError
from leasekit.task import Claimed, Scheduled, Verdict, VerdictWord
from leasekit.wire import ClaimAnswer, ScheduleAnswer, VerdictsAnswer

__all__ = ["STATS", "WORKERS", "claimed", "decode", "scheduled", "verdicts"]

T = TypeVar("T")

LONGEST_TTL = 365 * 86400.0  # the longest that a task can ask for


def decode(raw: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """The answer as what `decoder` is for."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the answer makes no sense: {error}") from error


def claimed(raw: bytes, *, kinds: Sequence[str], limit: int) -> Claimed:
    """The tasks that were granted: not more than were asked for, of no other kind, for a time that can be."""
    answer = decode(raw, _CLAIM)
    if len(answer.tasks) > limit:
        raise ProtocolError(f"{limit} tasks were asked for, {len(answer.tasks)} came")
    asked = frozenset(kinds)
    for task in answer.tasks:
        if task.kind not in asked:
            raise ProtocolError(f"a task of kind {task.kind!r} came, which was not asked for")
        if not (_is_ttl(task.ttl) and task.id and task.token):
            raise ProtocolError(f"task {task.id!r} came without a lease that can be kept")
    if not 0 <= answer.waited < math.inf:
        raise ProtocolError(f"the claim is said to have waited {answer.waited} s")
    return Claimed(tasks=answer.tasks, waited=answer.waited)


def scheduled(raw: bytes, *, count: int) -> list[Scheduled]:
    """One answer for each task, in order."""
    answer = decode(raw, _SCHEDULE)
    if len(answer.tasks) != count:
        raise ProtocolError(f"{count} tasks were scheduled, {len(answer.tasks)} answered")
    return answer.tasks


def verdicts(raw: bytes, *, ids: Sequence[str], words: frozenset[VerdictWord]) -> list[Verdict]:
    """One verdict for each id, in order; *failed* where the word is none of `words`."""
    try:
        found = decode(raw, _VERDICTS).verdicts
    except ProtocolError:
        # Perhaps only a word is new, or one item wrong: then the others still count.
        found = [_known(verdict) for verdict in decode(raw, _RAW_VERDICTS).verdicts]
    if [verdict.id for verdict in found] != list(ids):
        raise ProtocolError(f"the {len(found)} verdicts are not those on the {len(ids)} items that were sent")
    # A thousand verdicts say a handful of things: each of these is judged once.
    odd = {gist for gist in set(map(_gist, found)) if not _is_possible(*gist, words)}
    return [_failed(v.id, v.verdict) if _gist(v) in odd else v for v in found] if odd else found


class _AnyVerdict(msgspec.Struct):
    """A verdict of a server that knows more words than we do."""

    id: str
    verdict: str


class _RawVerdicts(msgspec.Struct):
    verdicts: list[msgspec.Raw]


class _Worker(TypedDict):
    name: str
    last_seen: str | None
    running: int


class _WorkersAnswer(msgspec.Struct):
    workers: list[_Worker]


class _StatsAnswer(msgspec.Struct):
    kinds: dict[str, dict[str, int]]


STATS = msgspec.json.Decoder(_StatsAnswer)
WORKERS = msgspec.json.Decoder(_WorkersAnswer)
_CLAIM = msgspec.json.Decoder(ClaimAnswer)
_SCHEDULE = msgspec.json.Decoder(ScheduleAnswer)
_VERDICTS = msgspec.json.Decoder(VerdictsAnswer)
_RAW_VERDICTS = msgspec.json.Decoder(_RawVerdicts)
_VERDICT = msgspec.json.Decoder(Verdict)
_ANY_VERDICT = msgspec.json.Decoder(_AnyVerdict)


def _known(raw: msgspec.Raw) -> Verdict:
    try:
        return decode(raw, _VERDICT)
    except ProtocolError:
        strange = decode(raw, _ANY_VERDICT)
        return _failed(strange.id, strange.verdict)


def _failed(task_id: str, word: str) -> Verdict:
    return Verdict(id=task_id, verdict="failed", reason=f"the server's verdict makes no sense: {word:.50}")


_gist = operator.attrgetter("verdict", "ttl", "retry_after")  # what is to be judged of a verdict


def _is_possible(word: str, ttl: float | None, retry_after: float | None, words: frozenset[VerdictWord]) -> bool:
    return word in words and (ttl is None or _is_ttl(ttl)) and (retry_after is None or 0 <= retry_after < math.inf)


def _is_ttl(ttl: float) -> bool:
    return 0 < ttl <= LONGEST_TTL
