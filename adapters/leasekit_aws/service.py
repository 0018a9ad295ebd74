"""`Service`: what `AwsBackend` needs to know about an AWS service. Values only, without input or output."""

from collections.abc import Mapping
from typing import Any, Protocol

from leasekit.backend import Capabilities
from leasekit.task import Beat, Settlement, Task
from leasekit_aws.boto_clients import Call


class Service(Protocol):
    """An AWS service: the calls that poll for, renew and settle its tasks, one task at a time."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def ttl(self) -> float | None:
        """The ttl of every lease; None if each task has its own."""
        ...

    @property
    def polls(self) -> Mapping[str | None, Call]:
        """The long polls that bring tasks, by the kind that each brings; None stands for any kind."""
        ...

    def read(self, kind: str | None, answer: Mapping[str, Any]) -> Task | None:
        """Return the task in the answer to a poll, None if the answer has none. Raises `ProtocolError`."""
        ...

    def beat(self, beat: Beat, *, item: int) -> Call:
        """Return the call that renews a lease. Raises `Refused` with the `item` if its progress cannot be sent."""
        ...

    def cancel_requested(self, answer: Mapping[str, Any]) -> bool:
        """Return whether a heartbeat's answer requests a cancel. Raises `ProtocolError` if it is malformed."""
        ...

    def gone(self, code: str, message: str) -> str | None:
        """Return why the lease is gone if this error of a heartbeat or settlement says so, else None."""
        ...

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """Return the call that settles a lease. Raises `Refused` with the `item` if its result cannot be sent."""
        ...
