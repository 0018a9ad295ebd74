"""A server that other machines can reach: TLS, certificates that change, proxies, and the names of the server."""

import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

import leasekit
from leasekit.errors import AccessDenied, ConfigError, Unavailable, Untrusted
from leasekit.server.http.reach import Reach, TlsFiles
from leasekit.server.http.tls import Certificates
from tests.authority import Authority

PATIENCE = 30.0
COMMAND = (sys.executable, "-m", "leasekit")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def cert(authority: Authority) -> Path:
    return authority.sign("server", "127.0.0.1", "127.0.0.1")


@contextmanager
def serving(store: Path, *options: str) -> Iterator[str]:
    """A server process; the URL that it printed."""
    with running(store, *options) as (_, url):
        yield url


@contextmanager
def running(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process, and the URL that it printed."""
    command = [*COMMAND, "serve", "--port", "0", "--store", f"sqlite:///{store}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "listening on" in line, process.communicate()
            yield process, line.split()[-1]
        finally:
            process.kill()


def token(store: Path, name: str, *scopes: str) -> str:
    chosen = [part for scope in scopes for part in ("--scope", scope)]
    made = subprocess.run(
        [*COMMAND, "token", "create", name, "--store", f"sqlite:///{store}", *chosen],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def peer_of(url: str, context: ssl.SSLContext) -> bytes:
    """The certificate that a server shows."""
    host, _, port = url.partition("://")[2].rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def soon(fact: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_an_idle_client_holds_up_no_stop(tmp_path: Path, authority: Authority, cert: Path) -> None:
    """Its close is not answered, and nobody else could serve the store for 30 s."""
    with running(tmp_path / "tasks.db", "--tls-cert", str(cert)) as (process, url):
        host, _, port = url.partition("://")[2].rpartition(":")
        context = ssl.create_default_context(cafile=authority.ca)
        with (
            socket.create_connection((host, int(port)), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            secure.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert secure.recv(4096).startswith(b"HTTP/1.1 200 ")
            process.terminate()
            assert process.wait(20) == 0


@pytest.mark.slow
def test_a_server_with_tls_and_tokens_is_used_with_both(tmp_path: Path, authority: Authority, cert: Path) -> None:
    store = tmp_path / "tasks.db"
    submitter, reader = token(store, "submitter", "submit"), token(store, "reader", "read")
    with serving(store, "--tls-cert", str(cert), "--require-tokens") as url:
        assert url.startswith("https://")
        ca = str(authority.ca)
        with leasekit.connect(url, token=submitter, retry_for=0, ca=ca) as client:
            assert client.schedule("report").created
            with pytest.raises(AccessDenied, match="lacks the scope read: it has submit"):
                client.stats()
        with leasekit.connect(url, token=reader, retry_for=0, ca=ca) as client:
            assert client.stats().kinds == {"report": {"new": 1}}
        with leasekit.connect(url, retry_for=0, ca=ca) as client, pytest.raises(AccessDenied, match="LEASEKIT_TOKEN"):
            client.stats()
        with leasekit.connect(url, token=reader, retry_for=0) as client, pytest.raises(Untrusted):
            client.stats()
        plain = url.replace("https", "http")
        with leasekit.connect(plain, token=reader, retry_for=0) as client, pytest.raises(Unavailable):
            client.stats()
        with leasekit.connect(f"sqlite:///{store}") as client:  # over the socket beside the store: no token, no TLS
            assert [info.name for info in client.tokens()] == ["submitter", "reader"]


@pytest.mark.slow
def test_a_new_certificate_is_served_and_a_broken_one_is_not(tmp_path: Path, authority: Authority, cert: Path) -> None:
    served, context = tmp_path / "served.pem", ssl.create_default_context(cafile=authority.ca)
    shutil.copy(cert, served)
    with serving(tmp_path / "tasks.db", "--tls-cert", str(served)) as url:
        first = peer_of(url, context)
        other = authority.sign("other", "127.0.0.1", "127.0.0.1")
        shutil.copy(other, served)
        soon(lambda: peer_of(url, context) != first)
        second = peer_of(url, context)
        served.write_text("broken")
        time.sleep(0)  # the server looks once a second: two looks later
        until = time.monotonic() + 2.5
        soon(lambda: peer_of(url, context) == second and time.monotonic() > until)
        shutil.copy(cert, served)
        soon(lambda: peer_of(url, context) == first)


@pytest.mark.slow
def test_a_client_needs_a_certificate_where_the_server_asks_for_one(
    tmp_path: Path, authority: Authority, cert: Path
) -> None:
    with serving(tmp_path / "tasks.db", "--tls-cert", str(cert), "--tls-client-ca", str(authority.ca)) as url:
        mine = authority.sign("client", "client", "127.0.0.1")
        with leasekit.connect(url, ca=authority.ca, cert=mine, retry_for=0) as client:
            assert client.stats().kinds == {}
        with leasekit.connect(url, ca=authority.ca, retry_for=0) as client, pytest.raises(Unavailable):
            client.stats()
        other = Authority(tmp_path).sign("stranger", "client", "127.0.0.1")
        with leasekit.connect(url, ca=authority.ca, cert=other, retry_for=0) as client, pytest.raises(Unavailable):
            client.stats()


def test_old_versions_of_tls_are_refused(cert: Path) -> None:
    assert Certificates(TlsFiles(cert=cert)).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_changes_is_read_and_the_old_one_stays_if_that_fails(
    tmp_path: Path, cert: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    served = tmp_path / "served.pem"
    shutil.copy(cert, served)
    certificates = Certificates(TlsFiles(cert=served))
    first = certificates.context
    assert not certificates.renew()
    served.write_text("broken")
    assert not certificates.renew()
    assert certificates.context is first
    assert "the one before it stays" in caplog.text
    shutil.copy(authority.sign("next", "127.0.0.1", "127.0.0.1"), served)
    assert certificates.renew()
    assert certificates.context is not first


def test_a_certificate_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, cert: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for files in (
        TlsFiles(cert=tmp_path / "none.pem"),
        TlsFiles(cert=tmp_path / "empty.pem"),
        TlsFiles(cert=cert, key=tmp_path / "empty.pem"),
        TlsFiles(cert=cert, client_ca=tmp_path / "empty.pem"),
    ):
        with pytest.raises(ConfigError, match=r"(none|empty)\.pem"):
            Certificates(files)


# Who can reach a server ------------------------------------------------------------------------------------------


def reach(**options: Any) -> Reach:
    defaults: dict[str, Any] = {"is_open": False, "has_tls": False, "needs_tokens": False, "names": [], "proxies": []}
    return Reach.of(**(defaults | options))


def request(host: str = "localhost", client: str = "127.0.0.1", **headers: str) -> Request:
    raw = [(b"host", host.encode())] + [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, "client": (client, 1)})


def test_an_address_that_others_can_reach_needs_tls_or_a_proxy_and_always_tokens() -> None:
    with pytest.raises(ConfigError, match="--tls-cert"):
        reach(is_open=True)
    with pytest.raises(ConfigError, match="--tls-cert"):
        reach(is_open=True, needs_tokens=True)
    assert reach(is_open=True, has_tls=True).needs_tokens
    assert reach(is_open=True, proxies=["10.0.0.7"]).needs_tokens
    assert reach(proxies=["127.0.0.1"]).needs_tokens
    assert not reach().needs_tokens
    with pytest.raises(ConfigError, match=r"10\.0\.0\.0/24, got 'proxy\.example'"):
        reach(proxies=["proxy.example"])


def allowed(of: Reach, asked: Request, *, is_probe: bool = False) -> bool:
    try:
        of.check(asked, is_probe=is_probe)
    except HTTPException as error:
        assert error.status_code == 403  # noqa: PT017
        return False
    return True


def test_the_host_header_names_the_server_also_with_tls_and_tokens() -> None:
    local = reach()
    assert [allowed(local, request(host)) for host in ("localhost:8077", "127.0.0.1", "[::1]:1")] == [True] * 3
    assert [allowed(local, request(host)) for host in ("evil.example", "10.0.0.5", "")] == [False] * 3
    opened = reach(is_open=True, has_tls=True, names=["Tasks.Example"])
    fine = ("tasks.example:443", "tasks.example.", "10.0.0.5:8077", "[2001:db8::1]", socket.gethostname())
    assert [allowed(opened, request(host)) for host in fine] == [True] * len(fine)
    assert not allowed(opened, request("evil.example"))
    assert not allowed(opened, request("tasks.example", origin="https://evil.example"))
    assert allowed(opened, request("tasks.example", origin="https://tasks.example"))


@pytest.mark.parametrize(("scheme", "is_fine"), [("https", False), ("http", True)])
def test_a_page_without_tls_has_no_forms_where_the_server_has_tls(scheme: str, *, is_fine: bool) -> None:
    asked = request("127.0.0.1:8077", origin="http://127.0.0.1:8077")
    asked.scope["scheme"] = scheme
    assert allowed(reach(), asked) is is_fine


@pytest.mark.parametrize("name", ["", "*", "https://tasks.example", "a, b"])
def test_a_name_that_no_host_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--server-name must be a name or an address"):
        reach(names=[name])


def test_a_server_behind_a_proxy_is_reached_through_it_alone() -> None:
    behind = reach(is_open=True, proxies=["10.0.0.0/24"], names=["tasks.example"])
    assert allowed(behind, request("tasks.example", "10.0.0.9"))
    assert not allowed(behind, request("tasks.example", "10.0.1.9"))
    assert not allowed(behind, request("tasks.example", "10.0.1.9", x_forwarded_for="10.0.0.9"))
    assert allowed(behind, request("10.0.1.9", "10.0.1.1"), is_probe=True)


def test_behind_a_proxy_the_origin_is_that_of_its_https_whatever_host_it_sends() -> None:
    behind = reach(proxies=["10.0.0.0/24"], names=["tasks.example"])
    public = "https://tasks.example"
    assert allowed(behind, request("tasks.example", "10.0.0.9", origin=public))
    assert allowed(behind, request("10.0.0.5:8077", "10.0.0.9", origin=public))
    assert allowed(
        behind, request("10.0.0.5", "10.0.0.9", origin=f"{public}:8443", x_forwarded_host="tasks.example:8443")
    )
    for origin in ("https://evil.example", "http://tasks.example", f"{public}:8443", f"{public}.evil.example", "null"):
        assert not allowed(behind, request("tasks.example", "10.0.0.9", origin=origin)), origin
    lying = {"origin": "https://evil.example", "x_forwarded_host": "evil.example"}
    assert not allowed(behind, request("tasks.example", "10.0.0.9", **lying)), "not a name of the server"
    assert not allowed(reach(names=["tasks.example"]), request("127.0.0.1", origin=public)), "there is no proxy"


def test_the_client_of_a_request_is_what_a_known_proxy_says() -> None:
    behind = reach(is_open=True, proxies=["10.0.0.0/24"])
    assert behind.peer(request(client="10.0.0.9", x_forwarded_for="9.9.9.9, 1.2.3.4")) == "1.2.3.4"
    assert behind.peer(request(client="10.0.0.9", x_forwarded_for="1.2.3.4, 10.0.0.8")) == "1.2.3.4"
    assert behind.peer(request(client="10.0.1.9", x_forwarded_for="1.2.3.4")) == "10.0.1.9"
    lines = request(client="10.0.0.9", x_forwarded_for="9.9.9.9", **{"x-forwarded-for": "1.2.3.4"})
    assert behind.peer(lines) == "1.2.3.4", "a proxy may add a line of its own"
    assert reach().peer(request(client="127.0.0.1", x_forwarded_for="1.2.3.4")) == "127.0.0.1"
    assert reach().peer(request(client="2001:db8::1:2:3:4")) == "2001:db8::/64"


@pytest.mark.parametrize(
    ("told", "peer"),
    [
        ("1.2.3.4:5678", "1.2.3.4"),
        ("[2001:db8::1]:5678", "2001:db8::/64"),
        ("[2001:db8::1]", "2001:db8::/64"),
        ("2001:db8::1", "2001:db8::/64"),
        ("1.2.3.4:5678, 10.0.0.8:1", "1.2.3.4"),
        ("1.2.3.4, ", "1.2.3.4"),
        ("1.2.3.4, unknown", "10.0.0.9"),
        ("unknown:80", "10.0.0.9"),
        ("", "10.0.0.9"),
    ],
)
def test_the_address_of_a_client_has_no_port_and_what_is_none_counts_as_the_proxy(told: str, peer: str) -> None:
    behind = reach(is_open=True, proxies=["10.0.0.0/24"])
    assert behind.peer(request(client="10.0.0.9", x_forwarded_for=told)) == peer
