"""Around: generator functions whose code is run around each run of a handler, or around the life of a process.

    @worker.around                            @worker.lifespan
    def tenant(held):                         def pool():
        …  # before the handler                   …  # before the first claim
        yield                                     yield
        …  # after it                             …  # when no handler runs any longer

Rule 1: code around a run is part of the run: of its thread or task, of its context, of its lease.
Rule 2: what a handler raised counts even if code around it swallows that, unless this code then decides otherwise.
Rule 3: a shutdown is told of no error: it is called however the worker ends.
Rule 4: a child process that a handler forked runs none of this.
"""

import inspect
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import anyio

from leasekit.errors import ConfigError

if TYPE_CHECKING:
    from leasekit.lease import Lease

logger = logging.getLogger("leasekit")

CHILD_CAME_BACK = 70  # EX_SOFTWARE: a child process that a handler forked raised an error out of it

AroundRun = Callable[["Lease"], Iterator[None] | AsyncIterator[None]]
Lifespan = Callable[[], Iterator[None] | AsyncIterator[None]]


@dataclass(frozen=True, slots=True)
class Around:
    """A generator function around the runs of some kinds."""

    function: AroundRun
    kinds: tuple[str, ...] = ()  # none: all kinds

    def encloses(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether this generator function is an `async def`."""
    return inspect.isasyncgenfunction(function)


def named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def check(function: object, decorator: str, *arguments: str) -> None:
    """Raise `ConfigError` if this is no generator function that takes these arguments."""
    what = f"@worker.{decorator}: {getattr(function, '__qualname__', repr(function))}"
    if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        raise ConfigError(f"{what} must be a function with one `yield` in it, without @contextmanager")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        takes = " and ".join(arguments) if arguments else "no argument"
        raise ConfigError(f"{what} must take {takes}") from None


# Around a run ---------------------------------------------------------------------------------------------------


@contextmanager
def around_run(functions: Sequence[AroundRun], held: "Lease") -> Generator[None]:
    """Run these functions around the block, the first outermost."""
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(_layer(function, held))
        with _ending_children():
            yield


@asynccontextmanager
async def around_async_run(functions: Sequence[AroundRun], held: "Lease") -> AsyncGenerator[None]:
    """Do what `around_run` does, in an event loop."""
    async with AsyncExitStack() as stack:
        for function in functions:
            if is_async(function):
                await stack.enter_async_context(_async_layer(function, held))
            else:
                stack.enter_context(_layer(function, held))
        with _ending_children():
            yield


class _Insisting:
    """Note the error of a block, so that it can be raised again if the code around it has swallowed it."""

    def __init__(self, held: "Lease") -> None:
        self._held = held
        self._raised: BaseException | None = None
        self._had_decided = False

    @contextmanager
    def noting(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._raised, self._had_decided = error, self._held.decided
            raise

    def insist(self) -> None:
        """Raise the error, if there was one, unless `complete`, `fail` or `release` was called since."""
        error, self._raised = self._raised, None
        if error is not None and (self._had_decided or not self._held.decided):
            raise error


@contextmanager
def _layer(function: AroundRun, held: "Lease") -> Generator[None]:
    """Run one generator function around the block; an error of the block that it swallows is raised all the same."""
    insisting = _Insisting(held)
    with contextmanager(cast("Callable[[Lease], Generator[None]]", function))(held), insisting.noting():
        yield
    insisting.insist()


@asynccontextmanager
async def _async_layer(function: AroundRun, held: "Lease") -> AsyncGenerator[None]:
    insisting = _Insisting(held)
    async with asynccontextmanager(cast("Callable[[Lease], AsyncGenerator[None]]", function))(held):
        with insisting.noting():
            yield
    insisting.insist()


@contextmanager
def _ending_children() -> Generator[None]:
    """End a forked child that comes back from the handler, before it commits what its parent has begun."""
    parent, code = os.getpid(), CHILD_CAME_BACK
    try:
        yield
        code = 0
    finally:
        if os.getpid() != parent:
            os._exit(code)


# Around the life of a process -----------------------------------------------------------------------------------


@contextmanager
def living(functions: Sequence[Lifespan]) -> Generator[None]:
    """Start these in order, and shut them down in the reverse order after the block; `async` ones are left out."""
    with ExitStack() as stack:
        for function in functions:
            if not is_async(function):
                manager = contextmanager(cast("Callable[[], Generator[None]]", function))()
                with _naming(f"the start-up of {named(function)} failed, nothing was claimed in this process"):
                    manager.__enter__()
                stack.callback(_shut_down, function, manager)
        yield


def _shut_down(function: Lifespan, manager: Any) -> None:
    with _naming(f"the shutdown of {named(function)} failed; all handlers had ended"):
        manager.__exit__(None, None, None)


@asynccontextmanager
async def living_in_loop(functions: Sequence[Lifespan]) -> AsyncGenerator[None]:
    """Do what `living` does, for the `async` ones, which the others are left out for."""
    async with AsyncExitStack() as stack:
        for function in functions:
            if is_async(function):
                manager = asynccontextmanager(cast("Callable[[], AsyncGenerator[None]]", function))()
                with _naming(f"the start-up of {named(function)} failed, nothing was claimed in this process"):
                    await manager.__aenter__()
                stack.push_async_callback(_shut_down_in_loop, function, manager)
        yield


async def _shut_down_in_loop(function: Lifespan, manager: Any) -> None:
    with anyio.CancelScope(shield=True), _naming(f"the shutdown of {named(function)} failed; all handlers had ended"):
        await manager.__aexit__(None, None, None)


@contextmanager
def _naming(what: str) -> Generator[None]:
    """Log which function failed, and note it in the error."""
    try:
        yield
    except Exception as error:
        logger.critical("%s: %s: %s", what, type(error).__name__, error)
        error.add_note(f"leasekit: {what}")
        raise
