"""The HTTP backend: `http://` and `https://` URLs, spoken to a leasekit server (DESIGN §6)."""

from leasekit_http.backend import HttpBackend, connect

__all__ = ["HttpBackend", "connect"]
