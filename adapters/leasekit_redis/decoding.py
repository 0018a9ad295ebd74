"""Decode the answers of the scripts into the values of the backend's interface."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from leasekit.errors import ProtocolError
from leasekit.task import HistoryEntry, Status, Task, TaskInfo, Verdict
from leasekit.wire import decode_value, decoder_of
from leasekit_redis.records import Granted, Past, Row, State, Stored, decode

Word = int | str | list[int]  # a verdict as the scripts encode it


class _Content(msgspec.Struct):
    """The fixed part of a task, with its payload as a plain value."""

    payload: Any
    collection: str | None = None
    traceparent: str | None = None


_content = decoder_of(_Content).decode
_stored = decoder_of(Stored).decode


_GRANTED = msgspec.msgpack.Decoder(Granted)


def task(raw: msgspec.Raw, kind: str) -> Task:
    granted: Granted = decode(raw, _GRANTED)
    try:
        content = _content(granted.stored)
        progress = decode_value(granted.progress)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the record of task {granted.id!r} in Redis cannot be read: {error}") from None
    return Task(
        id=granted.id,
        kind=kind,
        token=granted.token,
        ttl=granted.ttl / 1000,
        fence=granted.fence,
        attempt=granted.attempt,
        payload=content.payload,
        collection=content.collection,
        priority=granted.priority,
        progress=progress,
        traceparent=content.traceparent,
        max_runtime=None if granted.max_runtime is None else granted.max_runtime / 1000,
    )


def beaten(ids: Sequence[str], words: Sequence[Word]) -> list[Verdict]:
    """Return the verdicts on heartbeats: a word is a ttl, [ttl, cancel, left?], or why the lease is gone."""
    _check_count(ids, words)
    verdicts: list[Verdict] = []
    for task_id, word in zip(ids, words, strict=True):
        if isinstance(word, int):
            verdicts.append(Verdict(id=task_id, verdict="renewed", ttl=word / 1000))
        elif isinstance(word, list):
            ttl, cancel, *left = word
            remaining = left[0] / 1000 if left else None
            verdicts.append(
                Verdict(
                    id=task_id,
                    verdict="renewed",
                    ttl=ttl / 1000,
                    cancel_requested=cancel == 1,
                    remaining_runtime=remaining,
                )
            )
        else:
            verdicts.append(Verdict(id=task_id, verdict="gone", reason=word))
    return verdicts


def settled(ids: Sequence[str], words: Sequence[Word]) -> list[Verdict]:
    """Return the verdicts on results: a word is a number if the result counts, or says why the lease is gone."""
    _check_count(ids, words)
    return [
        Verdict(id=task_id, verdict="settled")
        if isinstance(word, int)
        else Verdict(id=task_id, verdict="gone", reason=str(word))
        for task_id, word in zip(ids, words, strict=True)
    ]


def cancelled(ids: Sequence[str], words: Sequence[Any]) -> list[Verdict]:
    _check_count(ids, words)
    return [
        Verdict(id=task_id, verdict=word)
        if word in ("cancelled", "cancel_requested")
        else Verdict(id=task_id, verdict="gone", reason=str(word))
        for task_id, word in zip(ids, words, strict=True)
    ]


def info(row: Row, kind: str) -> TaskInfo:
    """Decode everything about one task. Raises `ProtocolError` if it is damaged."""
    state, last = row.state, row.runs[-1] if row.runs else None
    try:
        stored = _stored(row.stored)
        return TaskInfo(
            id=row.id,
            kind=kind,
            status=Status(state.status),
            priority=state.priority,
            attempt=state.attempt,
            crashes=state.crashes,
            fence=state.fence,
            at=moment(state.due),
            collection=stored.collection,
            payload=decode_value(stored.payload),
            progress=_value(row.progress),
            result=_value(last.result if last else None),
            error=_value(last.error if last else None),
            worker=state.worker,
            lease_until=_moment(row.lease_until),
            cancel_requested=bool(row.cancel_requested),
            scheduled_at=moment(state.seq // 1000),  # numbers are microseconds
            claimed_at=_moment(state.claimed_at),
            started_at=_moment(state.started_at),
            heartbeat_at=_moment(state.heartbeat_at),
            progress_at=_moment(state.progress_at),
            ended_at=_moment(state.ended_at),
            history=[_entry(run) for run in row.runs],
            reason=state.reason or _waiting_reason(state),
            parent=state.parent,
            root=state.root or row.id,
        )
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the record of task {row.id!r} in Redis cannot be read: {error}") from None


def damage(task_id: str, kind: str, what: str) -> str:
    return (
        f"task {task_id!r} of kind {kind!r} is damaged in Redis ({what}): it is set aside and no longer runs; look at "
        f"its record (HGET …:{{{kind}}}:state), schedule it under another id if it must still be done, "
        f"and free its id with RedisBackend.discard({kind!r}, [{task_id!r}])"
    )


def moment(milliseconds: float) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _moment(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else moment(milliseconds)


def _waiting_reason(state: State) -> str | None:
    if not state.after or state.status != Status.NEW:
        return None
    others = f" and {len(state.after) - 1} more" if len(state.after) > 1 else ""
    return f'waits for "{state.after[0]}"{others} to succeed'


def _entry(run: Past) -> HistoryEntry:
    return HistoryEntry(
        fence=run.fence,
        attempt=run.attempt,
        outcome=run.outcome,
        at=moment(run.at),
        worker=run.worker,
        claimed_at=_moment(run.claimed_at),
        started_at=_moment(run.started_at),
        heartbeat_at=_moment(run.heartbeat_at),
        result=_value(run.result),
        error=_value(run.error),
    )


def _value(text: str | None) -> Any:
    return None if text is None else decode_value(text)


def _check_count(ids: Sequence[str], words: Sequence[Any]) -> None:
    if len(ids) != len(words):
        raise ProtocolError(f"Redis gave {len(words)} verdicts on {len(ids)} items")
