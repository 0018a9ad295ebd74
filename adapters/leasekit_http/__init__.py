"""The HTTP backend: `http://` and `https://` URLs of a leasekit server."""

from leasekit_http.backend import HttpBackend, connect

__all__ = ["HttpBackend", "connect"]
