"""Queues by name: their URLs are looked up once and then remembered; their dead-letter queues may change."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from leasekit.errors import ProtocolError, Refused
from leasekit_sqs.address import Address
from leasekit_sqs.calls import Answer, Calls

_COUNTS = {
    "new": "ApproximateNumberOfMessagesDelayed",
    "enqueued": "ApproximateNumberOfMessages",
    "processing": "ApproximateNumberOfMessagesNotVisible",
}


class Queues:
    """The queues of one connection."""

    def __init__(self, calls: Calls, address: Address) -> None:
        self._calls = calls
        self._address = address
        self._urls: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._dead_letter_urls: dict[str, str] = {}  # by ARN

    async def of(self, kind: str) -> str:
        """Return the URL of the queue for tasks of this kind. Raises `Refused` if it does not exist."""
        name = self._address.queue_of(kind)
        if name not in self._urls:
            self._urls[name] = await self._find(name, self._address.account)
        if self._address.is_template:
            self._kinds[kind] = name
        return self._urls[name]

    async def known(self) -> dict[str, str]:
        """Return the URLs of queues by kind; for a template, of the kinds that this connection has used."""
        if not self._address.is_template:
            return {self._address.kind or self._address.queue: await self.of("")}
        return {kind: self._urls[name] for kind, name in self._kinds.items()}

    async def dead_letter_queue(self, url: str) -> str | None:
        """Return the URL of the dead-letter queue that the queue at `url` names now; None if it names none."""
        arn = await self.dead_letter_queue_arn(url)
        if arn is None:
            return None
        if arn not in self._dead_letter_urls:
            *_, account, name = arn.split(":")
            self._dead_letter_urls[arn] = await self._find(name, account)
        return self._dead_letter_urls[arn]

    async def dead_letter_queue_arn(self, url: str) -> str | None:
        policy = (await self._attributes(url, ["RedrivePolicy"])).get("RedrivePolicy")
        if policy is None:
            return None
        try:
            arn: object = json.loads(policy)["deadLetterTargetArn"]
        except (ValueError, KeyError, TypeError):
            arn = None
        if not isinstance(arn, str) or arn.count(":") != 5:
            raise ProtocolError("the RedrivePolicy of this queue names no dead-letter queue")
        return arn

    async def arn(self, url: str) -> str:
        arn = (await self._attributes(url, ["QueueArn"])).get("QueueArn")
        if not isinstance(arn, str):
            raise ProtocolError("SQS has answered without the ARN of the queue")
        return arn

    async def counts(self, url: str) -> dict[str, int]:
        """Count the messages of a queue by status; SQS counts roughly."""
        found = await self._attributes(url, list(_COUNTS.values()))
        return {status: _number(found.get(name)) for status, name in _COUNTS.items()}

    async def visibility_timeout(self, url: str) -> int:
        """Return the seconds for which a queue hides a message after a receive that does not say for how long."""
        return _number((await self._attributes(url, ["VisibilityTimeout"])).get("VisibilityTimeout"))

    async def _attributes(self, url: str, names: Sequence[str]) -> Mapping[str, Any]:
        answer = await self._calls("get_queue_attributes", QueueUrl=url, AttributeNames=names)
        found: object = answer.get("Attributes")
        return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}

    async def _find(self, name: str, account: str | None) -> str:
        owner = {"QueueOwnerAWSAccountId": account} if account else {}
        try:
            return url_in(await self._calls("get_queue_url", QueueName=name, **owner), name)
        except Refused as error:
            raise Refused(f"queue {name!r}: {error}") from error


def url_in(answer: Answer, name: str) -> str:
    """Return the URL of the queue `name` in an answer. Raises `ProtocolError` if there is none, or another queue's."""
    url: object = answer.get("QueueUrl")
    if not isinstance(url, str) or url.rpartition("/")[2] != name:
        raise ProtocolError(f"SQS has answered without the URL of queue {name!r}")
    return url


def _number(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else 0
