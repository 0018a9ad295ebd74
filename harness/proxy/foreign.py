"""Answers of what stands between a client and its service: an ingress, a firewall, a captive portal.

None of these knows whether a request was applied, so none may end a task. Some look much like leasekit's own answers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignAnswer:
    """An answer to an HTTP request by something other than the service."""

    status: int
    content_type: str
    body: bytes

    @property
    def raw(self) -> bytes:
        head = f"HTTP/1.1 {self.status} Foreign\r\ncontent-length: {len(self.body)}\r\n"
        if 300 <= self.status < 400:
            head += "location: https://portal.invalid/login?session=5ecre7-0f-a-u5er\r\n"
        return f"{head}content-type: {self.content_type}\r\n\r\n".encode() + self.body


_STATUSES = (
    200, 201, 302, 307, 400, 401, 402, 403, 404, 405, 407, 409, 410, 411, 413, 415, 418, 421, 422, 451, 499, 502,
)  # fmt: skip
_HTML = b"<html><head><title>%d</title></head><body><center><h1>Not for you</h1></center><hr>nginx</body></html>"
_JSON = "application/json"
_PROBLEM = "application/problem+json"

FOREIGN = (
    *(ForeignAnswer(status, "text/html; charset=utf-8", _HTML % status) for status in _STATUSES),
    *(ForeignAnswer(status, _JSON, b'{"message":"Forbidden"}') for status in (200, 400, 403, 404, 413, 422)),
    # Problem documents of other services, and damaged ones of leasekit.
    *(
        ForeignAnswer(status, _PROBLEM, body % status)
        for status in (200, 400, 403, 404, 413, 422)
        for body in (
            b'{"type":"about:blank","status":%d,"title":"No","detail":"there is no such thing"}',
            b'{"type":"https://example.com/probs/too-large","status":%d,"title":"No","detail":"too large","errors":[]}',
            b'{"status":%d,"title":"No","detail":"no type at all"}',
            b'{"type":"urn:leasekit:problem:refused","status":9%d,"title":"","detail":"of another answer"}',
        )
    ),
    ForeignAnswer(200, _JSON, b""),
    ForeignAnswer(200, _JSON, b"{}"),
    ForeignAnswer(200, _JSON, b"null"),
    ForeignAnswer(200, _JSON, b'{"status":"ok"}'),
    ForeignAnswer(200, _JSON, b'{"verdicts":[],"tasks":[{}],"kinds":[],"workers":[{}]}'),
    ForeignAnswer(204, "text/plain", b""),
    ForeignAnswer(403, "text/plain", b"\xff\xfe\x00 denied"),
    ForeignAnswer(404, "text/plain", b"404 page not found"),
    ForeignAnswer(404, "text/plain", b""),
    ForeignAnswer(422, "application/xml", b"<Error><Code>AccessDenied</Code></Error>"),
)
"""Answers that must not count as the service's refusal of a request."""
