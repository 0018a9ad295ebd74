"""Find where HTTP/1.1 messages begin and end in a stream of bytes, for a proxy that passes them on unchanged.

h11 finds the boundaries; the bytes that it has consumed are passed on, not the events that it returns.
"""

from dataclasses import dataclass, replace

import h11


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of a message: the pieces of a stream are all of its bytes."""

    data: bytes
    start: tuple[str, ...] = ()
    """Of the first piece: method and target of a request, or version and status of an answer."""
    ends: bool = False  # whether the piece is the last of its message


class Framing:
    """Cut one direction of one connection into pieces: requests as a server reads them, or answers as a client does.

    An answer without a length lasts until the connection ends. Answers to HEAD are not supported.
    """

    def __init__(self, role: type[h11.SERVER] | type[h11.CLIENT]) -> None:
        self._role = role
        self._begin(b"")

    def feed(self, data: bytes) -> list[Piece]:
        """Return the new pieces of the stream; a head is held back until it is complete.

        `data` must not be empty. Raises `h11.RemoteProtocolError` for bytes that are not HTTP.
        """
        self._parser.receive_data(data)
        pieces: list[Piece] = []
        event: object = None
        while event not in (h11.NEED_DATA, h11.PAUSED):
            before, _ = self._parser.trailing_data
            event = self._parser.next_event()
            after, _ = self._parser.trailing_data
            if len(after) < len(before):
                pieces.append(Piece(data=before[: len(before) - len(after)], start=_start(event)))
            if isinstance(event, h11.EndOfMessage):
                pieces[-1] = replace(pieces[-1], ends=True)
                self._begin(after)
        return pieces

    def _begin(self, data: bytes) -> None:
        self._parser = h11.Connection(self._role)
        if self._role is h11.CLIENT:  # without a request h11 expects no answer
            self._parser.send(h11.Request(method="GET", target="/", headers=[("host", "any")]))
            self._parser.send(h11.EndOfMessage())
        if data:
            self._parser.receive_data(data)


def _start(event: object) -> tuple[str, ...]:
    match event:
        case h11.Request(method=method, target=target):
            return method.decode(), target.decode()
        case h11.Response(http_version=version, status_code=status):
            return f"HTTP/{version.decode()}", str(status)
        case _:
            return ()
