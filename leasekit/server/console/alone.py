"""The console of a store as a process of its own: what `leasekit console` runs."""

import asyncio
import os
import socket
import sys
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route

from leasekit.server.console.of_store import StoreConsole
from leasekit.server.console.visit import Mode
from leasekit.server.http.app import CONSOLE
from leasekit.server.http.process import bound_to_loopback

_HOSTS = ["localhost", "127.0.0.1", "[::1]"]


def serve(url: str, *, port: int, mode: Mode) -> None:
    """Serve the console of a store to this machine until SIGTERM or SIGINT; print its address when it is ready.

    Raises `ConfigError` for an address that cannot be listened on, and a URL that names no store.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(url, port=port, mode=mode))


def _to_console(request: Request) -> Response:
    return RedirectResponse(f"{CONSOLE}/")


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Print the address once it answers."""
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            # Past the buffer of stdout, which nobody may read.
            os.write(sys.stdout.fileno(), f"the console is at http://{host}:{port}{CONSOLE}/\n".encode())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, and at once at the second; uvicorn's method would have the process die of it."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(url: str, *, port: int, mode: Mode) -> None:
    with bound_to_loopback(port) as listener:
        console = StoreConsole(url, mode=mode)
        app = Starlette(
            routes=[Route("/", _to_console), Mount(CONSOLE, console)],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)],
        )
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = _Server(config)
        try:
            await server.serve(sockets=[listener])
        finally:
            await console.aclose()
