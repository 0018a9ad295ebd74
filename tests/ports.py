"""Ports for servers that tests start: below those that the kernel gives out, so that no connection takes one first."""

import random
import socket
from contextlib import ExitStack, suppress

__all__ = ["free_port"]

_chance = random.SystemRandom()


def free_port(*beside: int) -> int:
    """Return a port of this machine that is free, and free too at each of these distances from it."""
    while True:
        port = _chance.randrange(11_000, 22_000)
        with suppress(OSError), ExitStack() as taken:
            for distance in (0, *beside):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port + distance))
            return port
