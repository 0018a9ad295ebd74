"""A backend with faults on demand: those of a network, and of a service under load.

    faulty = Faulty(backend)
    faulty.script("beat", faults.lose_answer, faults.ok, faults.delay(3))   # the next three heartbeats
    faulty.always("claim", faults.refuse)                                   # until another rule, or clear()
    faulty.sometimes("*", {faults.drop: 0.1, faults.repeat: 0.05})          # all kinds without a rule of their own
    call = await faulty.next("beat")                                        # the keeper has sent a heartbeat
    await call.over()                                                       # ... and has its answer
    assert faulty.calls["beat"] == 1 and faulty.fired["lose_answer"] == 1

A fault is a value: a name, and a coroutine that gets the `Call` and answers it. Write your own with `Fault`:

    async def twice_as_slow(call):
        await call.sleep(2)
        return await call.send()

    faulty.script("settle", Fault("twice_as_slow", twice_as_slow))
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import structs

from leasekit.errors import BackendError, ProtocolError, Throttled, Unavailable
from leasekit.task import Verdict, VerdictWord
from leasekit.testing._faulty_backend import Call, Fault, Faulty, Gate, ok

__all__ = [
    "Call", "Fault", "Faulty", "Gate", "delay", "delay_answer", "drop", "fail_items", "garble", "hang", "late",
    "lengthen", "lose_answer", "misspell", "ok", "refuse", "repeat", "replay", "shorten", "shuffle", "steal",
    "throttle", "throttle_items",
]  # fmt: skip

_WITH_ITEMS = frozenset({"beat", "settle"})
_WITH_VERDICTS = frozenset({"beat", "settle", "cancel"})


def _failing(
    error: type[BackendError], what: str, *, after: Callable[[Call], Awaitable[Any]] | None = None
) -> Callable[[Call], Awaitable[Any]]:
    async def act(call: Call) -> Any:
        if after is not None:
            await after(call)
        raise error(f"{call.kind}: {what}")

    return act


refuse = Fault("refuse", _failing(Unavailable, "the connection was refused"))
"""The connection is refused: `Unavailable` at once, never applied."""

drop = Fault("drop", _failing(Unavailable, "the request was lost"))
"""The request is lost on its way: `Unavailable`, never applied."""

lose_answer = Fault("lose_answer", _failing(Unavailable, "the answer was lost", after=Call.send))
"""The request is applied, but its answer is lost: `Unavailable`."""

hang = Fault("hang", _failing(Unavailable, "the connection was dead", after=lambda call: call.faulty.hanging.passed()))
"""The call hangs until the caller gives up, or until `faulty.release()`: then `Unavailable`, never applied."""


def delay(until: float | Gate) -> Fault:
    """Delay a request by so many seconds, or until a gate opens; if the caller gives up before, it is never applied."""

    async def act(call: Call) -> Any:
        await call.sleep(until)
        return await call.send()

    return Fault("delay", act)


def delay_answer(until: float | Gate) -> Fault:
    """Apply the request at once; its answer comes so many seconds later, or when a gate opens."""

    async def act(call: Call) -> Any:
        answer = await call.send()
        await call.sleep(until)
        return answer

    return Fault("delay_answer", act)


def late(until: float | Gate) -> Fault:
    """Raise `Unavailable` at once, but apply the request so many seconds later, or when a gate opens."""

    async def act(call: Call) -> Any:
        call.send_later(until)
        raise Unavailable(f"{call.kind}: no answer in time")

    return Fault("late", act)


async def _send_twice(call: Call) -> Any:
    await call.send()
    return await call.send()


repeat = Fault("repeat", _send_twice)
"""The request is applied twice; the caller gets the second answer."""


def replay(kind: str | None = None, *, back: int = 1) -> Fault:
    """Let the call through, then send an earlier request again, and ignore its answer.

    The earlier request is the `back`-th last of `kind` (None: the call's own kind) before the call, if there is one.
    """

    async def act(call: Call) -> Any:
        before = [c for c in call.faulty.log if c is not call and c.kind == (kind or call.kind)]
        answer = await call.send()
        if len(before) >= back:
            call.faulty.perform(before[-back].send)
        return answer

    return Fault("replay", act)


async def _steal_then_send(call: Call) -> Any:
    for item in call.items:
        call.faulty.backend.steal(item.id, item.token)  # type: ignore[attr-defined] # `needs` has checked it
    return await call.send()


steal = Fault("steal", _steal_then_send, _WITH_ITEMS, needs="steal")
"""Before the call is applied, its leases expire and another worker is granted the tasks: all verdicts are *gone*."""


def throttle(retry_after: float | None = None) -> Fault:
    """Raise `Throttled` for the whole call, never applied."""

    async def act(call: Call) -> Any:
        raise Throttled(f"{call.kind}: too many requests", retry_after=retry_after)

    return Fault("throttle", act)


def throttle_items(which: float | Sequence[int] = 0.5, *, retry_after: float | None = None) -> Fault:
    """Answer *throttled* for a share of the items, or for the items at these positions; the others go through."""
    return _item_fault("throttle_items", "throttled", which, retry_after=retry_after)


def fail_items(which: float | Sequence[int] = 0.5, *, reason: str = "scripted") -> Fault:
    """Answer *failed* for a share of the items, or for the items at these positions; the others go through."""
    return _item_fault("fail_items", "failed", which, reason=reason)


def _item_fault(name: str, word: VerdictWord, which: float | Sequence[int], **verdict_fields: Any) -> Fault:
    async def act(call: Call) -> Any:
        items = call.items
        spoilt = [
            call.faulty.random.random() < which if isinstance(which, int | float) else position in which
            for position in range(len(items))
        ]
        answers = iter(await call.send([item for item, bad in zip(items, spoilt, strict=True) if not bad]))
        return [
            Verdict(id=item.id, verdict=word, **verdict_fields) if bad else next(answers)
            for item, bad in zip(items, spoilt, strict=True)
        ]

    return Fault(name, act, _WITH_ITEMS)


def _with_verdicts(change: Callable[[list[Verdict]], list[Verdict]]) -> Callable[[Call], Awaitable[Any]]:
    async def act(call: Call) -> Any:
        return change(await call.send())

    return act


def _misspelt(verdicts: list[Verdict]) -> list[Verdict]:
    return [structs.replace(verdict, verdict="perhaps") for verdict in verdicts]


garble = Fault("garble", _failing(ProtocolError, "the answer is not JSON", after=Call.send))
"""The request is applied, but its answer is unreadable: `ProtocolError`."""

shorten = Fault("shorten", _with_verdicts(lambda verdicts: verdicts[:-1]), _WITH_VERDICTS)
"""The last verdict is missing."""

lengthen = Fault("lengthen", _with_verdicts(lambda verdicts: [*verdicts, *verdicts[-1:]]), _WITH_VERDICTS)
"""The last verdict comes twice."""

shuffle = Fault("shuffle", _with_verdicts(lambda verdicts: [*verdicts[1:], *verdicts[:1]]), _WITH_VERDICTS)
"""The verdicts come in another order: the first comes last."""

misspell = Fault("misspell", _with_verdicts(_misspelt), _WITH_VERDICTS)
"""Every verdict is a word that the protocol does not have."""
