"""What may be a handler, and what its annotation makes of a payload."""

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from leasekit import ConfigError, Lease, Worker
from leasekit._worker.handlers import Handler, declare

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers


class Thumbnail(msgspec.Struct):
    path: str
    width: int = 100


class NoSchema:
    pass


def declared(function: Callable[..., Any], run: str | None = None, kind: str = "k") -> Handler:
    return declare(kind, function, run=run, idle_timeout=None)


def plain(payload: Any) -> None: ...
async def coroutine(payload: Any) -> None: ...
def no_parameter() -> None: ...
def three_parameters(payload: Any, held: Lease, more: int) -> None: ...
def any_number(*payload: Any) -> None: ...
def needs_more(payload: Any, *, more: int) -> None: ...
def yields(payload: Any) -> Iterator[int]:
    yield 1


async def yields_async(payload: Any) -> AsyncIterator[int]:
    yield 1


def unreadable(payload: NoSchema) -> None: ...
def unknown(payload: "Nothing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def struct(payload: Thumbnail) -> None: ...
def in_words(payload: "Thumbnail", held: "OnlyForTypeCheckers") -> None: ...
def without_annotation(payload, held=None): ...  # type: ignore[no-untyped-def]


class Callables:
    def method(self, payload: Thumbnail) -> None: ...
    async def __call__(self, payload: Thumbnail) -> None: ...


def test_an_async_function_runs_in_the_loop_and_others_in_threads() -> None:
    assert declared(coroutine).run == "async"
    assert declared(plain).run == "thread"
    assert declared(Callables()).run == "async"
    assert declared(Callables().method).run == "thread"
    assert declared(functools.partial(coroutine)).run == "async"


def test_the_annotation_of_the_first_parameter_is_the_schema() -> None:
    assert declared(struct).schema is Thumbnail
    assert declared(Callables().method).schema is Thumbnail
    assert declared(without_annotation).schema is Any


def test_annotations_may_be_strings_and_those_of_the_lease_need_not_exist() -> None:
    handler = declared(in_words)
    assert handler.schema is Thumbnail
    assert handler.takes_held


def test_the_lease_is_given_to_who_has_a_second_parameter() -> None:
    assert declared(without_annotation).takes_held
    assert not declared(struct).takes_held


@pytest.mark.parametrize(
    ("function", "run", "says"),
    [
        (no_parameter, None, r"\(payload, held\)"),
        (three_parameters, None, r"\(payload, held\)"),
        (any_number, None, r"\(payload, held\)"),
        (needs_more, None, "'more'"),
        (yields, None, "yields"),
        (yields_async, None, "yields"),
        (unreadable, None, "NoSchema"),
        (unknown, None, "Nothing"),
        (lambda payload: payload, "process", "by its name in its module"),
        (plain, "async", "not an `async def`"),
        (coroutine, "thread", "run='async'"),
        (plain, "fiber", "'fiber'"),
        (int, None, "handler 'k'"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_when_it_is_declared(
    function: Callable[..., Any], run: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        declared(function, run)


@pytest.mark.parametrize("kind", ["", "a/b", "ü", "x" * 129])
def test_a_kind_that_no_service_takes_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="kind"):
        declared(plain, kind=kind)


def test_one_kind_has_one_handler() -> None:
    worker = Worker()
    worker.handler("k")(plain)
    with pytest.raises(ConfigError, match="one kind, one handler"):
        worker.handler("k")(coroutine)


def test_a_decorator_that_was_given_no_kind_says_how_it_is_written() -> None:
    bare: Any = Worker("memory://").handler
    with pytest.raises(ConfigError, match=r'write @worker.handler\("thumbnail"\)'):
        bare(plain)


def test_a_declared_function_is_called_as_before() -> None:
    def doubled(payload: int) -> int:
        """Twice as much."""
        return 2 * payload

    declared = Worker().handler("k")(doubled)
    assert declared(3) == 6
    assert (vars(declared)["__name__"], declared.__doc__) == ("doubled", "Twice as much.")
    assert inspect.signature(declared) == inspect.signature(doubled)


@pytest.mark.anyio
async def test_a_declared_async_function_is_called_as_before() -> None:
    async def doubled(payload: int) -> int:
        return 2 * payload

    assert await Worker().handler("k")(doubled)(3) == 6


def test_a_declared_function_may_serve_another_kind_too() -> None:
    worker = Worker()
    first = worker.handler("first")(coroutine)
    second = worker.handler("second")(first)
    assert second.function is coroutine


def test_a_concurrency_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="concurrency must be a whole number from 1 to 100,000, got 0"):
        Worker().handler("k", concurrency=0)(plain)


def test_an_idle_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="idle_timeout"):
        declare("k", plain, run=None, idle_timeout=0)
