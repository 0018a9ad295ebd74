"""The web console as an ASGI application, to mount into your own: `StoreConsole("sqlite:///tasks.db")`.

It has no login of its own: let your application decide who reaches it.
"""

from leasekit.server.console.of_store import StoreConsole

__all__ = ["StoreConsole"]
