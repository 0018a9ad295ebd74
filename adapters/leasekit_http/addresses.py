"""The addresses in a URL."""

import re
from urllib.parse import urlsplit

from leasekit.errors import ConfigError

__all__ = ["addresses"]

_PARTS = re.compile(r"(?P<scheme>[^:/?#]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_FORM = "an address of a server is http://host:port or https://host:port; of several, http://host:port,host:port"


def addresses(url: str) -> list[str]:
    """Each address of a service as a URL of its own, without a slash at its end: `http://a:1,b:2/p` has two.

    Raises `ConfigError` where one is none. Its message does not repeat the URL, which may hold a password.
    """
    parts = _PARTS.fullmatch(url)
    if parts is None:
        raise ConfigError(_FORM)
    authority = parts["authority"]
    if "@" in authority:
        host = authority.rpartition("@")[2]
        raise ConfigError(f"the URL of {host} holds a user or password: they are not part of an address")
    found = [_address(f"{parts['scheme']}://{one}{parts['rest']}") for one in authority.split(",")]
    return list(dict.fromkeys(found))


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"this is no URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(_FORM)
    if parts.query or parts.fragment:
        raise ConfigError(f"the URL of {parts.hostname} has a query or fragment: an address has neither")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    authority = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{authority}{parts.path.rstrip('/')}"
