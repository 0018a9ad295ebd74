"""Wake the code that waits in any event loop, because something changed."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


class Notifier:
    """A bell that wakes all listeners, each in its own event loop; any thread may ring it.

    A ring says that something changed, never what: listeners check for themselves, and may be woken for nothing.
    """

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @contextmanager
    def listen(self) -> Generator[asyncio.Event]:
        """Yield an event of the running loop that every ring from now on sets; check before you wait."""
        rung = asyncio.Event()
        self._listeners[rung] = asyncio.get_running_loop()
        try:
            yield rung
        finally:
            del self._listeners[rung]

    def ring(self) -> None:
        for rung, loop in self._listeners.copy().items():
            # A loop that was closed has no listener left to wake.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(rung.set)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Return once `fact()` is true, which is checked now and after each ring."""
        with self.listen() as rung:
            while not fact():
                await rung.wait()
                rung.clear()
