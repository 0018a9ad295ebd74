"""How the keeper learns that a `with` block is over, whatever ended it."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

__all__ = ["Block", "end_of_block"]

F = TypeVar("F", bound=Callable[..., Any])

Block = weakref.ref[Callable[..., Any]]
"""Dead once the block of a `with` statement is over."""


class _HasBlock(Protocol):
    _block: Block | None


class _EndOfBlock:
    """`__exit__` or `__aexit__` of a lease: an object of its own for each block.

    A `with` statement looks it up before it enters, and drops it when the block is over, whatever ended the block: also
    an exception out of a signal handler in the very moment before the first line of `__exit__`. Nobody else holds it,
    not even a traceback. So the block is over when it is dead, and the keeper may rely on that.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, manager: _HasBlock | None, owner: type | None = None) -> Callable[..., Any]:
        if manager is None:  # looked up in the class, by an ExitStack: the manager stands for its block
            return self._function
        end = functools.partial(self._function, manager)  # C: it shows up in no frame
        manager._block = weakref.ref(end)  # pyright: ignore[reportPrivateUsage] - a part of the manager
        return end


def end_of_block(function: F) -> F:
    """Decorate `__exit__` or `__aexit__`: `_block` dies when the block that looked it up is over."""
    return cast("F", _EndOfBlock(function))
