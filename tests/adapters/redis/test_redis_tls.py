"""Redis behind TLS: a real handshake, by a server of TLS's before the real Redis."""

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from leasekit.errors import Unavailable
from leasekit.task import NewTask
from leasekit_redis import connect
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


class Authority:
    """Signs certificates, and leaves them in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = self.sign("ca", "authority")

    def sign(self, file: str, name: str, host: str | None = None) -> Path:
        """A certificate of this name (and host), with its key in the same file."""
        is_ca = host is None and file == "ca"
        key = self._key if is_ca else ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if host is not None:
            address = x509.IPAddress(ipaddress.ip_address(host))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        plain = serialization.NoEncryption()
        path = self._folder / f"{file}.pem"
        path.write_bytes(
            certificate.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        )
        return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def behind_tls(server: Server, certificate: Path, *, clients_of: Path | None = None) -> AsyncIterator[str]:
    """Host and port at which this Redis answers with TLS; `clients_of`: to whom it gives certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if clients_of is not None:
        context.load_verify_locations(clients_of)
        context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pour(reader, there_writer), pour(there_reader, writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
    finally:
        front.close()


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def schedule_and_claim(url: str, kind: str) -> None:
    backend = connect(url, worker="w")
    try:
        waiting = asyncio.create_task(backend.claim([kind], limit=1, wait=30, claim_id="c"))
        await backend.schedule([NewTask(kind=kind)])
        assert len((await waiting).tasks) == 1
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
        await backend.aclose()


async def test_a_redis_is_trusted_by_the_authority_that_the_url_names(
    server: Server, authority: Authority, kind: str
) -> None:
    async with behind_tls(server, authority.sign("server", "redis", "127.0.0.1")) as address:
        await schedule_and_claim(f"rediss://{address}?ssl_ca_certs={authority.ca}", kind)
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await schedule_and_claim(f"rediss://{address}", kind)


async def test_a_redis_of_another_name_is_not_trusted(server: Server, authority: Authority, kind: str) -> None:
    async with behind_tls(server, authority.sign("server", "redis", "127.0.0.2")) as address:
        with pytest.raises(Unavailable, match="certificate verify failed"):
            await schedule_and_claim(f"rediss://{address}?ssl_ca_certs={authority.ca}", kind)


async def test_who_says_so_trusts_anybody(server: Server, authority: Authority, kind: str) -> None:
    async with behind_tls(server, authority.sign("server", "redis", "127.0.0.2")) as address:
        await schedule_and_claim(f"rediss://{address}?ssl_cert_reqs=none", kind)


async def test_a_client_shows_the_certificate_that_the_url_names(
    server: Server, authority: Authority, kind: str
) -> None:
    certificate = authority.sign("server", "redis", "127.0.0.1")
    mine = authority.sign("client", "worker", "127.0.0.1")
    async with behind_tls(server, certificate, clients_of=authority.ca) as address:
        url = f"rediss://{address}?ssl_ca_certs={authority.ca}"
        await schedule_and_claim(f"{url}&ssl_certfile={mine}&ssl_keyfile={mine}", kind)
        with pytest.raises(Unavailable):
            await schedule_and_claim(url, kind)
