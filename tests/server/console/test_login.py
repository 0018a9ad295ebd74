"""Who may look and act: sessions that begin with an access token, judged for each request."""

import asyncio
import socket
import uuid
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from leasekit.server.console import site, streams
from leasekit.server.console.desk import form_of
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.reach import LOCAL_REACH, Reach
from leasekit.server.store.postgres.store import PostgresStore
from leasekit.tokens import digest_of, new_secret
from tests.postgres_server import PostgresServer
from tests.server.console.conftest import Seen, Site, seen
from tests.server.http.conftest import Answer, run
from tests.waiting import eventually

FORM = "application/x-www-form-urlencoded"


class Door:
    """A console that needs access tokens, and a browser's cookie."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.origin = f"http://127.0.0.1:{site.server.port}"
        self.admin = self.token("admin", "submit", "work", "read", "operate")

    def token(self, name: str, *scopes: str, kinds: str = "*") -> str:
        """Make an access token, and return its secret."""
        secret = new_secret()
        body = {
            "id": uuid.uuid4().hex,
            "name": name,
            "digest": digest_of(secret).hex(),
            "scopes": scopes,
            "kinds": [kinds],
        }
        headers = {"authorization": f"Bearer {self.admin}"} if hasattr(self, "admin") else {}
        answer = self.site.server.call("POST", "/v1/tokens", body, **headers)
        assert answer.status == 200, answer
        return secret

    def api(self, method: str, path: str, body: object = None) -> Answer:
        return self.site.server.call(method, path, body, authorization=f"Bearer {self.admin}")

    def post(self, page: str, cookie: str = "", **form: str) -> Answer:
        body = urlencode(form).encode()
        headers = {"content_type": FORM, "origin": self.origin} | ({"cookie": cookie} if cookie else {})
        return self.site.server.call("POST", f"/console/{page}", body, **headers)

    def log_in(self, secret: str) -> str:
        """Return the cookie of a new session."""
        answer = self.post("login", token=secret)
        assert (answer.status, answer.headers["location"]) == (303, "./"), answer
        return answer.headers["set-cookie"].partition(";")[0]

    def see(self, page: str, cookie: str = "", **headers: str) -> Seen:
        return self.site.see(page, **headers, **({"cookie": cookie} if cookie else {}))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with run(f"sqlite:///{tmp_path}/tasks.db", console="on") as server:
        yield Door(Site(server))


def test_without_a_session_each_page_leads_to_the_login(door: Door) -> None:
    for page in ("", "tasks", "task?id=t", "do?act=cancel&id=t", "audit"):
        answer = door.site.server.call("GET", f"/console/{page}")
        assert (answer.status, answer.headers["location"]) == (303, "login"), page
    assert door.see("login").status == 200
    assert door.see("console.css").status == 200


def test_what_a_script_asks_for_without_a_session_is_refused(door: Door) -> None:
    assert door.site.server.call("GET", "/console/pulse", sec_fetch_mode="cors").status == 401
    assert door.post("do", act="cancel", id="t").status in (303, 401)


def test_a_token_begins_a_session_whose_cookie_scripts_and_other_sites_cannot_use(door: Door) -> None:
    answer = door.post("login", token=door.admin)
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Path=/console"):
        assert part in cookie, cookie
    assert "Secure" not in cookie, "a browser would not send it over plain HTTP on loopback"
    assert door.admin not in cookie
    assert "admin" in door.see("", cookie.partition(";")[0]).text


@pytest.mark.parametrize("header", ["forwarded", "via", "x_forwarded_for", "x_forwarded_host", "x_forwarded_proto"])
def test_the_cookie_is_for_tls_only_where_a_proxy_says_that_the_host_is_this_machine(door: Door, header: str) -> None:
    body = urlencode({"token": door.admin}).encode()
    headers = {"content_type": FORM, "origin": door.origin, header: "tasks.example"}
    answer = door.site.server.call("POST", "/console/login", body, **headers)
    assert "; Secure" in answer.headers["set-cookie"]


def test_the_cookie_is_for_tls_only_behind_a_proxy_that_is_known_and_says_nothing(tmp_path: Path) -> None:
    reach = Reach.of(is_open=False, has_tls=False, needs_tokens=False, names=[], proxies=["127.0.0.1"])
    with run(f"sqlite:///{tmp_path}/tasks.db", console="on", reach=reach) as server:
        server.give_token()
        origin = f"https://127.0.0.1:{server.port}"
        body = urlencode({"token": server.token or ""}).encode()
        answer = server.call("POST", "/console/login", body, content_type=FORM, origin=origin)
    assert "; Secure" in answer.headers["set-cookie"]


def test_a_wrong_token_is_refused_with_one_answer_and_many_are_locked_out(door: Door) -> None:
    page = seen(door.post("login", token=new_secret()))
    assert page.status == 401
    assert "is not valid" in page.text
    answers = [door.post("login", token=new_secret()).status for _ in range(30)]
    assert answers[-1] == 429


def test_a_browser_that_breaks_off_in_its_form_is_no_error_of_the_server() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"content-type", FORM.encode())]
    with pytest.raises(HTTPException) as refused:
        asyncio.run(form_of(Request({"type": "http", "headers": headers}, receive), LOCAL_REACH.is_own_origin))
    assert refused.value.status_code == 400


def test_a_login_from_another_origin_is_refused(door: Door) -> None:
    body = urlencode({"token": door.admin}).encode()
    answer = door.site.server.call("POST", "/console/login", body, content_type=FORM, origin="http://evil.example")
    assert answer.status == 403


def test_the_api_takes_no_cookie(door: Door) -> None:
    cookie = door.log_in(door.admin)
    assert door.site.server.call("GET", "/v1/stats", cookie=cookie).status == 401


def test_a_session_ends_when_its_token_gets_another_secret_but_not_during_the_overlap(door: Door) -> None:
    cookie = door.log_in(door.token("other", "read"))
    for overlap, status in ((60, 200), (0, 303)):
        rotate = {"digest": uuid.uuid4().hex * 2, "overlap": overlap}
        assert door.api("POST", "/v1/tokens/other/rotate", rotate).status == 200
        assert door.site.server.call("GET", "/console/", cookie=cookie).status == status


def test_a_session_ends_when_it_is_left_and_when_its_token_is_revoked(door: Door) -> None:
    cookie, other = door.log_in(door.admin), door.log_in(door.token("other", "read"))
    assert door.post("logout", cookie).status == 303
    assert door.site.server.call("GET", "/console/", cookie=cookie).status == 303
    assert door.see("", other).status == 200
    assert door.api("DELETE", "/v1/tokens/other").status == 200
    assert door.site.server.call("GET", "/console/", cookie=other).status == 303


def test_a_form_whose_session_ends_while_it_arrives_does_nothing(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = door.token("arrives", "read", "operate")
    cookie = door.log_in(secret)

    async def arrive(request: Request, is_own: Any) -> Mapping[str, str]:
        form = await form_of(request, is_own)
        await asyncio.to_thread(door.api, "DELETE", "/v1/tokens/arrives")
        return form

    monkeypatch.setattr(site, "form_of", arrive)
    answer = door.post("do", cookie, act="pause", kind="arrives")
    assert answer.status in (303, 401)
    assert answer.headers.get("location", "login").startswith("login")
    assert door.api("GET", "/v1/gates").json["gates"] == []


def test_browsers_take_turns_by_their_addresses_until_it_is_known_who_asks(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make up cookies: the search for their sessions delays nobody at another address."""
    queries, callers = door.site.server.engine.queries, list[str]()
    find = queries.session

    async def found(digest: bytes) -> Any:
        callers.append(CALLER.get())
        return await find(digest)

    monkeypatch.setattr(queries, "session", found)
    door.see("", "leasekit-console=made-up")
    assert callers == ["a browser at 127.0.0.1"]


def test_a_session_goes_on_after_a_restart_and_its_cookie_is_not_in_the_store(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/tasks.db"
    with run(store, console="on") as server:
        first = Door(Site(server))
        cookie, admin = first.log_in(first.admin), first.admin
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert cookie.partition("=")[2].encode() not in files
    with run(store, console="on") as server:
        assert Site(server).see("", cookie=cookie).status == 200
        assert server.call("DELETE", "/v1/tokens/admin", authorization=f"Bearer {admin}").status == 200
        assert server.call("GET", "/console/", cookie=cookie).status == 303


def test_a_session_begins_and_ends_at_all_nodes_of_a_database(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    PostgresStore(url).migrate()
    with run(url, console="on") as server, run(url, console="on") as other:
        door = Door(Site(server))
        left, revoked = door.log_in(door.admin), door.log_in(door.token("other", "read"))
        assert [Site(other).see("", cookie=cookie).status for cookie in (left, revoked)] == [200, 200]
        there = {"content_type": FORM, "origin": f"http://127.0.0.1:{other.port}"}
        assert other.call("POST", "/console/logout", b"", cookie=left, **there).status == 303
        assert server.call("GET", "/console/", cookie=left).status == 303
        assert door.api("DELETE", "/v1/tokens/other").status == 200
        eventually(lambda: other.call("GET", "/console/", cookie=revoked).status == 303)


def test_a_reader_is_offered_no_act_and_cannot_act(door: Door) -> None:
    cookie = door.log_in(door.token("reader", "read"))
    door.api("POST", "/v1/kinds", None)
    page = door.see("kind?kind=k", cookie)
    assert not [link for link in page.links if unescape(link).startswith("do?")]
    assert door.see("do?act=pause&kind=k", cookie).status == 403
    assert door.post("do", cookie, act="pause", kind="k").status == 403
    assert door.see("audit", cookie).status == 403
    assert door.api("GET", "/v1/gates").json["gates"] == []


def test_a_token_for_some_kinds_or_without_read_is_told_what_it_lacks(door: Door) -> None:
    for name, scopes, kinds in (("narrow", ["read"], "mail.*"), ("worker", ["work"], "*")):
        secret = door.token(name, *scopes, kinds=kinds)
        answer = door.post("login", token=secret)
        assert "set-cookie" not in answer.headers, "so many sessions would end those of others"
        for page in (seen(answer), door.see("", authorization=f"Bearer {secret}")):
            assert page.status == 403
            assert "needs the scope `read` for all kinds" in page.text


def test_an_act_is_in_the_audit_log_with_the_name_of_its_token(door: Door) -> None:
    cookie = door.log_in(door.admin)
    assert door.post("do", cookie, act="pause", kind="k", reason="a secret reason").status == 303
    page = door.see("audit", cookie)
    assert "admin console kind.pause k" in page.text
    assert "secret reason" not in page.html
    assert door.api("GET", "/v1/gates").json["gates"][0]["changed_by"] == "admin"


def test_the_audit_log_names_the_task_of_an_act(door: Door) -> None:
    cookie = door.log_in(door.admin)
    door.api("POST", "/v1/tasks", {"tasks": [{"kind": "k", "id": "a-task"}]})
    for act, target in (("cancel-chain", "a-task"), ("cancel", "a-task")):
        door.post("do", cookie, act=act, id=target)
    assert door.api("GET", "/v1/audit").json["entries"][0]["target"] == "a-task"


def test_the_audit_log_names_the_fields_that_were_given_and_no_others(door: Door) -> None:
    assert door.api("PUT", "/v1/periodic/hourly", {"kind": "k", "every": 3600}).status == 200
    assert door.api("GET", "/v1/audit").json["entries"][0]["fields"] == ["every", "kind"]


def test_the_page_of_the_login_offers_nothing_else(door: Door) -> None:
    page = door.see("login")
    assert "Find task" not in page.html
    assert "dialog" not in page.tags


def test_pages_of_one_token_are_not_shown_to_another(door: Door) -> None:
    admin, reader = door.log_in(door.admin), door.log_in(door.token("reader", "read"))
    assert "Pause" in door.see("kind?kind=k", admin).text
    assert "Pause" not in door.see("kind?kind=k", reader).text


@pytest.mark.parametrize("end", ["revoked", "left"])
@pytest.mark.parametrize("path", ["pulse", "events?kind=idle", "events"])
def test_a_stream_ends_with_its_session_and_tells_nothing_more(
    door: Door, monkeypatch: pytest.MonkeyPatch, path: str, end: str
) -> None:
    monkeypatch.setattr(streams, "_BEAT", 0.05)
    name = f"viewer {path} {end}"
    cookie = door.log_in(door.token(name, "read"))
    connection: socket.socket = door.site.server.open()
    with connection:
        connection.sendall(f"GET /console/{path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
        assert b"200 OK" in connection.recv(65536)
        if end == "left":
            assert door.post("logout", cookie).status == 303
        else:
            door.api("DELETE", f"/v1/tokens/{quote(name, safe='')}")
        door.api("POST", "/v1/tasks", {"tasks": [{"kind": "idle", "id": "told-to-nobody"}]})
        data = b""
        while not data.endswith(b"0\r\n\r\n"):  # the end of the answer
            data += connection.recv(65536)
    assert b"told-to-nobody" not in data


def test_without_tokens_this_machine_needs_no_session(site: Site) -> None:
    page = site.see("")
    assert page.status == 200
    assert "Log out" not in page.text
