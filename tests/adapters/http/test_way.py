"""The way to a server behind proxies: headers, certificates, proxies, and the environment that httpx users know."""

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import certifi
import pytest

import leasekit
import leasekit_http
from leasekit.errors import ConfigError, ProtocolError, Unavailable, Untrusted
from leasekit.tokens import new_secret
from leasekit_http.way import is_loopback
from tests.adapters.http.conftest import Meet, Stranger, serving
from tests.authority import Authority

SECRET = "hunter2"
PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
TOKENS = ("LEASEKIT_TOKEN", "LEASEKIT_TOKEN_FILE")
EMPTY = b'{"kinds":{}}'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "LEASEKIT_URL", "LEASEKIT_HEADERS", *TOKENS, *PROXIES):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


class Seen(list[bytes]):
    """The requests to a server that answers them all alike."""

    async def __call__(self, stranger: Stranger) -> None:
        self.append(stranger.request)
        await stranger.answer(EMPTY)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def port(seen: Seen) -> AsyncIterator[int]:
    async with serving(seen) as port:
        yield port


async def stats(url: str, **options: Any) -> None:
    async with leasekit.connect(url, retry_for=0, **options) as client:
        await client.astats()


# Headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_headers_are_sent_with_each_request(port: int, seen: Seen) -> None:
    await stats(f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {SECRET}", "User-Agent": "shop"})
    assert f"\r\nauthorization: Bearer {SECRET}\r\n".encode() in seen[0]
    assert b"\r\nuser-agent: shop\r\n" in seen[0]


BAD = [
    {"Content-Length": SECRET},
    {"LeaseKit-Request": SECRET},
    {"a": f"{SECRET}\r\nb: c"},
    {"a": f"{SECRET}é"},
    {"a": [SECRET]},
    {f"{SECRET} a": "b"},
    {1: SECRET},
    [("a", SECRET)],
]


@pytest.mark.parametrize("headers", BAD, ids=repr)
def test_a_header_that_cannot_be_sent_is_refused_and_not_repeated(headers: Any) -> None:
    with pytest.raises(ConfigError, match="header") as refused:
        leasekit_http.connect("http://127.0.0.1:1", worker="w", headers=headers)
    assert SECRET not in str(refused.value)


def test_no_repr_has_a_header_or_a_proxys_password() -> None:
    options: Any = {"headers": {"authorization": SECRET}, "proxy": f"http://u:{SECRET}@127.0.0.1:1"}
    client = leasekit.connect("http://127.0.0.1:1", **options)
    worker = leasekit.Worker("http://127.0.0.1:1", **options)
    assert SECRET not in f"{client!r} {client.__connection__().backend!r} {worker!r}"
    client.close()


@pytest.mark.anyio
async def test_headers_of_the_environment_go_to_the_service_of_the_environment_alone(
    port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEASEKIT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("LEASEKIT_HEADERS", f"Authorization: Bearer {SECRET}\nX-Team: a:b\n")
    async with leasekit.connect(retry_for=0) as client:
        await client.astats()
    assert f"\r\nauthorization: Bearer {SECRET}\r\nx-team: a:b\r\n".encode() in seen[0]
    await stats(f"http://127.0.0.1:{port}/elsewhere")
    await stats(f"http://127.0.0.1:{port}", headers={})
    assert all(SECRET.encode() not in request for request in seen[1:])
    monkeypatch.setenv("LEASEKIT_HEADERS", SECRET)
    with pytest.raises(ConfigError, match="LEASEKIT_HEADERS must have lines of the form") as refused:
        leasekit.connect()
    assert SECRET not in str(refused.value)


def test_credentials_in_the_clear_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for url in ("http://127.0.0.1:1", "https://tasks.example", "http://tasks.example"):
        leasekit_http.connect(url, worker="w", headers={"Authorization": SECRET})
    assert [record.getMessage() for record in caplog.records] == [
        "credentials for http://tasks.example travel in the clear: use https://"
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "advice"), [("401 Unauthorized", "headers=…"), ("407 Auth", "proxy=…")])
async def test_an_answer_that_asks_for_credentials_says_where_they_are_given(
    status: str, advice: str, meet: Meet
) -> None:
    async def refuse(stranger: Stranger) -> None:
        await stranger.answer(b"who are you?", status=status)

    async with meet(refuse) as backend:
        with pytest.raises(Unavailable, match=advice):
            await backend.stats()


# Proxies ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_proxy_is_asked_with_its_password(port: int, seen: Seen) -> None:
    await stats("http://tasks.invalid", proxy=f"http://user:{SECRET}@127.0.0.1:{port}")
    assert seen[0].startswith(b"GET http://tasks.invalid/v1/stats HTTP/1.1\r\n")
    assert b"roxy-authorization: basic " + base64.b64encode(f"user:{SECRET}".encode()).lower() in seen[0].lower()


@pytest.mark.anyio
async def test_https_goes_through_a_tunnel(seen: Seen) -> None:
    async def refuse(stranger: Stranger) -> None:
        seen.append(stranger.request)
        await stranger.answer(b"", status="407 Proxy Authentication Required")

    async with serving(refuse) as port:
        with pytest.raises(Unavailable, match="407"):
            await stats("https://tasks.invalid", proxy=f"http://127.0.0.1:{port}")
    assert seen[0].startswith(b"CONNECT tasks.invalid:443 ")


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
async def test_a_proxy_of_the_environment_is_asked(
    name: str, port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    await stats("http://tasks.invalid")
    assert seen[0].startswith(b"GET http://tasks.invalid/v1/stats ")


@pytest.mark.anyio
async def test_no_proxy_of_the_environment_is_asked_for_this_machine_or_what_no_proxy_names(
    port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "invalid")
    await stats(f"http://127.0.0.1:{port},tasks.invalid")
    assert seen[0].startswith(b"GET /v1/stats ")
    with pytest.raises(Unavailable, match=r"Name|name|resolve"):  # asked for itself
        await stats("http://tasks.invalid")
    with pytest.raises(Unavailable, match="connection attempts failed"):  # of the proxy
        await stats("http://tasks.example")


@pytest.mark.anyio
async def test_a_proxy_of_the_environment_that_cannot_be_used_does_not_matter_to_this_machine(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", f"gopher://u:{SECRET}@host")
    await stats(f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="a proxy in the environment") as refused:
        leasekit.connect("http://tasks.example")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("proxy", [f"ftp://u:{SECRET}@host", SECRET, f"http://{SECRET}:x"])
def test_a_proxy_that_cannot_be_used_is_refused_and_not_repeated(proxy: Any) -> None:
    with pytest.raises(ConfigError, match="proxy must be http://host:port") as refused:
        leasekit.connect("http://tasks.example", proxy=proxy)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("options", [{"ca": "x"}, {"proxy": "x"}, {"token": "x"}, {"cert": "x"}], ids=repr)
def test_a_socket_has_no_certificate_and_no_proxy(options: Any) -> None:
    with pytest.raises(ConfigError, match="without ca=, proxy=, token= and cert="):
        leasekit.connect("http+unix:///run/a.sock", **options)


# Access tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_token_is_sent_with_each_request_and_is_in_no_repr(port: int, seen: Seen) -> None:
    secret = new_secret()
    await stats(f"http://127.0.0.1:{port}", token=secret)
    assert f"authorization: bearer {secret}".lower() in seen[0].decode().lower()
    with leasekit.connect(f"http://127.0.0.1:{port}", token=secret) as client:
        assert secret not in repr(client) + repr(client.url)


@pytest.mark.anyio
@pytest.mark.parametrize("is_file", [False, True])
async def test_a_token_of_the_environment_goes_to_the_service_of_the_environment_alone(
    port: int, seen: Seen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_file: bool
) -> None:
    secret = new_secret()
    if is_file:
        (tmp_path / "token").write_text(f"{secret}\n")
        monkeypatch.setenv("LEASEKIT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("LEASEKIT_TOKEN", new_secret() if is_file else secret)
    monkeypatch.setenv("LEASEKIT_URL", f"http://127.0.0.1:{port}")
    await stats(f"http://localhost:{port}")
    assert secret.encode() not in seen[0]
    await stats(f"http://127.0.0.1:{port}")
    assert secret.encode() in seen[1]


def test_a_token_is_not_sent_in_the_clear_to_another_machine_unless_one_says_so() -> None:
    with pytest.raises(ConfigError, match="would travel in the clear: use https://") as refused:
        leasekit.connect("http://tasks.example", token=(secret := new_secret()))
    assert secret not in str(refused.value)
    with pytest.raises(ConfigError, match="in the clear"):
        leasekit.connect("http://tasks.example", headers={"Authorization": f"Bearer {secret}"})
    leasekit_http.connect("http://tasks.example", worker="w", token=secret, plain_http=True)
    leasekit_http.connect("https://tasks.example", worker="w", token=secret)


@pytest.mark.parametrize("token", ["", "lk_", "x" * 52, 5, "lk_" + "0" * 49], ids=repr)
def test_what_is_no_token_is_refused_and_not_repeated(token: Any) -> None:
    with pytest.raises(ConfigError, match="must be lk_ and 49 characters") as refused:
        leasekit.connect("https://tasks.example", token=token)
    assert not token or str(token) not in str(refused.value).replace("lk_ and", "")


def test_a_token_and_a_header_that_say_who_calls_contradict_one_another() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        leasekit.connect("https://tasks.example", token=new_secret(), headers={"Authorization": "Basic x"})


@pytest.mark.anyio
async def test_no_redirect_is_followed_with_a_token(meet: Meet) -> None:
    other = Seen()
    async with serving(other) as elsewhere:

        async def move(stranger: Stranger) -> None:
            place = f"location: http://127.0.0.1:{elsewhere}/v1/stats\r\n"
            await stranger.answer(b"", status=f"302 Found\r\n{place.strip()}")

        async with serving(move) as here:
            with pytest.raises(ProtocolError, match="redirects are not followed"):
                await stats(f"http://127.0.0.1:{here}", token=new_secret())
    assert other == []


# Certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def certified(authority: Authority, seen: Seen, *, host: str, days: int = 1) -> AsyncIterator[str]:
    """A server at 127.0.0.1 whose certificate is for this host, and for so many days from now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.sign("server", "leasekit", host, days=days))
    async with serving(seen, tls=context) as port:
        yield f"https://127.0.0.1:{port}"


@pytest.fixture
async def secure(authority: Authority, seen: Seen) -> AsyncIterator[str]:
    async with certified(authority, seen, host="127.0.0.1") as url:
        yield url


@pytest.fixture
async def wrong(authority: Authority, seen: Seen) -> AsyncIterator[str]:
    async with certified(authority, seen, host="127.0.0.2") as url:
        yield url


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_a_certificate_of_a_public_authority_is_trusted(
    scheme: str, secure: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certifi, "where", lambda: str(authority.ca))
    await stats(secure.replace("https", scheme))


@pytest.mark.anyio
async def test_ca_and_the_environment_name_what_is_trusted(
    secure: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stats(secure, ca=authority.ca)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    await stats(secure)
    with pytest.raises(Untrusted):  # ca comes first
        await stats(secure, ca=certifi.where())


@pytest.mark.anyio
async def test_a_certificate_that_is_not_trusted_is_said_at_once_with_what_to_do(secure: str) -> None:
    async with leasekit.connect(secure) as client:
        with pytest.raises(Untrusted, match=r"issuer.*give the certificate of its authority as ca=.*SSL_CERT_FILE"):
            await client.astats()


@pytest.mark.anyio
async def test_a_certificate_for_another_host_is_said_at_once(wrong: str, authority: Authority) -> None:
    async with leasekit.connect(wrong, ca=authority.ca) as client:
        with pytest.raises(Untrusted, match=r"IP address mismatch.*use a host in the URL that the certificate is for"):
            await client.astats()


@pytest.mark.anyio
async def test_a_certificate_that_has_expired_is_said_at_once(authority: Authority, seen: Seen) -> None:
    async with (
        certified(authority, seen, host="127.0.0.1", days=-1) as url,
        leasekit.connect(url, ca=authority.ca) as client,
    ):
        with pytest.raises(Untrusted, match=r"expired.*renew it, or set the clock of this machine"):
            await client.astats()


@pytest.mark.anyio
async def test_another_address_is_asked_if_the_certificate_of_one_is_not_trusted(
    secure: str, wrong: str, authority: Authority, seen: Seen
) -> None:
    async with leasekit.connect(f"{wrong},{secure.removeprefix('https://')}", ca=authority.ca) as client:
        await client.astats()
    assert len(seen) == 1


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_ca_that_cannot_be_read_is_refused_with_its_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ca=.*ca\.pem has no certificates"):
        leasekit.connect("https://tasks.example", ca=path)


def test_a_file_of_the_environment_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/does/not/exist")
    with pytest.raises(ConfigError, match="SSL_CERT_FILE=/does/not/exist has no certificates"):
        leasekit.connect("https://tasks.example")


@pytest.mark.parametrize(
    ("url", "is_local"),
    [("http://127.9.9.9:1", True), ("http://[::1]/a", True), ("http://localhost", True), ("http://10.0.0.1", False)],
)
def test_this_machine_is_known_by_name_or_address(url: str, is_local: bool) -> None:
    assert is_loopback(url) is is_local
