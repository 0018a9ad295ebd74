"""The addresses in a URL."""

import os
import re
import sys
from urllib.parse import urlsplit

from leasekit.errors import ConfigError

_PARTS = re.compile(r"(?P<scheme>[^:/?#]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_LONGEST_PATH = 107 if sys.platform == "linux" else 103  # bytes of a socket's path
_FORM = "the URL of a server must be http://host:port or https://host:port; of several, http://host:port,host:port"


def addresses(url: str) -> list[str]:
    """Return each address in a URL as a URL: `http://a:1,b:2/p` has two. Raises `ConfigError`, without the URL."""
    parts = _PARTS.fullmatch(url)
    if parts is None or "://" in url.partition("://")[2]:  # of several addresses, only the first has a scheme
        raise ConfigError(_FORM)
    authority = parts["authority"]
    if "@" in authority:
        host = authority.rpartition("@")[2]
        raise ConfigError(f"the URL of {host} holds a user or password: leave them out")
    urls = [_address(f"{parts['scheme']}://{host}{parts['rest']}") for host in authority.split(",")]
    return list(dict.fromkeys(urls))


def socket_address(url: str) -> str:
    """Return a URL `http+unix://path` unchanged. Raises `ConfigError` if no socket can have that path."""
    path = url.partition("://")[2]
    if found := re.search(r"\?(\w+)=[^/]*\Z", path):
        raise ConfigError(f"the URL of a socket has an option, {found[1]!r}: leave it out")
    if not path:
        raise ConfigError("the URL of a socket must have its path: http+unix:///run/tasks.sock")
    if (size := len(os.fsencode(path))) > _LONGEST_PATH:
        raise ConfigError(f"the path of the socket in the URL has {size} bytes, {_LONGEST_PATH} at most: shorten it")
    return url


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"an address in the URL is wrong: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(_FORM)
    if found := re.fullmatch(r"(\w+)=[^@]*", parts.query):  # else it may be part of a password
        raise ConfigError(f"the URL of {parts.hostname} has an option, {found[1]!r}: leave it out")
    if parts.query or parts.fragment:
        raise ConfigError(f"the URL of {parts.hostname} has a query or fragment: leave it out")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    authority = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{authority}{parts.path.rstrip('/')}"
