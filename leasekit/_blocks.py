"""Show the keeper that a `with` block is over, whatever ended the block."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

__all__ = ["Block", "end_of_block"]

F = TypeVar("F", bound=Callable[..., Any])

Block = weakref.ref[Callable[..., Any]]
"""A weak reference that is dead once the block of a `with` statement is over."""


class _HasBlock(Protocol):
    _block: Block | None


class _EndOfBlock:
    """Descriptor of `__exit__` or `__aexit__` of a lease: makes an exit function for each block.

    A `with` statement looks the exit function up before the block begins, and drops the function when the block is
    over, even if a signal handler raises just before the first line of `__exit__`. Nothing else refers to the function,
    not even a traceback. So the keeper may rely on this: when the function is dead, the block is over.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, manager: _HasBlock | None, owner: type | None = None) -> Callable[..., Any]:
        if manager is None:  # looked up in the class, by an ExitStack: the block is over when the manager is dead
            return self._function
        end = functools.partial(self._function, manager)  # written in C, so no frame refers to it
        manager._block = weakref.ref(end)  # pyright: ignore[reportPrivateUsage] - a part of the manager
        return end


def end_of_block(function: F) -> F:
    """Decorate `__exit__` or `__aexit__`: the manager's `_block` is dead once the `with` block is over."""
    return cast("F", _EndOfBlock(function))
