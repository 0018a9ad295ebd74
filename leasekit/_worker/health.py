"""Answers to health probes, over HTTP: 200 while a worker can keep its leases, else 503.

A thread of the worker itself answers: while the interpreter is held up there is no answer, which a probe takes for a
failure, and while only the driver's thread is held up the answer says so. The supervisor would go on answering for a
worker that hangs.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

import msgspec

from leasekit.errors import ConfigError
from leasekit.task import Health

logger = logging.getLogger("leasekit")


def listen(address: str, health: Callable[[], Health]) -> int:
    """Answer at `[HOST:]PORT` from now on, until the process ends; return the port. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    try:
        if not (port.isdecimal() and int(port) < 2**16):
            raise OSError("no such port")
        found = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM)
        family, _, _, _, resolved = found[0]
        server = _Server(family, resolved, health)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--health {address} cannot be used ({why}): name another [HOST:]PORT") from error
    threading.Thread(target=server.serve_forever, args=[_FAR], name="leasekit-health", daemon=True).start()
    name, bound, *_ = server.socket.getsockname()
    logger.info("health is answered at http://%s:%d/", f"[{name}]" if ":" in name else name, bound)
    return int(bound)


_FAR = 86400.0  # seconds between two looks for a request to end, which never comes


class _Server(ThreadingTCPServer):
    """A listener, and a daemon thread for each connection: a slow client delays no other."""

    allow_reuse_address = True  # the next worker takes the port over
    daemon_threads = True

    def __init__(self, family: Any, address: Any, health: Callable[[], Health]) -> None:
        self.address_family = family
        self.health = health
        super().__init__(address, _Handler)
        os.register_at_fork(after_in_child=self._close_in_child)

    def _close_in_child(self) -> None:
        """Close the listener in a forked child, which answers no probe and may outlive this process."""
        with suppress(OSError):
            self.socket.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone, or gets no answer."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "leasekit", ""
    timeout = 5.0  # seconds for which a client may be silent

    def do_GET(self) -> None:
        health = self.server.health()
        facts: dict[str, Any] = msgspec.to_builtins(health)
        status = "ok" if facts.pop("ok") else "unhealthy"
        body = msgspec.json.encode({"status": status, **facts})
        self.send_response(200 if health.ok else 503)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Log no request."""
