"""Telling whoever waits, in whatever event loop, that something changed."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

__all__ = ["Notifier"]


class Notifier:
    """Wakes everyone who listens, each in their own event loop; may be rung from any thread.

    It says that something changed, never what: listeners look for themselves, and may be woken for nothing.
    """

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @contextmanager
    def listen(self) -> Generator[asyncio.Event]:
        """An event of the running loop that every ring from now on sets; look before you wait."""
        rung = asyncio.Event()
        self._listeners[rung] = asyncio.get_running_loop()
        try:
            yield rung
        finally:
            del self._listeners[rung]

    def ring(self) -> None:
        """Wake all who listen."""
        for rung, loop in self._listeners.copy().items():
            # A loop that was closed over a listener has nobody left to wake.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(rung.set)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Return once `fact()` is true; it is looked at now and after each ring."""
        with self.listen() as rung:
            while not fact():
                await rung.wait()
                rung.clear()
