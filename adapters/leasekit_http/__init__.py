"""The HTTP backend: `http://` and `https://` URLs of a leasekit server."""

from leasekit.registry import needs_extra

with needs_extra("http"):
    from leasekit_http.backend import HttpBackend, connect

__all__ = ["HttpBackend", "connect"]
