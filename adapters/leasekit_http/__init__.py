"""The HTTP backend: `http://` and `https://` URLs, spoken to a leasekit server."""

from leasekit_http.backend import HttpBackend, connect

__all__ = ["HttpBackend", "connect"]
