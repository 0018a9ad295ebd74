"""The request header: send it back unchanged, so that a client can tell which request an answer belongs to.

A middlebox that delivers an answer twice makes the second one look like the answer to the connection's next request.
"""

import re

from litestar.types import Message, Scope

from leasekit.wire import REQUEST_HEADER

__all__ = ["echo_request_header"]

_NAME = REQUEST_HEADER.encode()
_PRINTABLE = re.compile(rb"[ -~]{1,64}")  # bounds the value, and keeps out line ends, which would end the header


async def echo_request_header(message: Message, scope: Scope) -> None:
    """Copy the request header to the answer, unless its value is too long, not printable, or given twice."""
    if message["type"] == "http.response.start":
        values = [value for name, value in scope["headers"] if name == _NAME]
        if len(values) == 1 and _PRINTABLE.fullmatch(values[0]):
            message["headers"] = [*message["headers"], (_NAME, values[0])]
