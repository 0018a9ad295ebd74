"""Validation of a server's answers.

An answer that does not fit its request raises `ProtocolError`. A single invalid verdict becomes *failed*; the other
verdicts of the answer count.
"""

import math
import operator
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from leasekit.errors import ProtocolError
from leasekit.periodic import PeriodicInfo
from leasekit.task import (
    Claimed,
    GateInfo,
    KindInfo,
    NodeInfo,
    Redriven,
    Scheduled,
    Stats,
    Verdict,
    VerdictWord,
    WorkerInfo,
)
from leasekit.tokens import TokenInfo
from leasekit.wire import ClaimAnswer, ScheduleAnswer, VerdictsAnswer, decoder_of

T = TypeVar("T")

LONGEST_TTL = 365 * 86400.0  # the longest ttl that a task can ask for


def decode(raw: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the answer cannot be read: {error}") from error


def claimed(raw: bytes, *, kinds: Sequence[str], limit: int) -> Claimed:
    """Decode the answer to a claim; check the number of tasks, their kinds and their leases."""
    answer = decode(raw, _CLAIM)
    if len(answer.tasks) > limit:
        raise ProtocolError(f"the claim asked for {limit} tasks and was granted {len(answer.tasks)}")
    asked = frozenset(kinds)
    for task in answer.tasks:
        if task.kind not in asked:
            raise ProtocolError(f"the claim was granted a task of kind {task.kind!r}, which it did not ask for")
        if not (_is_ttl(task.ttl) and task.id and task.token):
            raise ProtocolError(f"task {task.id!r} was granted without a valid id, token or ttl")
    if not 0 <= answer.waited < math.inf:
        raise ProtocolError(f"the claim's waited is not a valid number of seconds: {answer.waited}")
    return Claimed(tasks=answer.tasks, waited=answer.waited, refused=answer.refused, draining=answer.draining)


def scheduled(raw: bytes, *, count: int) -> list[Scheduled]:
    """Decode the answer to scheduled tasks; check that it has one item for each task."""
    answer = decode(raw, _SCHEDULE)
    if len(answer.tasks) != count:
        raise ProtocolError(f"the server answered {len(answer.tasks)} tasks of the {count} that were scheduled")
    return answer.tasks


def verdicts(raw: bytes, *, ids: Sequence[str], words: frozenset[VerdictWord]) -> list[Verdict]:
    """Decode one verdict for each id, in order; a verdict whose word is not in `words` becomes *failed*."""
    try:
        found = decode(raw, _VERDICTS).verdicts
    except ProtocolError:
        # Perhaps only a word is new, or one item invalid: then the other verdicts still count.
        found = [_verdict_or_failed(verdict) for verdict in decode(raw, _RAW_VERDICTS).verdicts]
    if [verdict.id for verdict in found] != list(ids):
        raise ProtocolError(f"the {len(found)} verdicts have other ids than the {len(ids)} items that were sent")
    # A thousand verdicts have only a few distinct contents: each of these is validated once.
    odd = {gist for gist in set(map(_gist, found)) if not _is_possible(*gist, words)}
    return [_failed(v.id, v.verdict) if _gist(v) in odd else v for v in found] if odd else found


def ids(raw: bytes) -> list[str]:
    """Decode verdicts whose number and ids the server alone knows; return their ids."""
    return [verdict.id for verdict in decode(raw, _VERDICTS).verdicts]


def redriven(raw: bytes, *, ids: Sequence[str], dry_run: bool) -> Redriven:
    """Decode the answer to a redrive: one verdict for each of the ids, or for each task that matched."""
    answer = decode(raw, _REDRIVEN)
    if ids and [verdict.id for verdict in answer.tasks] != list(ids):
        raise ProtocolError(f"the {len(answer.tasks)} verdicts have other ids than the {len(ids)} that were sent")
    words = {"redrivable" if dry_run else "redriven", "gone", "failed"}
    tasks = [verdict if verdict.verdict in words else _failed(verdict.id, verdict.verdict) for verdict in answer.tasks]
    return Redriven(tasks=tasks, cursor=answer.cursor)


class _AnyVerdict(msgspec.Struct):
    """A verdict of a server that may know more words than this client."""

    id: str
    verdict: str


class _RawVerdicts(msgspec.Struct):
    verdicts: list[msgspec.Raw]


class WorkersPage(msgspec.Struct):
    """A page of the list of workers."""

    workers: list[WorkerInfo]
    cursor: str | None = None


class KindsPage(msgspec.Struct):
    """A page of the list of kinds."""

    kinds: list[KindInfo]
    cursor: str | None = None


class PeriodicsPage(msgspec.Struct):
    """A page of the list of periodic tasks."""

    periodic: list[PeriodicInfo]
    cursor: str | None = None


class Gates(msgspec.Struct):
    """The list of closed gates."""

    gates: list[GateInfo]


class Tokens(msgspec.Struct):
    """The list of access tokens."""

    tokens: list[TokenInfo]


class Nodes(msgspec.Struct):
    """The list of nodes."""

    nodes: list[NodeInfo]


class StatsPage(Stats, frozen=True, kw_only=True):
    """A page of the counts, by kind."""

    cursor: str | None = None


STATS = msgspec.json.Decoder(StatsPage)
GATES = msgspec.json.Decoder(Gates)
TOKENS = msgspec.json.Decoder(Tokens)
KINDS = msgspec.json.Decoder(KindsPage)
PERIODICS = decoder_of(PeriodicsPage)
NODES = msgspec.json.Decoder(Nodes)
WORKERS = msgspec.json.Decoder(WorkersPage)
_CLAIM = decoder_of(ClaimAnswer)
_REDRIVEN = msgspec.json.Decoder(Redriven)
_SCHEDULE = msgspec.json.Decoder(ScheduleAnswer)
_VERDICTS = decoder_of(VerdictsAnswer)
_RAW_VERDICTS = msgspec.json.Decoder(_RawVerdicts)
_VERDICT = decoder_of(Verdict)
_ANY_VERDICT = msgspec.json.Decoder(_AnyVerdict)


def _verdict_or_failed(raw: msgspec.Raw) -> Verdict:
    """Return a verdict; *failed* in place of an invalid one, so that the others of its batch still count."""
    try:
        return decode(raw, _VERDICT)
    except ProtocolError:
        strange = decode(raw, _ANY_VERDICT)
        return _failed(strange.id, strange.verdict)


def _failed(task_id: str, word: str) -> Verdict:
    return Verdict(id=task_id, verdict="failed", reason=f"the server's verdict is invalid: {word:.50}")


_gist = operator.attrgetter("verdict", "ttl", "retry_after")  # the parts of a verdict that are validated


def _is_possible(word: str, ttl: float | None, retry_after: float | None, words: frozenset[VerdictWord]) -> bool:
    return word in words and (ttl is None or _is_ttl(ttl)) and (retry_after is None or 0 <= retry_after < math.inf)


def _is_ttl(ttl: float) -> bool:
    return 0 < ttl <= LONGEST_TTL
