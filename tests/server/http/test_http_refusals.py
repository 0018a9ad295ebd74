"""Bad input: refused whole, with a problem document that names item and field, and never a 5xx."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.http.conftest import Running, read_all

POSTS = ["/v1/tasks", "/v1/tasks/cancel", "/v1/claims", "/v1/heartbeats", "/v1/results"]
GOOD = {"kind": "never", "id": "never"}


def refused(answer: Any, status: int) -> Any:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"status", "title", "detail"} <= answer.json.keys()
    assert answer.json["status"] == status
    assert answer.json["type"].startswith("urn:leasekit:problem:")  # nobody else's document has that
    assert b"Traceback" not in answer.raw
    return answer.json


def nothing_was_applied(server: Running) -> bool:
    return not server.get("/v1/tasks?kind=never")["tasks"]


NOT_JSON = {
    "empty": b"",
    "blank": b"  \r\n",
    "bad utf-8": b"\xff\xfe",
    "bad utf-8 in a name": b'{"tasks":[{"kind":"never"},{"kind":"\xc3\x28"}]}',
    "truncated": b'{"tasks":[{"kind":"never"},{"kind":"a',
    "trailing": b'{"tasks":[{"kind":"never"}]} x',
    "two documents": b'{"tasks":[{"kind":"never"}]}{}',
    "nan": b'{"tasks":[{"kind":"never","payload":NaN}]}',
    "infinity": b'{"tasks":[{"kind":"never","payload":-Infinity}]}',
    "single quotes": b"{'tasks':[]}",
    "comment": b'{"tasks":[/**/{"kind":"never"}]}',
    "trailing comma": b'{"tasks":[{"kind":"never"},]}',
    "byte order mark": b'\xef\xbb\xbf{"tasks":[{"kind":"never"}]}',
    "utf-16": '{"tasks":[{"kind":"never"}]}'.encode("utf-16"),
    "lone surrogate": b'{"tasks":[{"kind":"\\ud800"}]}',
    "nested objects": b'{"tasks":[{"kind":"never","payload":' + b'{"a":' * 100_000,
    "control character": b'{"tasks":[{"kind":"ne\x00ver"}]}',
    "python": b"{'a': True}",
    "form": b"kind=never",
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_not_json_is_400(server: Running, body: bytes) -> None:
    refused(server.call("POST", "/v1/tasks", body), 400)
    assert nothing_was_applied(server)


def test_what_is_nested_100_000_deep_is_refused(server: Running) -> None:
    """How deep the decoder can go depends on the Python: what it can read is beyond the limit all the same."""
    body = b'{"tasks":[{"kind":"never","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    answer = server.call("POST", "/v1/tasks", body)
    refused(answer, 400 if answer.status == 400 else 422)
    assert nothing_was_applied(server)


UNFIT: dict[str, tuple[Any, int | None, str | None]] = {
    "no object": ([], None, None),
    "null": (None, None, None),
    "a string": ("tasks", None, None),
    "nothing in it": ({}, None, "tasks"),
    "no batch": ({"tasks": {}}, None, "tasks"),
    "empty batch": ({"tasks": []}, None, "tasks"),
    "too many": ({"tasks": [{"kind": "never"}] * 1001}, None, "tasks"),
    "unknown field": ({"tasks": [GOOD], "extra": 1}, None, "extra"),
    "item is no object": ({"tasks": [GOOD, 7]}, 1, "tasks"),
    "item without kind": ({"tasks": [GOOD, {"id": "a"}]}, 1, "kind"),
    "item with an unknown field": ({"tasks": [GOOD, GOOD, {"kind": "never", "colour": 1}]}, 2, "colour"),
    "kind is a number": ({"tasks": [GOOD, {"kind": 3}]}, 1, "kind"),
    "kind is empty": ({"tasks": [GOOD, {"kind": ""}]}, 1, "kind"),
    "kind with a slash": ({"tasks": [GOOD, {"kind": "a/b"}]}, 1, "kind"),
    "kind with a newline": ({"tasks": [GOOD, {"kind": "a\n"}]}, 1, "kind"),
    "kind is not ascii": ({"tasks": [GOOD, {"kind": "größe"}]}, 1, "kind"),
    "kind with a null character": ({"tasks": [GOOD, {"kind": "a\0"}]}, 1, "kind"),
    "id too long": ({"tasks": [GOOD, {"kind": "never", "id": "x" * 129}]}, 1, "id"),
    "priority too high": ({"tasks": [GOOD, {"kind": "never", "priority": 5}]}, 1, "priority"),
    "priority is a string": ({"tasks": [GOOD, {"kind": "never", "priority": "1"}]}, 1, "priority"),
    "priority is true": ({"tasks": [GOOD, {"kind": "never", "priority": True}]}, 1, "priority"),
    "no attempts": ({"tasks": [GOOD, {"kind": "never", "max_attempts": 0}]}, 1, "max_attempts"),
    "claim_timeout too short": ({"tasks": [GOOD, {"kind": "never", "claim_timeout": 1}]}, 1, "claim_timeout"),
    "at without a zone": ({"tasks": [GOOD, {"kind": "never", "at": "2026-01-01T00:00:00"}]}, 1, "at"),
    "at is no date": ({"tasks": [GOOD, {"kind": "never", "at": "2026-02-31T00:00:00Z"}]}, 1, "at"),
    "unknown policy": ({"tasks": [GOOD, {"kind": "never", "retry": {"policy": "hope"}}]}, 1, "retry.policy"),
    "policy with an unknown field": (
        {"tasks": [GOOD, {"kind": "never", "retry": {"policy": "polynomial", "max": 5}}]},
        1,
        "retry.max",
    ),
    "inside a policy": (
        {"tasks": [GOOD, {"kind": "never", "retry": {"policy": "list", "waits": [1, -1]}}]},
        1,
        "retry.waits[1]",
    ),
    "after too many": ({"tasks": [GOOD, {"kind": "never", "after": ["a"] * 101}]}, 1, "after"),
    "payload too big": ({"tasks": [GOOD, {"kind": "never", "payload": "x" * 1024 * 1024}]}, 1, "payload"),
    "payload nested 65 deep": (
        {"tasks": [GOOD, {"kind": "never", "payload": json.loads("[" * 65 + "]" * 65)}]},
        1,
        "payload",
    ),
}


@pytest.mark.parametrize(("body", "item", "field"), UNFIT.values(), ids=UNFIT.keys())
def test_what_does_not_fit_is_422_and_says_where(
    server: Running, body: Any, item: int | None, field: str | None
) -> None:
    document = refused(server.call("POST", "/v1/tasks", json.dumps(body).encode()), 422)
    (error,) = document["errors"]
    assert (error.get("item"), error.get("field")) == (item, field)
    assert error["detail"]
    assert nothing_was_applied(server)


ELSEWHERE: dict[str, tuple[str, Any, int | None, str | None]] = {
    "beats without worker": ("/v1/heartbeats", {"beats": [{"id": "a", "token": "t"}]}, None, "worker"),
    "worker with a slash": ("/v1/heartbeats", {"worker": "a/b", "beats": [{"id": "a", "token": "t"}]}, None, "worker"),
    "beat without token": ("/v1/heartbeats", {"worker": "w", "beats": [{"id": "a"}]}, 0, "token"),
    "progress too big": (
        "/v1/heartbeats",
        {"worker": "w", "beats": [{"id": "a", "token": "t"}, {"id": "a", "token": "t", "progress": "x" * 65536}]},
        1,
        "progress",
    ),
    "unknown outcome": (
        "/v1/results",
        {"worker": "w", "results": [{"id": "a", "token": "t", "outcome": "x"}]},
        0,
        "outcome",
    ),
    "error too big": (
        "/v1/results",
        {"worker": "w", "results": [{"id": "a", "token": "t", "outcome": "fatal", "error": "x" * 65536}]},
        0,
        "error",
    ),
    "successor that does not fit": (
        "/v1/results",
        {"worker": "w", "results": [{"id": "a", "token": "t", "outcome": "success", "then": [{"kind": 1}]}]},
        0,
        "then[0].kind",
    ),
    "then with retry": (
        "/v1/results",
        {"worker": "w", "results": [{"id": "a", "token": "t", "outcome": "retry", "then": [{"kind": "never"}]}]},
        0,
        "then",
    ),
    "claim without id": ("/v1/claims", {"worker": "w", "kinds": ["never"]}, None, "claim_id"),
    "claim of nothing": ("/v1/claims", {"worker": "w", "kinds": [], "claim_id": "c"}, None, "kinds"),
    "claim of an odd kind": ("/v1/claims", {"worker": "w", "kinds": ["a", "b/c"], "claim_id": "c"}, 1, "kinds"),
    "claim of less than none": (
        "/v1/claims",
        {"worker": "w", "kinds": ["a"], "claim_id": "c", "limit": -1},
        None,
        "limit",
    ),
    "claim of too many": ("/v1/claims", {"worker": "w", "kinds": ["a"], "claim_id": "c", "limit": 1001}, None, "limit"),
    "claim into the past": ("/v1/claims", {"worker": "w", "kinds": ["a"], "claim_id": "c", "wait": -1}, None, "wait"),
    "cancel of an odd id": ("/v1/tasks/cancel", {"ids": ["a", 5]}, 1, "ids"),
}


@pytest.mark.parametrize(("path", "body", "item", "field"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_every_call_says_where_it_does_not_fit(
    server: Running, path: str, body: Any, item: int | None, field: str | None
) -> None:
    (error,) = refused(server.call("POST", path, body), 422)["errors"]
    assert (error.get("item"), error.get("field")) == (item, field)


@pytest.mark.parametrize("field", ["status", "attempt", "crashes", "fence", "token", "worker", "owner", "result"])
def test_what_the_server_decides_cannot_be_assigned(server: Running, field: str) -> None:
    body = {"tasks": [{"kind": "never", field: "success"}]}
    (error,) = refused(server.call("POST", "/v1/tasks", body), 422)["errors"]
    assert (error["item"], error["field"]) == (0, field)


def test_a_refusal_does_not_repeat_a_long_name(server: Running) -> None:
    answer = server.call("POST", "/v1/tasks", {"tasks": [{"kind": "never", "x" * 1_000_000: 1}]})
    refused(answer, 422)
    assert len(answer.raw) < 10_000


def test_a_name_chosen_by_the_client_does_not_mislead_about_the_place(server: Running) -> None:
    odd = "x` - at `$.tasks[9].evil"
    (error,) = refused(server.call("POST", "/v1/tasks", {"tasks": [GOOD, {"kind": "never", odd: 1}]}), 422)["errors"]
    assert error["item"] == 1


# Headers, sizes, routes ---------------------------------------------------------------------------------------

OTHER_TYPES = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=latin-1",
    "multipart/form-data",
    "",
]


@pytest.mark.parametrize("media_type", OTHER_TYPES)
@pytest.mark.parametrize("path", POSTS)
def test_another_content_type_is_415(server: Running, path: str, media_type: str) -> None:
    refused(server.call("POST", path, {"tasks": [GOOD]}, content_type=media_type), 415)


def test_json_in_utf_8_may_say_so(server: Running) -> None:
    answer = server.call("POST", "/v1/tasks/cancel", {"ids": ["a"]}, content_type="Application/JSON; charset=UTF-8")
    assert answer.status == 200


def test_a_compressed_body_is_415(server: Running) -> None:
    refused(server.call("POST", "/v1/tasks", b"\x1f\x8b", content_encoding="gzip"), 415)


def test_a_body_that_is_announced_too_big_is_413_before_it_is_sent(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(
            b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 8388609\r\n\r\n"
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer


def test_a_body_that_grows_too_big_is_413_without_being_read_to_its_end(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(
            b"POST /v1/tasks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        sent = 0
        try:
            while sent < 1_000_000_000:
                connection.sendall(chunk)
                sent += 65536
        except OSError:
            pass  # the server has closed
    assert 8 * 1024 * 1024 <= sent < 64 * 1024 * 1024


def test_a_body_of_exactly_the_bound_is_read(server: Running) -> None:
    tasks = b",".join([b'{"kind":"a","payload":"%s"}' % (b"x" * (1024 * 1024 - 100))] * 8)
    body = b'{"tasks":[%s]' % tasks
    assert server.call("POST", "/v1/tasks", body + b" " * (8 * 1024 * 1024 - 1 - len(body)) + b"}").status == 200


def test_a_long_body_that_breaks_a_rule_or_is_none_is_refused_like_a_short_one(server: Running) -> None:
    long = b'{"kind":"a","payload":"%s"}' % (b"x" * 300_000)
    for tasks, status in [(long, 200), (long + b",7", 422), (long + b",", 400), (long + b',{"kind":"a/b"}', 422)]:
        answer = server.call("POST", "/v1/tasks", b'{"tasks":[%s]}' % tasks)
        assert answer.status == status, answer


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v2/tasks", "/v1/tasks/a/b", "/favicon.ico", "/openapi.json/x", "/%00", "/é"]
)
def test_an_unknown_route_is_404(server: Running, path: str) -> None:
    refused(server.call("GET", path.encode().decode("latin-1").replace("Ã©", "%C3%A9")), 404)


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/tasks"), ("PUT", "/v1/claims"), ("GET", "/v1/claims")])
def test_another_method_is_405(server: Running, method: str, path: str) -> None:
    answer = server.call(method, path)
    refused(answer, 405)
    assert "allow" in answer.headers


def test_an_unknown_task_is_404(server: Running) -> None:
    assert "nobody" in refused(server.call("GET", "/v1/tasks/nobody"), 404)["detail"]


PARAMETERS = {
    "status=null": "status",
    "limit=0": "limit",
    "limit=1001": "limit",
    "limit=many": "limit",
    "limit=1.5": "limit",
    "limit=" + "9" * 5000: "limit",
    "status=lost": "status",
    "kind=a/b": "kind",
    "kind=": "kind",
    "worker=%00": "worker",
    "collection=%FF": "collection",
    "cursor=" + "x" * 2000: "cursor",
    "colour=red": "colour",
    "kind=a&kind=b": "kind",
}


@pytest.mark.parametrize(("query", "field"), PARAMETERS.items(), ids=[q[:20] for q in PARAMETERS])
def test_a_parameter_that_does_not_fit_is_422(server: Running, query: str, field: str) -> None:
    (error,) = refused(server.call("GET", f"/v1/tasks?{query}"), 422)["errors"]
    assert error["field"] == field


@pytest.mark.parametrize("cursor", ["x", "..", "%00", "-1", "%7B%7D", "AAAA", "99999999999999999999"])
def test_a_cursor_that_was_never_given_is_no_error_of_the_server(server: Running, cursor: str) -> None:
    assert server.call("GET", f"/v1/tasks?cursor={cursor}").status in {200, 422}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8077", "10.0.0.1", "127.0.0.1.evil.example", "[::2]:1", ""]
)
@pytest.mark.parametrize("path", ["/v1/tasks", "/openapi.json", "/healthz"])
def test_a_page_whose_name_resolves_to_this_machine_is_403(server: Running, host: str, path: str) -> None:
    refused(server.call("GET", path, host=host), 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "127.1.2.3", "[::1]", "[::1]:8077"])
def test_this_machine_may_be_called_by_any_of_its_names(server: Running, host: str) -> None:
    assert server.call("GET", "/healthz", host=host).status == 200


def test_a_request_with_two_hosts_is_400(server: Running) -> None:
    with server.open() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost:1", "http://"])
@pytest.mark.parametrize("path", ["/v1/tasks", "/metrics", "/v1/nothing"])
def test_a_web_page_of_another_origin_is_403(server: Running, origin: str, path: str) -> None:
    refused(server.call("GET", path, origin=origin), 403)


def test_a_web_page_of_this_origin_is_answered(server: Running) -> None:
    assert server.call("GET", "/healthz", origin=f"http://127.0.0.1:{server.port}").status == 200


# Methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 200), ("/v1/tasks/nobody", 404)])
def test_head_is_answered_like_get_without_a_body(server: Running, path: str, status: int) -> None:
    answer = server.call("HEAD", path)
    assert (answer.status, answer.raw) == (status, b"")


def test_no_stream_is_begun_for_a_head(server: Running) -> None:
    assert server.call("HEAD", "/v1/events").status == 405


def test_a_task_may_have_the_name_of_a_route(server: Running) -> None:
    assert server.call("OPTIONS", "/v1/tasks/cancel").headers["allow"] == "OPTIONS, POST"
    server.post("/v1/tasks", {"tasks": [{"id": "cancel", "kind": "named"}]})
    assert server.get("/v1/tasks/cancel")["kind"] == "named"


# Anything at all ----------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tasks", "ids", "beats", "results", "worker", "kinds", "id", "kind"]), inner)
    ),
    max_leaves=12,
)
_BODIES = st.binary(max_size=200) | _JSON.map(lambda value: json.dumps(value).encode())


@pytest.mark.parametrize("path", POSTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_BODIES)
def test_no_body_is_an_error_of_the_server(server: Running, path: str, body: bytes) -> None:
    assert server.call("POST", path, body).status < 500


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=40))
def test_no_path_is_an_error_of_the_server(server: Running, path: str) -> None:
    assert server.call("GET", f"/v1/{path}").status < 500
