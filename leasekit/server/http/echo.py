"""The request header: send it back unchanged, so that a client can tell which request an answer belongs to.

A middlebox that delivers an answer twice makes the second one look like the answer to the connection's next request.
"""

import re

from starlette.types import Message, Scope

from leasekit.wire import REQUEST_HEADER

_NAME = REQUEST_HEADER.encode()
_PRINTABLE = re.compile(rb"[ -~]{1,64}")  # bounds the value, and keeps out line ends, which would end the header


def echo_request_header(head: Message, scope: Scope) -> None:
    """Copy the request header to the head of the answer, unless it is too long, not printable, or given twice."""
    values = [value for name, value in scope["headers"] if name == _NAME]
    if len(values) == 1 and _PRINTABLE.fullmatch(values[0]):
        head["headers"] = [*head["headers"], (_NAME, values[0])]
