"""The header by which a client tells whether an answer is that to its request: it is sent back as it came.

A middlebox that delivers an answer twice makes the second one look like the answer to the connection's next request.
"""

import re

from litestar.types import Message, Scope

from leasekit.wire import REQUEST_HEADER

__all__ = ["echo_request_header"]

_NAME = REQUEST_HEADER.encode()
_PRINTABLE = re.compile(rb"[ -~]{1,64}")  # whatever is echoed has a bound, and cannot end its header


async def echo_request_header(message: Message, scope: Scope) -> None:
    """Name the request in the head of its answer. A value that is too long, odd or not the only one is left out."""
    if message["type"] == "http.response.start":
        values = [value for name, value in scope["headers"] if name == _NAME]
        if len(values) == 1 and _PRINTABLE.fullmatch(values[0]):
            message["headers"] = [*message["headers"], (_NAME, values[0])]
