"""Dead letters: a look at the dead-letter queue of a kind, and its moving and emptying as a whole.

SQS cannot select messages, nor look one up: a call is for a kind, and what else is asked for is refused.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from leasekit.config import check_number
from leasekit.errors import ProtocolError, Refused
from leasekit.task import Page, Purged, Redriven, Status, TaskInfo
from leasekit_aws.values import payload
from leasekit_sqs.calls import Calls, refusing
from leasekit_sqs.messages import Received, error_of, sent_at
from leasekit_sqs.queues import Queues

_FASTEST = 500  # messages a second, for SQS
_IN_ONE_CALL = 10  # messages, for SQS
_WAIT = 1  # seconds: with any wait SQS looks at all of its servers


class DeadLetterQueues:
    """The dead-letter queues of one connection."""

    def __init__(self, calls: Calls, queues: Queues) -> None:
        self._calls = calls
        self._queues = queues

    async def sample(self, *, cursor: str | None, limit: int, **wanted: Any) -> Page:
        """Return some dead letters of a kind, which stay where they are, and are not hidden."""
        kind = _kind(wanted, "list")
        if cursor is not None:
            raise Refused("SQS lists a sample of a dead-letter queue, which has no pages: leave out the cursor")
        async with refusing():
            source = await self._of(kind)
            found: dict[str, TaskInfo] = {}
            while len(found) < limit:
                before = len(found)
                for message in await self._look(source):
                    if (info := _info(message, kind)) is not None:
                        found.setdefault(info.id, info)
                if len(found) == before:
                    break
        return Page(tasks=list(found.values())[:limit], cursor=None)

    async def _look(self, url: str) -> Sequence[Mapping[str, Any]]:
        answer = await self._calls(
            "receive_message",
            QueueUrl=url,
            MaxNumberOfMessages=_IN_ONE_CALL,
            VisibilityTimeout=0,
            WaitTimeSeconds=_WAIT,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        )
        found: object = answer.get("Messages")
        messages = cast("list[object]", found) if isinstance(found, list) else []
        return [cast("Mapping[str, Any]", message) for message in messages if isinstance(message, Mapping)]

    async def redrive(
        self, task_ids: Sequence[str], *, rate: int | None, dry_run: bool = False, **wanted: Any
    ) -> Redriven:
        """Have SQS move all dead letters of a kind back into its queue, or say about how many they are (`dry_run`)."""
        kind = _kind(wanted, "redrive", task_ids)
        check_number("rate", rate, unit="", least=1, most=_FASTEST, whole=True, or_none=True)
        async with refusing():
            about = await self._count(await self._of(kind))
            if dry_run:
                return Redriven(about=about)
            url = await self._queues.of(kind or "")
            # With a destination, because for SQS the dead letters that leasekit has sent have no source queue.
            more = {} if rate is None else {"MaxNumberOfMessagesPerSecond": rate}
            arns = {"SourceArn": await self._queues.dead_letter_queue_arn(url)}
            arns["DestinationArn"] = await self._queues.arn(url)
            answer = await self._calls("start_message_move_task", **arns, **more)
        return Redriven(moving=str(answer.get("TaskHandle", "")), about=about)

    async def purge(self, task_ids: Sequence[str], *, dry_run: bool = False, **wanted: Any) -> Purged:
        """Have SQS remove all dead letters of a kind, or say about how many they are (`dry_run`)."""
        kind = _kind(wanted, "purge", task_ids)
        async with refusing():
            source = await self._of(kind)
            about = await self._count(source)
            if about and not dry_run:
                await self._calls("purge_queue", QueueUrl=source)
        return Purged(kinds={kind or source.rpartition("/")[2]: {Status.DEAD.value: about}} if about else {})

    async def _of(self, kind: str | None) -> str:
        url = await self._queues.dead_letter_queue(await self._queues.of(kind or ""))
        if url is None:
            raise Refused("this queue has no RedrivePolicy, so it has no dead letters")
        return url

    async def _count(self, url: str) -> int:
        return sum((await self._queues.counts(url)).values())


def _kind(wanted: Mapping[str, Any], act: str, task_ids: Sequence[str] = ()) -> str | None:
    """Return the kind. Raises `Refused` if anything else selects tasks."""
    others = {name for name, value in wanted.items() if value} - {"kind", "redrive_id", "limit"}
    if wanted.get("status") == Status.DEAD:
        others -= {"status"}
    if task_ids or others:
        raise Refused(f"SQS cannot select messages of a dead-letter queue: {act} a kind, alone")
    kind: str | None = wanted.get("kind")
    return kind


def _info(message: Mapping[str, Any], kind: str | None) -> TaskInfo | None:
    """Return a dead letter as a task; None: it is malformed."""
    try:
        received = Received.of(message)
        body = payload(message.get("Body"))
    except ProtocolError:
        return None
    at = sent_at(message)
    return TaskInfo(
        id=received.id,
        kind=received.kind or kind or "",
        status=Status.DEAD,
        priority=2,
        attempt=received.attempt or 0,
        crashes=0,
        fence=0,
        at=datetime.fromtimestamp(0 if at is None else at, UTC),
        payload=body,
        error=error_of(message),
        scheduled_at=None if at is None else datetime.fromtimestamp(at, UTC),
    )
