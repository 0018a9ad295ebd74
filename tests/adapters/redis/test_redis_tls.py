"""Redis behind TLS: a real handshake, by a server of TLS's before the real Redis."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from leasekit.errors import Unavailable
from leasekit.task import NewTask
from leasekit_redis import connect
from tests.authority import Authority
from tests.redis_server import Server

pytestmark = pytest.mark.anyio


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
