"""The console behind a small proxy that has TLS, and keeps the Host header or writes its own."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

import pytest

from leasekit.server.http.reach import Reach
from tests.authority import Authority
from tests.server.console.test_login import FORM
from tests.server.http.conftest import Running, run

NAME = "tasks.example"


@contextmanager
def proxy(server: Running, cert: Path, *, keeps_host: bool) -> Iterator[int]:
    """Pass requests on, each with a connection of its own; the port of the proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            sent = {name.lower(): value for name, value in self.headers.items()}
            if not keeps_host:
                sent["host"] = f"127.0.0.1:{server.port}"
            with closing(HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
                connection.request(self.command, self.path, body, sent)
                answer = connection.getresponse()
                content = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"transfer-encoding", "content-length", "connection"}:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - its name is that of the method

        def log_message(self, *about: object) -> None:
            """Say nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("keeps_host", [True, False])
def test_forms_work_behind_a_proxy_and_those_of_other_origins_are_refused(tmp_path: Path, keeps_host: bool) -> None:
    authority = Authority(tmp_path)
    reach = Reach.of(is_open=False, has_tls=False, needs_tokens=False, names=[NAME], proxies=["127.0.0.1"])
    store = f"sqlite:///{tmp_path}/tasks.db"
    with run(store, console="on", reach=reach) as server:
        secret = server.give_token()
        with proxy(server, authority.sign("proxy", "127.0.0.1", "127.0.0.1"), keeps_host=keeps_host) as port:
            trusting = ssl.create_default_context(cafile=authority.ca)

            def post(page: str, origin: str, cookie: str = "", **form: str) -> tuple[int, str]:
                headers = {"host": NAME, "origin": origin, "content-type": FORM, "cookie": cookie}
                with closing(HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)) as connection:
                    connection.request("POST", f"/console/{page}", urlencode(form), headers)
                    answer = connection.getresponse()
                    return answer.status, answer.getheader("set-cookie") or ""

            status, cookie = post("login", f"https://{NAME}", token=secret)
            assert (status, "; Secure" in cookie) == (303, True)
            cookie = cookie.partition(";")[0]
            assert post("do", f"https://{NAME}", cookie, act="pause", kind="k")[0] == 303
            for origin in ("https://evil.example", f"http://{NAME}", "null"):
                assert post("do", origin, cookie, act="open", kind="k")[0] == 403, origin
        assert [gate["kind"] for gate in server.get("/v1/gates")["gates"]] == ["k"]
