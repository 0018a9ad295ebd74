"""The headers that a caller adds to each request. They may be credentials, so no message contains a value."""

import os
import re
from collections.abc import Mapping
from typing import Any, cast

from leasekit.errors import ConfigError
from leasekit.tokens import is_secret, read_secret
from leasekit.wire import REQUEST_HEADER

__all__ = ["checked_headers", "has_token", "headers_of_environment", "token_of_environment", "with_token"]

_VARIABLE = "LEASEKIT_HEADERS"
_TOKEN, _TOKEN_FILE = "LEASEKIT_TOKEN", "LEASEKIT_TOKEN_FILE"
_BEARER = "Bearer "

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_VALUE = re.compile(r"[\t -~]*")  # others may be read as something else on the way
_OWN = frozenset({
    "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "te",
    "trailer", "transfer-encoding", "upgrade", REQUEST_HEADER.lower(),
})  # fmt: skip


def checked_headers(headers: Mapping[Any, Any]) -> dict[str, str]:
    """Return the headers with names in lower case. Raises `ConfigError` for one that cannot be sent."""
    if not isinstance(cast("object", headers), Mapping):
        raise ConfigError('headers must be a mapping, as in {"Authorization": "Bearer …"}')
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError("the name of a header must be letters, digits and '-', as in 'Authorization'")
        if name.lower() in _OWN:
            raise ConfigError(f"the header {name!r} is leasekit's own: leave it out")
        if not (isinstance(value, str) and _VALUE.fullmatch(value)):
            raise ConfigError(f"the value of the header {name!r} must be one line of printable ASCII characters")
        checked[name.lower()] = value.strip()
    return checked


def headers_of_environment(url: str) -> dict[str, str]:
    """Return the headers in the environment for this URL; no header if the environment names another service.

    Raises `ConfigError` for a line that is not of the form `Name: value`.
    """
    if url != os.environ.get("LEASEKIT_URL"):
        return {}
    headers: dict[str, str] = {}
    for line in filter(str.strip, os.environ.get(_VARIABLE, "").splitlines()):
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"{_VARIABLE} must have lines of the form 'Name: value'")
        headers[name.strip()] = value.strip()
    return checked_headers(headers)


def token_of_environment(url: str) -> str | None:
    """Return the access token in the environment for this URL; None if the environment names another service.

    Raises `ConfigError` if the file that it names cannot be read.
    """
    if url != os.environ.get("LEASEKIT_URL"):
        return None
    if file := os.environ.get(_TOKEN_FILE):
        return read_secret(file)
    return os.environ.get(_TOKEN, "").strip() or None


def with_token(headers: dict[str, str], token: Any) -> dict[str, str]:
    """Return these headers with that of an access token. Raises `ConfigError` for a text that cannot be one."""
    if token is None:
        return headers
    if not (isinstance(token, str) and is_secret(token.strip())):
        raise ConfigError(
            "the access token must be lk_ and 49 characters, as `leasekit token create` has printed it: it was cut, "
            "or is another text"
        )
    if "authorization" in headers:
        raise ConfigError("token= and the header Authorization say both who calls: give one of them")
    return {**headers, "authorization": _BEARER + token.strip()}


def has_token(headers: Mapping[str, str]) -> bool:
    """Return whether these headers have an access token."""
    return is_secret(headers.get("authorization", "").removeprefix(_BEARER))
