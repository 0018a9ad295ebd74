"""What `@worker.handler(kind)` leaves under the function's name: the function, which can be scheduled as it is called.

    thumbnail(Thumbnail(path="a.png"))                           # runs it, here and now
    thumbnail.schedule(path="a.png")                             # schedules a task of its kind
    thumbnail.options(priority=0).schedule(path="a.png")         # says more of the task
    await thumbnail.options(client=client).aschedule(path="a.png")

The rule: `schedule` takes the payload and nothing else, `options` all else and no payload. So a field of a payload may
be named as it likes, `priority`, `at` and `client` included.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from leasekit.client import Client
from leasekit.task import Scheduled, TaskOptions
from leasekit.worker.handlers import Handler

__all__ = ["Declared", "Order", "Submitter"]

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

Submitter = Callable[[], tuple[Client, bool]]
"""Gives the client that schedules, and whether it was opened for this one call and is to be closed after it."""


class Order(Generic[T]):
    """A handler, and what is to be said of its tasks besides the payload. It may be kept and used again."""

    def __init__(self, handler: Handler, submitter: Submitter, options: TaskOptions) -> None:
        self._handler = handler
        self._submitter = submitter
        self._options = options

    @overload
    def schedule(self, payload: T, /) -> Scheduled: ...
    @overload
    def schedule(self, /, **fields: Any) -> Scheduled: ...
    def schedule(self, /, *payload: Any, **fields: Any) -> Scheduled:
        """Schedule one task: when this returns it is durable, and will be run until it is settled.

        The payload is one positional value, or, where its annotation is a Struct, a dataclass or a TypedDict, its
        fields by name. Type checkers look into the former only; both are checked here, before anything is sent.

        Raises TypeError for an unknown or missing field, ValueError for a value that does not fit the annotation,
        `ConfigError` where there is no client, and what `Client.schedule` raises.
        """
        raw = self._handler.payload(payload, fields)
        client, passing = self._submitter()
        if not passing:
            return client.schedule(self._handler.kind, raw, **self._options)
        with client:
            return client.schedule(self._handler.kind, raw, **self._options)

    @overload
    async def aschedule(self, payload: T, /) -> Scheduled: ...
    @overload
    async def aschedule(self, /, **fields: Any) -> Scheduled: ...
    async def aschedule(self, /, *payload: Any, **fields: Any) -> Scheduled:
        """`schedule`, from an event loop."""
        raw = self._handler.payload(payload, fields)
        client, passing = self._submitter()
        if not passing:
            return await client.aschedule(self._handler.kind, raw, **self._options)
        async with client:
            return await client.aschedule(self._handler.kind, raw, **self._options)


class Declared(Order[T], Generic[T, P, R]):
    """A function that is a handler: called it is what it was, and `schedule` has a worker run it."""

    def __init__(self, function: Callable[Concatenate[T, P], R], handler: Handler, submitter: Submitter) -> None:
        super().__init__(handler, submitter, {})
        self.function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, payload: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now: no task, no lease but the one that is given."""
        return self.function(payload, *args, **kwargs)

    def options(self, *, client: Client | None = None, **options: Unpack[TaskOptions]) -> Order[T]:
        """Say more of the tasks than their payload: the options of `Client.schedule`, and which client schedules.

        Without `client` it is the worker's: the one that it was given or, while it works, the one that it works with;
        else one by its URL (or LEASEKIT_URL) is opened for each call, so whoever schedules often gives one.
        """
        return Order(self._handler, self._submitter if client is None else lambda: (client, False), options)
