"""Scenarios: tasks for a client, and what is disturbed while the client runs them."""

from dataclasses import dataclass
from typing import Any

from leasekit.server.conformance.recorder import Fault, busy, page, verdicts
from leasekit.task import Status
from leasekit.wire import REQUEST_HEADER

KIND = "conformance"
TTL = 4.0  # seconds of each lease


@dataclass(frozen=True, kw_only=True)
class Job:
    """A task for the client's handler: it runs for `seconds`, and then ends as `outcome` says."""

    id: str
    seconds: float = 0.2
    outcome: str = "success"
    ends_as: Status | None = Status.SUCCESS
    """The status in which the scenario is over; None: any final status."""

    def payload(self, sign: str) -> dict[str, Any]:
        """Return the payload; `sign` is the URL that the handler requests while it runs."""
        return {"seconds": self.seconds, "outcome": self.outcome, "result": f"result of {self.id}", "sign": sign}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A check of a client."""

    name: str
    about: str
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...] = ()
    cancel: str | None = None
    """The id of a task whose cancel is requested once it runs."""
    stop: bool = False
    """Whether the program gets SIGTERM as soon as a handler runs."""
    attempts: int = 1
    """How many attempts a task may take."""
    within: float = 40.0
    """Seconds until the tasks must have ended."""


def _with_unknown_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer to a batch with a field more in itself and in each of its items."""
    known = {name: [_more(item) for item in value] if _is_batch(name) else value for name, value in answer.items()}
    return _more(known)


def _is_batch(name: str) -> bool:
    return name in {"tasks", "verdicts"}


def _more(value: dict[str, Any]) -> dict[str, Any]:
    return value | {"a_new_field": {"x": [1]}}


_CLAIMS, _BEATS, _RESULTS = "/v1/claims", "/v1/heartbeats", "/v1/results"
_ALL = (_CLAIMS, _BEATS, _RESULTS)
_ALWAYS = 10**9
_GONE = {"verdict": "gone", "reason": "expired"}

SCENARIOS = (
    Scenario(
        name="plain",
        about="Nothing is disturbed: a task succeeds, and one fails for good.",
        jobs=(Job(id="good"), Job(id="bad", outcome="fatal", ends_as=Status.FATAL_FAILURE)),
    ),
    Scenario(
        name="long",
        about="A run takes two and a half times as long as its lease.",
        jobs=(Job(id="long", seconds=2.5 * TTL),),
    ),
    Scenario(
        name="many",
        about="A hundred short tasks.",
        jobs=tuple(Job(id=f"task-{number}", seconds=0.02) for number in range(100)),
    ),
    Scenario(
        name="lost-answers",
        about="The answers to a claim, two heartbeats and a result are lost; the server has handled the requests.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=(
            Fault(name="lost answer", path=_CLAIMS, only_grants=True, applied=True),
            Fault(name="lost answer", path=_BEATS, times=2, applied=True),
            Fault(name="lost answer", path=_RESULTS, applied=True),
        ),
    ),
    Scenario(
        name="lost-requests",
        about="The second heartbeat and the first result are lost before the server has seen them.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=(
            Fault(name="lost request", path=_BEATS, skip=1),
            Fault(name="lost request", path=_RESULTS),
        ),
    ),
    Scenario(
        name="proxy",
        about="A proxy answers some requests with its own pages: 502, 404 and 422.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=tuple(
            Fault(name=f"{status} of a proxy", path=path, skip=skip, answer=page(status))
            for path in _ALL
            for skip, status in enumerate((502, 404, 422))
            if not (path == _BEATS and skip == 2)
        ),
    ),
    Scenario(
        name="busy",
        about="The server has no capacity for a while, and says for how long.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=tuple(Fault(name="busy", path=path, answer=busy(1)) for path in _ALL),
    ),
    Scenario(
        name="unknown-fields",
        about="Answers have fields that the client does not know.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=(
            Fault(
                name="unknown fields", path="", times=_ALWAYS, applied=True, readable=True, edit=_with_unknown_fields
            ),
        ),
    ),
    Scenario(
        name="gone",
        about="The verdict on the second heartbeat is gone: the run must stop; the task runs again later.",
        jobs=(Job(id="task", seconds=1.5 * TTL),),
        faults=(Fault(name="gone", path=_BEATS, skip=1, readable=True, answer=verdicts(_GONE)),),
        attempts=2,
    ),
    Scenario(
        name="outage",
        about="From the second heartbeat on, none arrives for as long as a lease lasts.",
        jobs=(Job(id="task", seconds=2.5 * TTL),),
        faults=(Fault(name="outage", path=_BEATS, skip=1, times=_ALWAYS, seconds=TTL),),
        attempts=2,
    ),
    Scenario(
        name="stale-answers",
        about="Heartbeats get the answers of other requests: they carry another Leasekit-Request header.",
        jobs=(Job(id="task", seconds=2.5 * TTL),),
        faults=(
            Fault(
                name="stale answer",
                path=_BEATS,
                skip=1,
                times=_ALWAYS,
                seconds=TTL,
                only_named=True,
                answer=verdicts({"verdict": "renewed", "ttl": TTL}, {REQUEST_HEADER: "another"}),
            ),
        ),
        attempts=2,
    ),
    Scenario(
        name="cancel",
        about="A cancel is requested while the task runs.",
        jobs=(Job(id="task", seconds=30.0, ends_as=Status.CANCELLED),),
        cancel="task",
    ),
    Scenario(
        name="stop",
        about="The program gets SIGTERM while a task runs: nothing stays leased when it has ended.",
        jobs=(Job(id="task", seconds=2.0, ends_as=None),),
        stop=True,
    ),
)
