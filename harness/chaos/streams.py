"""Streams of bytes that no client of leasekit sends: made up from a seed, without end."""

from collections.abc import Iterator
from random import Random

from leasekit.wire import MAX_BODY

_METHODS = (*("POST",) * 6, "PUT", "PATCH", "GET", "HEAD", "OPTIONS", "CONNECT", "BREW")
_PATHS = (
    *("/v1/tasks", "/v1/claims", "/v1/heartbeats", "/v1/results", "/v1/tasks/cancel", "/v1/tokens", "/v1/kinds/a"),
    *(
        "/",
        "/login",
        "/v1/events",
        "/metrics",
        "/openapi.json",
        "/readyz",
        "/v1/tasks?limit=200",
        "*",
        "/" + "a" * 60_000,
    ),
    *("/v1/tasks?" + "a=1&" * 15_000, "/v1/tasks?cursor=" + "%41" * 20_000, "/v1/tasks/" + "%C3%A9" * 10_000),
)
_FIELDS = (
    *("Expect: 100-continue", "Connection: upgrade", "Upgrade: h2c", "Connection: close", "Content-Encoding: gzip"),
    *("Accept: text/event-stream", "Cookie: " + "a=b; " * 1_000, "Authorization: Bearer " + "x" * 8_000, "a:"),
    *("Forwarded: for=192.0.2.1", "X-Forwarded-For: 192.0.2.1", "Origin: http://localhost", "Content-Length: 5"),
)
_STARTS = (
    *('{"tasks":[', '{"tasks":[{"kind":"a","payload":', '{"tasks":[{"kind":"a","payload":[', '{"tasks":[{"labels":{'),
    *('{"worker":"w","beats":[', '{"worker":"w","kinds":[', '{"worker":"w","results":[', '{"ids":[', "", "[", '{"'),
)
_ITEMS = (
    *("[", '{"a":', "[],", "{},", "5e-324,", "0.1234567890123456789,", "9" * 4_000 + ",", "1e400,", "0,", "null,", "-"),
    *('"\\u0041\\ud83d\\ude00",', '"' + "\\n" * 500 + '",', '"a":1,', " ", "\\", "\xff", '{"kind":"a"},', '"a",'),
    *('{"kind":"a","payload":5e-324},', '{"id":"a","token":"t"},', '{"id":"a","token":"t","outcome":"success"},'),
)


def stream(rng: Random) -> Iterator[bytes]:
    """Yield pieces of requests that are all alike, each as large as may be kept and larger."""
    fields = rng.sample(_FIELDS, rng.choice((0, 0, 1, 3))) + ["a: b"] * rng.choice((0, 0, 0, 90, 20_000))
    is_chunked, length = rng.random() < 0.5, rng.choice((0, 100_000, MAX_BODY, MAX_BODY, 10 * MAX_BODY))
    fields.append("Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {length}")
    lines = (f"{rng.choice(_METHODS)} {rng.choice(_PATHS)} HTTP/1.1", "Host: localhost", *fields)
    head = "".join(f"{line}\r\n" for line in (*lines, "Content-Type: application/json", ""))
    start, item = rng.choice(_STARTS).encode("latin-1"), rng.choice(_ITEMS).encode("latin-1")
    size, extension = rng.choice((1, 7, 60_000)), b";a=" + b"b" * rng.choice((0, 0, 1, 1_000))
    trailers = b"a: b\r\n" * rng.choice((0, 0, 1, 50_000))
    while True:
        yield head.encode("latin-1")
        left, piece = length, start
        filler = item * (60_000 // len(item) + 1)
        while left > 0:
            piece, left = piece[:left], left - len(piece)
            yield _chunks(piece, size, extension) if is_chunked else piece
            piece = filler
        if is_chunked:
            yield b"0\r\n%s\r\n" % trailers


def _chunks(data: bytes, size: int, extension: bytes) -> bytes:
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
