"""The record of a client: the requests that it sent, with their answers, and the signs of life of its runs.

All instants are those of one monotonic clock, in seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Lease(NamedTuple):
    """A task as a claim granted it."""

    task_id: str
    token: str
    attempt: int
    ttl: float


@dataclass(kw_only=True)
class Exchange:
    """A request and its answer, if the client could read one."""

    at: float
    """When the request had arrived."""
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: dict[str, Any]
    """The JSON object; empty if there was none."""
    fault: str | None = None
    """What was done to this exchange; None: nothing."""
    is_readable: bool = True
    """Whether the answer that arrived says what the server did. False: lost, or not of this server."""
    answered_at: float | None = None
    status: int | None = None
    """The status that the client got; None: the connection was cut."""
    retry_after: float | None = None
    answer: dict[str, Any] = field(default_factory=dict[str, Any])
    """The JSON object that the server answered, also if the client did not get it."""

    def granted(self) -> Iterator[Lease]:
        """Yield the leases that this answer grants, if it answers a claim."""
        if self.path == "/v1/claims" and self.body.get("limit", 1) != 0:
            for task in self.answer.get("tasks", ()):
                yield Lease(task["id"], task["token"], task["attempt"], task["ttl"])

    def items(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield each item of the batch `name` with its verdict; None where there was no answer."""
        verdicts: list[Any] = self.answer.get("verdicts") or []
        for index, item in enumerate(self.body.get(name, ())):
            yield item, verdicts[index] if index < len(verdicts) else None


class Sign(NamedTuple):
    """A request by which a running handler shows that it runs."""

    at: float
    task_id: str
    attempt: int


@dataclass
class Record:
    """The requests of a client in one scenario, the signs of its runs, and how its program ended."""

    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    signs: list[Sign] = field(default_factory=list[Sign])
    exit_code: int | None = None
    """The exit code of the client's program; None: it had to be killed."""

    def to(self, path: str) -> Iterator[Exchange]:
        """Yield the exchanges with this path."""
        return (exchange for exchange in self.exchanges if exchange.path == path)
