"""Messages end where they end, wherever the stream is cut; and no byte is lost or changed."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.proxy.framing import Framing, Piece

REQUESTS = [
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"PUT /c HTTP/1.1\r\nhost:x\r\ntransfer-encoding: Chunked\r\n\r\n3;a=b\r\nabc\r\n7\r\n0123456\r\n0\r\nx: y\r\n\r\n",
]
ANSWERS = [
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\r\n\0",
    b"HTTP/1.1 500 Oh\r\nTransfer-Encoding:  chunked\r\n\r\n1\r\n\n\r\n0\r\n\r\n",
]


def pieces(stream: bytes, cuts: list[int]) -> list[Piece]:
    framing, found, start = Framing(h11.CLIENT if stream.startswith(b"HTTP/") else h11.SERVER), list[Piece](), 0
    for end in sorted({cut % len(stream) for cut in cuts} - {0} | {len(stream)}):
        found += framing.feed(stream[start:end])
        start = end
    return found


@given(st.lists(st.integers(0, 500)), st.sampled_from([REQUESTS, ANSWERS]), st.lists(st.integers(0, 2), min_size=1))
def test_a_stream_is_the_same_messages_however_it_is_cut(
    cuts: list[int], messages: list[bytes], order: list[int]
) -> None:
    stream = b"".join(messages[number] for number in order)
    found = pieces(stream, cuts)
    assert b"".join(piece.data for piece in found) == stream
    ends = [position for position, piece in enumerate(found) if piece.ends]
    starts = [position for position, piece in enumerate(found) if piece.start]
    assert len(ends) == len(starts) == len(order)
    assert ends[-1] == len(found) - 1
    assert all(start <= end for start, end in zip(starts, ends, strict=True))


def test_what_begins_a_message_says_what_it_is() -> None:
    assert [piece.start for piece in pieces(b"".join(REQUESTS), []) if piece.start] == [
        ("GET", "/a"),
        ("POST", "/b?c=d"),
        ("PUT", "/c"),
    ]
    assert [piece.start for piece in pieces(b"".join(ANSWERS), []) if piece.start] == [
        ("HTTP/1.1", "204"),
        ("HTTP/1.1", "200"),
        ("HTTP/1.1", "500"),
    ]


def test_an_answer_of_unsaid_length_lasts_as_long_as_its_connection() -> None:
    found = pieces(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", [25])
    assert [bool(piece.start) for piece in found] == [True, *[False] * (len(found) - 1)]
    assert not any(piece.ends for piece in found)


@pytest.mark.parametrize(
    "nonsense", [b"HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n"]
)
def test_what_is_no_http_is_refused(nonsense: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        pieces(nonsense, [])
