"""What one service of Amazon's says of itself, so that `AwsBackend` can keep its leases: values, no input or output."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from leasekit.backend import Traits
from leasekit.task import Beat, Settlement, Task
from leasekit_aws.clients import Call

__all__ = ["Service"]


class Service(Protocol):
    """One service: how its tasks are asked for, kept and ended, one at a time."""

    @property
    def traits(self) -> Traits: ...

    @property
    def ttl(self) -> float | None:
        """What every lease is granted; None where only each task knows."""
        ...

    @property
    def polls(self) -> Mapping[str | None, Call]:
        """The long polls that bring tasks, by the kind that each brings; None: of any kind."""
        ...

    def read(self, kind: str | None, answer: Mapping[str, Any]) -> Task | None:
        """The task in the answer to a poll, None where it brought none. Raises `ProtocolError`."""
        ...

    def beat(self, beat: Beat, *, item: int) -> Call:
        """How a lease is renewed. Raises `Refused` with the `item` where its progress cannot be sent."""
        ...

    def order(self, answer: Mapping[str, Any]) -> Literal["cancel"] | None:
        """What a heartbeat's answer asks for. Raises `ProtocolError` where it is none."""
        ...

    def gone(self, code: str, message: str) -> str | None:
        """Why a lease is over, where this error of a heartbeat or an end says that it is: the verdict's reason."""
        ...

    def settle(self, settlement: Settlement, *, item: int) -> Call:
        """How a lease is ended. Raises `Refused` with the `item` where its result cannot be sent."""
        ...
