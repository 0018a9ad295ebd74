"""Handler function: what `@worker.handler(kind)` puts in place of the function, which adds scheduling to it.

    thumbnail(Thumbnail(path="a.png"))                           # runs it, here and now
    thumbnail.schedule(path="a.png")                             # schedules a task of its kind
    thumbnail.options(priority=0).schedule(path="a.png")         # with options of the task
    await thumbnail.options(client=client).aschedule(path="a.png")

The rule: `schedule` takes the payload and nothing else, `options` takes all else and no payload. So a field of a
payload can have any name, including `priority`, `at` and `client`.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from leasekit._arguments import new_task
from leasekit._worker.handlers import Handler, check_options
from leasekit.client import Client
from leasekit.task import NewTask, Scheduled, TaskOptions

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

Submitter = Callable[[], tuple[Client, bool]]
"""Returns the client that schedules, and whether it was opened for this one call and must be closed after it."""


class Signature(Generic[T]):
    """A handler with options of its tasks, without a payload. It may be kept and used again."""

    def __init__(self, handler: Handler, submitter: Submitter, options: TaskOptions) -> None:
        self._handler = handler
        self._submitter = submitter
        self._options = options

    @overload
    def schedule(self, payload: T, /) -> Scheduled: ...
    @overload
    def schedule(self, /, **fields: Any) -> Scheduled: ...
    def schedule(self, /, *payload: Any, **fields: Any) -> Scheduled:
        """Schedule one task: when this returns the task is durable, and will be run until it is settled.

        The payload is one positional value, or, if its annotation is a Struct, a dataclass or a TypedDict, its fields
        by name. Type checkers check only the positional form; both are checked here, before anything is sent.

        Raises TypeError for an unknown or missing field, ValueError for a value that does not fit the annotation,
        `ConfigError` if there is no client, and what `Client.schedule` raises.
        """
        raw = self._handler.payload(payload, fields)
        options = self._handler.options(raw, self._options)
        client, passing = self._submitter()
        if not passing:
            return client.schedule(self._handler.kind, raw, **options)
        with client:
            return client.schedule(self._handler.kind, raw, **options)

    @overload
    async def aschedule(self, payload: T, /) -> Scheduled: ...
    @overload
    async def aschedule(self, /, **fields: Any) -> Scheduled: ...
    async def aschedule(self, /, *payload: Any, **fields: Any) -> Scheduled:
        """Do what `schedule` does, from an event loop."""
        raw = self._handler.payload(payload, fields)
        options = self._handler.options(raw, self._options)
        client, passing = self._submitter()
        if not passing:
            return await client.aschedule(self._handler.kind, raw, **options)
        async with client:
            return await client.aschedule(self._handler.kind, raw, **options)

    def __task__(self, payload: T, options: TaskOptions) -> NewTask:
        """Return a task to be scheduled, for `Lease.then`."""
        raw = self._handler.payload((payload,), {})
        return new_task(self._handler.kind, raw, self._handler.options(raw, {**self._options, **options}))


class HandlerFunction(Signature[T], Generic[T, P, R]):
    """A handler's function: a call runs it as before, and `schedule` has a worker run it."""

    def __init__(self, function: Callable[Concatenate[T, P], R], handler: Handler, submitter: Submitter) -> None:
        super().__init__(handler, submitter, {})
        self.function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, payload: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now: no task, and no lease but the one that is given."""
        return self.function(payload, *args, **kwargs)

    def options(self, *, client: Client | None = None, **options: Unpack[TaskOptions]) -> Signature[T]:
        """Set options of the tasks besides their payload: those of `Client.schedule`, and the client that schedules.

        Without `client` the worker's is used: the client that it was given or, while it runs, its own. Else each call
        opens a client for its URL (or LEASEKIT_URL), so give a client if you schedule often.

        An option that is given here wins over the handler's default of it. Raises TypeError or ValueError if no service
        would take such a task.
        """
        check_options(self._handler.kind, options)
        return Signature(self._handler, self._submitter if client is None else lambda: (client, False), options)
