"""The machine behind `leasekit.testing.faults`: a backend that chooses a fault for each call."""

import asyncio
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Self, cast

from leasekit._forwarding import ForwardingScheduler
from leasekit.backend import Backend
from leasekit.errors import BackendError
from leasekit.testing._notify import Notifier

CALLS = frozenset({
    "claim", "beat", "settle", "schedule", "get", "cancel", "redrive", "purge", "stats", "list_tasks", "list_dead",
})  # fmt: skip


class Gate:
    """A gate that a test opens: shut until `open()`, which any thread may call; then open for good."""

    def __init__(self) -> None:
        self.is_open = False
        """True once `open()` was called."""
        self._bell = Notifier()

    def open(self) -> None:
        """Let all calls pass that wait, and all that come later."""
        self.is_open = True
        self._bell.ring()

    async def passed(self) -> None:
        """Return once the gate is open."""
        await self._bell.until(lambda: self.is_open)


class Call:
    """A call of the keeper: its arguments, the fault that met it, and, once it is over, its answer or error."""

    def __init__(self, faulty: "Faulty", kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kind = kind
        """The method that was called."""
        self.args = args
        """The positional arguments; a batch is the first, and a copy."""
        self.options = options
        """The keyword arguments."""
        self.fault = "ok"
        """The name of the fault that met the call."""
        self.answer: Any = None
        """The answer that the caller got."""
        self.error: BaseException | None = None
        """The exception that the caller got."""
        self.is_over = False
        """True once the caller has its answer, its error, or has given up."""
        self.faulty = faulty
        """The backend that was called."""

    @property
    def items(self) -> list[Any]:
        """The batch: beats, settlements, tasks, ids, or the kinds of a claim."""
        return list(self.args[0]) if self.args else []

    async def send(self, items: Sequence[Any] | None = None) -> Any:
        """Send the request to the service, once for each call of `send`; `items` replaces the call's own batch."""
        args = self.args if items is None else (items, *self.args[1:])
        return await getattr(self.faulty.backend, self.kind)(*args, **self.options)

    async def sleep(self, until: "float | Gate") -> None:
        """Wait for `until`: so many seconds, or a gate."""
        await (until.passed() if isinstance(until, Gate) else self.faulty.sleep(until))

    def send_later(self, until: "float | Gate") -> None:
        """Send the request to the service after so many seconds, or a gate, when the caller no longer waits."""

        async def send() -> None:
            await self.sleep(until)
            await self.send()

        self.faulty.perform(send)

    async def over(self) -> None:
        """Return once the caller has its answer, its error, or has given up."""
        await self.faulty.until(lambda: self.is_over)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can meet a call."""

    name: str
    """The name under which `Faulty.fired` counts the fault."""
    act: Callable[[Call], Awaitable[Any]]
    """Answers the call, or raises."""
    only: frozenset[str] = CALLS
    """The kinds of calls that the fault can meet."""
    needs: str | None = None
    """A method that the wrapped backend must have; None: any backend will do."""


ok = Fault("ok", Call.send)
"""The call goes through."""


class Faulty(ForwardingScheduler):
    """A backend (and scheduler, where the wrapped one is) whose calls meet faults.

    Each call meets the next fault scripted for its kind, else the rule of `always` or `sometimes` for its kind, else
    the rule for "*", else no fault. Rules may be set and facts awaited from any thread. `random` makes all random
    choices: the same seed and order of calls repeat a run. `sleep` waits where a fault lasts for a time.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        random: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.backend = backend
        """The wrapped backend."""
        self.capabilities = backend.capabilities
        """The capabilities of the wrapped backend."""
        self.random = random or Random(0)  # noqa: S311 - chance, not secrets
        """The random generator for all choices of faults."""
        self.sleep = sleep
        """The function with which faults wait."""
        self.calls: Counter[str] = Counter()
        """How many calls of each kind were made."""
        self.fired: Counter[str] = Counter()
        """How often each fault met a call, by the fault's name; `ok` too."""
        self.log: deque[Call] = deque(maxlen=10_000)
        """The last calls, oldest first."""
        self._scripts: dict[str, deque[Fault]] = defaultdict(deque)
        self._rules: dict[str, list[tuple[Fault, float]]] = {}
        self._unseen: dict[str, deque[Call]] = defaultdict(lambda: deque(maxlen=10_000))
        self.hanging = Gate()
        """The gate for which the calls wait that hang now."""
        self._bell = Notifier()
        self._lock = threading.Lock()
        self._late: set[asyncio.Task[None]] = set()
        missing = dict.fromkeys(call for call in CALLS if not hasattr(backend, call))
        if missing:
            # A method that is None is no method: isinstance(faulty, Scheduler) is as for the wrapped backend.
            own = type(self)
            self.__class__ = cast("type[Self]", type(own.__name__, (own,), missing))

    def script(self, kind: str, *faults: Fault) -> None:
        """Script the next calls of this kind: each meets one fault, after the faults that were scripted before."""
        self._check_rule(kind, faults)
        with self._lock:
            self._scripts[kind].extend(faults)

    def always(self, kind: str, fault: Fault) -> None:
        """Let every unscripted call of this kind meet this fault; "*": of every kind without a rule of its own."""
        self.sometimes(kind, {fault: 1.0})

    def sometimes(self, kind: str, chances: Mapping[Fault, float]) -> None:
        """Let unscripted calls of this kind meet these faults, each with its probability, else no fault."""
        self._check_rule(kind, chances)
        if min(chances.values(), default=0.0) < 0 or sum(chances.values()) > 1 + 1e-9:
            raise ValueError(f"chances of {kind!r} are {list(chances.values())}: give 0 to 1 each, at most 1 in all")
        with self._lock:
            self._rules[kind] = list(chances.items())

    def clear(self) -> None:
        """Forget all rules and release the calls that hang: from now on all calls go through."""
        with self._lock:
            self._scripts.clear()
            self._rules.clear()
        self.release()

    def release(self) -> None:
        """End the calls that hang, with their failure."""
        with self._lock:
            gate, self.hanging = self.hanging, Gate()
        gate.open()

    def _check_rule(self, kind: str, faults: Sequence[Fault] | Mapping[Fault, float]) -> None:
        if kind not in CALLS and kind != "*":
            raise ValueError(_unknown_call_message(kind))
        for fault in faults:
            if kind != "*" and kind not in fault.only:
                raise ValueError(f"{fault.name!r} cannot meet a {kind}: only {', '.join(sorted(fault.only))}")
            if fault.needs is not None and not hasattr(self.backend, fault.needs):
                raise ValueError(f"{fault.name!r} needs a backend with {fault.needs}(), as memory:// is")

    async def next(self, kind: str) -> Call:
        """Wait for the first call of this kind that `next` has not returned yet; the call may not be over."""
        if kind not in CALLS:
            raise ValueError(_unknown_call_message(kind))
        unseen = self._unseen[kind]
        await self.until(lambda: bool(unseen))
        return unseen.popleft()

    async def until(self, fact: Callable[[], bool]) -> None:
        """Return once `fact()` is true, which is checked when a call is made and when a call ends."""
        await self._bell.until(fact)

    async def again(self, call: Call) -> Any:
        """Send an earlier call's request once more, as a network does that delivers twice, and return the answer."""
        return await call.send()

    async def aclose(self) -> None:
        """Close the wrapped backend; calls that are late or hang are given up."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        self.release()
        await self.backend.aclose()

    async def _call(self, kind: str, /, *args: Any, **options: Any) -> Any:
        call = Call(self, kind, args, options)
        with self._lock:
            fault = self._choose(kind)
            call.fault = fault.name
            self.calls[kind] += 1
            self.fired[fault.name] += 1
            self.log.append(call)
            self._unseen[kind].append(call)
        self._bell.ring()
        try:
            call.answer = await fault.act(call)
            return call.answer
        except BaseException as error:
            call.error = error
            raise
        finally:
            call.is_over = True
            self._bell.ring()

    def _choose(self, kind: str) -> Fault:
        if script := self._scripts[kind]:
            return script.popleft()
        rule = self._rules.get(kind) or [(f, p) for f, p in self._rules.get("*", ()) if kind in f.only]
        if not rule:
            return ok
        point = self.random.random()
        for fault, chance in rule:
            if point < chance:
                return fault
            point -= chance
        return ok

    def perform(self, request: Callable[[], Awaitable[Any]]) -> None:
        """Perform a request whose answer is ignored; `aclose` cancels the request."""
        task = asyncio.ensure_future(_perform_quietly(request))
        self._late.add(task)
        task.add_done_callback(self._late.discard)


async def _perform_quietly(request: Callable[[], Awaitable[Any]]) -> None:
    with suppress(BackendError):
        await request()


def _unknown_call_message(kind: str) -> str:
    return f"no call is named {kind!r}: use {', '.join(sorted(CALLS))}"
