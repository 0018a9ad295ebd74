"""TLS of a server: its certificate is read again when its files change, and the one before it stays if that fails."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from leasekit.errors import ConfigError
from leasekit.server.http.reach import TlsFiles

__all__ = ["Certificates"]

_LOOK = 1.0  # seconds between two looks at the files
_NO_PASSWORD = ""  # else OpenSSL asks for one on the terminal

logger = logging.getLogger("leasekit.server")


class Certificates:
    """The certificate of a server, with its key and the authorities of its clients."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises `ConfigError` if they cannot be used."""
        self._files = files
        self._seen = self._look()
        self.context = self._read()
        """For new connections. Old ones keep what they began with."""

    async def follow(self, renewed: Callable[[], Awaitable[None]], *, every: float = _LOOK) -> None:
        """Read the files again whenever they have changed, and call `renewed` with the new context in place."""
        while True:
            await asyncio.sleep(every)
            if await asyncio.to_thread(self.renew):
                await renewed()

    def renew(self) -> bool:
        """Read the files again if they have changed; return whether there is a new context."""
        seen = self._look()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self.context = self._read()
        except ConfigError as error:
            logger.error("the certificate was changed, and cannot be used: the one before it stays: %s", error)
            return False
        logger.warning("the certificate was changed: new connections get it")
        return True

    def _look(self) -> list[tuple[int, int, int] | None]:
        paths = (self._files.cert, self._files.key, self._files.client_ca)
        return [_state(path) for path in paths if path is not None]

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._files.cert, self._files.key, password=_NO_PASSWORD)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._named()} cannot be used: {_why(error)}") from None
        if self._files.client_ca is not None:
            try:
                context.load_verify_locations(self._files.client_ca)
            except (OSError, ValueError) as error:
                what = f"the authorities of clients in {self._files.client_ca}"
                raise ConfigError(f"{what} cannot be used: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _named(self) -> str:
        key = "" if self._files.key is None else f" with the key in {self._files.key}"
        return f"the certificate in {self._files.cert}{key}"


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)) + "; it must be in PEM, and its key without a password"
