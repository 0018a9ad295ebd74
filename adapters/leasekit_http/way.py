"""The way to a server: the certificates that count, and the proxies in between.

What is not given comes from the environment, as httpx reads it: `SSL_CERT_FILE`, `SSL_CERT_DIR`, `HTTPS_PROXY`,
`HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`. No proxy of the environment is asked for an address of this machine.
"""

import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from leasekit.errors import ConfigError, MissingDependency, Untrusted

__all__ = ["Way", "is_loopback", "untrusted"]

_NO_PASSWORD = ""  # else OpenSSL asks for one on the terminal
_WRONG_HOST = {62, 64}  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_WRONG_TIME = {9, 10}  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


class Way(NamedTuple):
    """The settings of a caller for the way; None: the environment counts."""

    ca: str | os.PathLike[str] | None = None
    proxy: str | None = None
    cert: str | os.PathLike[str] | None = None
    """A PEM file with the certificate of this client, and its key."""

    def client(self, base_urls: Sequence[str], *, socket: str | None, limits: httpx.Limits) -> httpx.AsyncClient:
        """Return a client for these addresses, or for a socket. Raises `ConfigError`, `MissingDependency`."""
        local = [url for url in base_urls if is_loopback(url)]
        # Loading the root certificates takes 20 ms. Without any, TLS would not trust any server.
        secure = [url for url in (*base_urls, self.proxy or "") if url.startswith("https:")]
        tls = (
            self._tls()
            if secure or self.ca is not None or self.cert is not None
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        to_socket = socket and httpx.AsyncHTTPTransport(uds=socket, limits=limits, verify=tls, trust_env=False)
        try:
            return httpx.AsyncClient(
                transport=to_socket or None,
                verify=tls,
                proxy=httpx.Proxy(self.proxy, ssl_context=tls) if self.proxy in secure else self.proxy,
                mounts={}
                if self.proxy is not None
                else {f"all://{httpx.URL(url).netloc.decode()}": None for url in local},
                trust_env=self.proxy is None and len(local) < len(base_urls),
                limits=limits,
                timeout=httpx.Timeout(None),  # for single reads and writes: one deadline bounds the whole request
            )
        except ImportError as error:
            raise MissingDependency("a SOCKS proxy needs 'socksio': pip install 'httpx[socks]'") from error
        except (ValueError, httpx.InvalidURL):  # its message has the URL, perhaps with a password
            which = "a proxy in the environment (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY)" if self.proxy is None else "proxy"
            raise ConfigError(f"{which} must be http://host:port, https://host:port or socks5://host:port") from None

    def _tls(self) -> ssl.SSLContext:
        tls = self._trusting()
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            try:
                tls.load_cert_chain(self.cert, password=_NO_PASSWORD)
            except (OSError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"cert={self.cert!s} has no certificate with its key that can be read ({error}): name a PEM file "
                    "that has both, without a password"
                ) from None
        return tls

    def _trusting(self) -> ssl.SSLContext:
        source, path = "ca", self.ca
        try:
            if path is not None:
                is_folder = Path(path).is_dir()
                return ssl.create_default_context(
                    cafile=None if is_folder else path, capath=path if is_folder else None
                )
            source = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), "certifi")
            path = os.environ.get(source)
            return httpx.create_ssl_context()
        except (OSError, TypeError) as error:  # ssl.SSLError is an OSError: no certificate in the file
            raise ConfigError(
                f"{source}={path!s} has no certificates that can be read ({error}): name a PEM file"
            ) from error


def is_loopback(url: str) -> bool:
    """Return whether the host of a URL is `localhost` or a loopback address. Nothing is looked up."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def untrusted(error: BaseException, url: str) -> Untrusted | None:
    """Return what to raise if a request failed because the certificate was not accepted; None: for another reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if cause.verify_code in _WRONG_HOST:
        advice = "use a host in the URL that the certificate is for"
    elif cause.verify_code in _WRONG_TIME:
        advice = "renew it, or set the clock of this machine"
    else:
        advice = "give the certificate of its authority as ca=… (--ca FILE), or in SSL_CERT_FILE"
    return Untrusted(f"the certificate of {url} is not trusted ({cause.verify_message.rstrip('.')}): {advice}")
