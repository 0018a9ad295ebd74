"""Service key: one key for all spellings of a service's URL, as far as the URL alone shows that they are the same.

Rule 1: a difference that may mean another service gives another key. Results that go to the wrong service are answered
*gone* and dropped; results that wait under a spelling that is no longer used are still on the disk.
Rule 2: no network is asked. Two names of one host, or a part of a service's addresses, are not recognised.
"""

import hashlib
import re
from urllib.parse import parse_qsl, urlencode

_PORTS = {"http": 80, "https": 443, "redis": 6379, "rediss": 6379, "redis+cluster": 6379, "redis+sentinel": 26379}
_PARTS = re.compile(r"(?P<scheme>[^:/?#]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)\??(?P<query>.*)", re.DOTALL)
_PORT = re.compile(r":\d+$", re.ASCII)  # an IPv6 address ends with a bracket
# How an adapter uses a service, and how long data is kept there: these options do not identify a service.
_MANNERS = {
    "retention", "ttl", "wait", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "sentinel_username",
    "sentinel_password",
}  # fmt: skip


def key_of(url: str) -> str:
    """Return the key of the service at this URL. User, password, and options of the adapter do not count."""
    return hashlib.sha256(_normalised(url).encode()).hexdigest()[:16]


def _normalised(url: str) -> str:
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return url
    scheme = parts["scheme"].lower()
    authority, path = parts["authority"].rpartition("@")[2], parts["path"]
    options = [
        (name, value) for name, value in parse_qsl(parts["query"], keep_blank_values=True) if name not in _MANNERS
    ]
    if scheme in _PORTS:
        authority = ",".join(sorted({_with_port(host, _PORTS[scheme]) for host in authority.split(",")}))
        path = path.rstrip("/")
    if scheme.startswith("redis"):
        path = path or "/0"
    return f"{scheme}://{authority}{path}?{urlencode(sorted(options))}"


def _with_port(host: str, port: int) -> str:
    return host.lower() if _PORT.search(host) else f"{host.lower().removesuffix(':')}:{port}"
