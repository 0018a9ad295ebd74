"""Reach: who can reach a server, under which names, and what must then protect it.

Rule 1: a server that other machines can reach needs an access token with each request, and TLS: its own, or that of a
proxy which it knows by its address.
Rule 2: what a proxy says of its clients counts only if the connection comes from that proxy.
Rule 3: a form counts only if it comes from a page of this server, under the name by which browsers know it.
Rule 4: a request names the server that it is for. A name that an attacker lets resolve to this machine is no such name.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request

from leasekit.errors import ConfigError
from leasekit.server.http.auth import LOCAL_SOCKET

__all__ = ["LOCAL_REACH", "Reach", "TlsFiles", "is_loopback"]

_Network = IPv4Network | IPv6Network
_Address = IPv4Address | IPv6Address
_HOST_NAME = re.compile(r"[A-Za-z0-9._:-]+")
_OF_IPV6 = 64  # bits of an address that one client has for itself, as a rule


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The files of a server with TLS, all in PEM."""

    cert: Path
    key: Path | None = None
    """None: the key is in the same file."""
    client_ca: Path | None = None
    """The authorities of clients' certificates; None: clients need none."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How a server is reached. The default is a server for its own machine."""

    is_open: bool = False
    """Whether other machines can connect."""
    needs_tokens: bool = False
    """Whether a token is needed also while the store has none."""
    names: frozenset[str] = frozenset()
    """Names of the server, in addition to those of this machine."""
    proxies: tuple[_Network, ...] = ()
    """The proxies that have TLS in front of this server."""

    @classmethod
    def of(
        cls, *, is_open: bool, has_tls: bool, needs_tokens: bool, names: Sequence[str], proxies: Sequence[str]
    ) -> "Reach":
        """Return how a server is reached at an address. Raises `ConfigError` if it would be reached unprotected."""
        if is_open and not (has_tls or proxies):
            raise ConfigError(
                "an address that other machines can reach needs TLS: give --tls-cert and --tls-key, or the address of "
                "the proxy that has TLS with --behind-proxy, or listen on 127.0.0.1"
            )
        if has_tls and proxies:
            raise ConfigError("--behind-proxy is for a server without TLS of its own: leave it or --tls-cert out")
        for name in names:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(f"--server-name must be a name or an address, as in tasks.example, got {name!r}")
        return cls(
            is_open=is_open,
            needs_tokens=needs_tokens or is_open or bool(proxies),
            names=frozenset(name.lower().rstrip(".") for name in names),
            proxies=tuple(map(_network, proxies)),
        )

    def check(self, request: Request, *, is_probe: bool = False) -> None:
        """Refuse requests of web pages, of other origins or hosts, and those that have gone around the proxy.

        A probe may come from any address.
        """
        hosts = request.headers.getlist("host") or [""]
        if len(hosts) > 1:
            raise HTTPException(400, "the request has more than one Host header")
        if not self._is_name(_without_port(hosts[0])):
            if self.is_open or self.names:
                why = f"{hosts[0][:100]!r} is no name of this server: start it with --server-name for that name"
                raise HTTPException(403, f"the Host header {why}")
            raise HTTPException(403, "the Host header must name this machine, such as localhost")
        if not all(self.is_own_origin(request, origin) for origin in request.headers.getlist("origin")):
            raise HTTPException(403, "the request comes from a web page of another origin")
        if self.proxies and not is_probe and not self._is_trusted(request):
            raise HTTPException(403, "this server takes requests only from its proxy, which has TLS")

    def is_own_origin(self, request: Request, origin: str) -> bool:
        """Return whether the web pages of this origin are those of this server, as the browser of a request knows it.

        That is the Host header, with TLS behind https://. Behind a proxy, which has TLS and may send another Host, it
        is https:// and that header, a name of the server, or what the proxy says (`X-Forwarded-Host`) if that is such
        a name.
        """
        scheme, _, host = origin.partition("://")
        hosts = [request.headers.get("host", "")]
        if self.proxies and LOCAL_SOCKET not in (request.scope.get("extensions") or ()):
            if scheme != "https" or not self._is_trusted(request):
                return False
            forwarded = request.headers.get("x-forwarded-host", "").rpartition(",")[2].strip()
            hosts += self.names
            hosts += [forwarded] if _without_port(forwarded).lower() in self.names else []
        elif request.scope.get("scheme") == "https" and scheme != "https":
            return False
        return bool(host) and host in hosts

    def peer(self, request: Request) -> str:
        """Return the address of the client: that which the proxy gives, if the request comes through it."""
        host = request.client.host if request.client else ""
        if self.proxies:
            # A proxy adds to the list, or to its lines: what came before is of the client, which may write anything.
            forwarded = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
            while forwarded and self._is_proxy(host) and (told := _forwarded(forwarded.pop())) is not None:
                host = told or host
        return _grouped(host)

    def _is_trusted(self, request: Request) -> bool:
        if LOCAL_SOCKET in (request.scope.get("extensions") or ()):
            return True
        return request.client is not None and self._is_proxy(request.client.host)

    def _is_proxy(self, host: str) -> bool:
        address = _address(host)
        return address is not None and any(address in network for network in self.proxies)

    def _is_name(self, host: str) -> bool:
        # No name can be made to resolve to this machine whose name is its address.
        if is_loopback(host) or ((self.is_open or self.proxies) and _address(host) is not None):
            return True
        return host.lower().rstrip(".") in self.names or (self.is_open and host.lower() in _own_names())


LOCAL_REACH = Reach()
"""How a server for its own machine is reached."""


def _own_names() -> Collection[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0]}


def is_loopback(host: str) -> bool:
    """Return whether this is `localhost` or a loopback address. Nothing is looked up."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(
            f"--behind-proxy must be an address or a network, as in 10.0.0.7 or 10.0.0.0/24, got {text!r}"
        ) from None


def _forwarded(part: str) -> str | None:
    """Return the address in a part of `X-Forwarded-For`, without its port; "" if that is empty, None without one."""
    part = part.strip()
    return next((text for text in (part, _without_port(part)) if not text or _address(text) is not None), None)


def _without_port(host: str) -> str:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]")


def _grouped(host: str) -> str:
    """Return an address, or of IPv6 the network that one client has for itself."""
    address = _address(host)
    if isinstance(address, IPv6Address):
        return str(ipaddress.ip_network((address, _OF_IPV6), strict=False))
    return host if address is None else str(address)
