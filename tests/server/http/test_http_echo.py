"""Every answer says which request it answers: it has the request's `Leasekit-Request` header, unchanged."""

import pytest

from tests.server.http.conftest import Running, read_all

NAME = "leasekit-request"
VALUE = "~9f aB-17!"

BODY = b'{"worker":"w","beats":[{"id":"a","token":"t"}]}'
REQUESTS: list[tuple[str, str, bytes | None, dict[str, str], int]] = [
    ("POST", "/v1/heartbeats", BODY, {}, 200),
    ("POST", "/v1/claims", b'{"worker":"w","kinds":["none"],"claim_id":"c"}', {}, 200),
    ("GET", "/v1/tasks", None, {}, 200),
    ("GET", "/metrics", None, {}, 200),
    ("GET", "/healthz", None, {}, 200),
    ("GET", "/openapi.json", None, {}, 200),
    ("OPTIONS", "/v1/claims", None, {}, 204),
    ("POST", "/v1/tasks", b"no JSON", {}, 400),
    ("GET", "/healthz", None, {"host": "evil.example"}, 403),
    ("GET", "/v1/tasks/nobody", None, {}, 404),
    ("GET", "/nowhere", None, {}, 404),
    ("DELETE", "/v1/tasks", None, {}, 405),
    ("POST", "/v1/tasks", b"{}", {"content_length": "9000000"}, 413),
    ("POST", "/v1/tasks", b"{}", {"content_type": "text/plain"}, 415),
    ("POST", "/v1/tasks", b'{"tasks":[{}]}', {}, 422),
    ("GET", "/v1/tasks?limit=0", None, {}, 422),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"), REQUESTS, ids=[f"{r[0]} {r[1]} {r[4]}" for r in REQUESTS]
)
def test_an_answer_names_its_request(
    server: Running, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int
) -> None:
    answer = server.call(method, path, body, leasekit_request=VALUE, **headers)
    assert (answer.status, answer.headers.get(NAME)) == (status, VALUE)
    assert NAME not in server.call(method, path, body, **headers).headers


def test_an_error_of_the_server_names_its_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.engine.queries, "counts", broken)
    answer = server.call("GET", "/v1/stats", leasekit_request=VALUE)
    assert (answer.status, answer.headers.get(NAME)) == (500, VALUE)


def test_a_stream_names_its_request(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(f"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n{NAME}: {VALUE}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(65536)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert f"\r\n{NAME}: {VALUE}\r\n".encode() in head


def test_answers_to_pipelined_requests_name_their_own(server: Running) -> None:
    request = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nLEASEKIT-Request: {}\r\n{}\r\n"
    with server.open() as connection:
        sent = [request.format(n, "connection: close\r\n" if n == 2 else "") for n in range(3)]
        connection.sendall("".join(sent).encode())
        heads = read_all(connection).decode().split("HTTP/1.1 200 OK")[1:]
    assert [f"\r\n{NAME}: {n}\r\n" in head for n, head in enumerate(heads)] == [True] * 3


ODD = {
    "too long": b"x" * 65,
    "much too long": b"x" * 60_000,
    "empty": b"",
    "a tab": b"a\tb",
    "not ASCII": "é".encode(),
    "not UTF-8": b"\xff",
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_an_odd_value_is_not_sent_back(server: Running, value: bytes) -> None:
    with server.open() as connection:
        connection.sendall(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b: %b\r\n\r\n" % (NAME.encode(), value)
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert NAME.encode() not in answer


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x07b", b"a\x7fb", b"a\rX: 1", b"a\nX: 1"])
def test_no_control_character_is_sent_back(server: Running, value: bytes) -> None:
    with server.open() as connection:
        connection.sendall(
            b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b: %b\r\n\r\n" % (NAME.encode(), value)
        )
        answer = read_all(connection)
    assert value not in answer
    assert b"\r\nx: 1" not in answer.lower()


def test_the_longest_value_is_sent_back(server: Running) -> None:
    assert server.call("GET", "/healthz", leasekit_request="x" * 64).headers[NAME] == "x" * 64


def test_two_values_are_not_sent_back(server: Running) -> None:
    with server.open() as connection:
        head = f"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{NAME}: a\r\n{NAME}: b\r\n\r\n"
        connection.sendall(head.encode())
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert NAME.encode() not in answer
