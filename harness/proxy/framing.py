"""Find where HTTP/1.1 messages begin and end in a stream of bytes, for a proxy that passes them on unchanged."""

from collections.abc import Generator
from dataclasses import dataclass

__all__ = ["Framing", "Piece"]

_Step = Generator[None, None, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of a message: the pieces of a stream are all of its bytes."""

    data: bytes
    start: tuple[str, ...] = ()
    """Of the first piece: method and target of a request, or version and status of an answer."""
    ends: bool = False
    """Whether the piece is the last of its message."""


class Framing:
    """Cut one direction of one connection into pieces; raise ValueError for bytes that are not HTTP.

    An answer without a length lasts until the connection ends. Answers to HEAD are not supported.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._pieces: list[Piece] = []
        self._parser = self._messages()
        next(self._parser)

    def feed(self, data: bytes) -> list[Piece]:
        """The new pieces of the stream; a head is held back until it is complete."""
        self._buffer += data
        next(self._parser)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _messages(self) -> Generator[None, None, None]:
        while True:
            head = yield from self._through(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").rstrip().split("\r\n")
            start = tuple(first.split(" ")[:2])
            if len(start) < 2:
                raise ValueError(f"{first[:80]!r} begins no HTTP message")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            is_answer = first.startswith("HTTP/")
            if is_answer and start[1].startswith("1"):  # informational: the final answer follows
                self._emit(head)
            elif headers.get("transfer-encoding", "").lower().endswith("chunked"):
                self._emit(head, start=start)
                yield from self._chunks()
            elif "content-length" in headers or not is_answer or start[1] in {"204", "304"}:
                length = int(headers.get("content-length", "0"))
                self._emit(head, start=start, ends=not length)
                yield from self._body(length, ends=True)
            else:
                self._emit(head, start=start)
                while True:
                    self._emit(self._take(len(self._buffer)))
                    yield

    def _chunks(self) -> Generator[None, None, None]:
        while size := int((yield from self._line()).partition(b";")[0], 16):
            yield from self._body(size + 2, ends=False)
        while (line := (yield from self._through(b"\r\n"))) != b"\r\n":
            self._emit(line)
        self._emit(line, ends=True)

    def _line(self) -> _Step:
        line = yield from self._through(b"\r\n")
        self._emit(line)
        return line

    def _body(self, left: int, *, ends: bool) -> Generator[None, None, None]:
        while left:
            if data := self._take(left):
                left -= len(data)
                self._emit(data, ends=ends and not left)
            else:
                yield

    def _through(self, mark: bytes) -> _Step:
        while (at := self._buffer.find(mark)) < 0:
            yield
        return self._take(at + len(mark))

    def _take(self, most: int) -> bytes:
        data = bytes(self._buffer[:most])
        del self._buffer[:most]
        return data

    def _emit(self, data: bytes, *, start: tuple[str, ...] = (), ends: bool = False) -> None:
        if data:
            self._pieces.append(Piece(data=data, start=start, ends=ends))
