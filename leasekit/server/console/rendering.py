"""Templates, and how values are written in them.

Rule 1: everything is escaped: values reach a page through Jinja2's autoescape, or through `Markup.format`.
Rule 2: no page has inline scripts or styles. What a picture needs is in attributes of SVG, which are no styles.
Rule 3: a page has only relative links, all of one level, so that it works wherever the console is mounted.
"""

import functools
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Raw

from leasekit.codecs import Encoded
from leasekit.task import Status
from leasekit.wire import decode_value

_LONGEST_VALUE = 20_000  # characters of a user's value that a page shows
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SIZES = ("bytes", "kB", "MB", "GB", "TB")

MARKS: Mapping[str, tuple[str, str]] = {
    Status.NEW: ("wait", "○"),
    Status.ENQUEUED: ("wait", "○"),
    Status.CLAIMED: ("run", "◐"),
    Status.PROCESSING: ("run", "●"),
    Status.RETRIABLE_FAILURE: ("retry", "↻"),
    Status.SUCCESS: ("good", "✓"),
    Status.FATAL_FAILURE: ("bad", "✕"),
    Status.CANCELLED: ("off", "⊘"),
    Status.DROPPED: ("off", "⊘"),
    Status.DEAD: ("bad", "✕"),
    "running": ("run", "●"),
    "succeeded": ("good", "✓"),
    "rolled_back": ("retry", "↩"),
    "ended": ("good", "✓"),
    "failed": ("bad", "✕"),
    "success": ("good", "✓"),
    "retry": ("retry", "↻"),
    "fatal": ("bad", "✕"),
    "release": ("off", "↩"),
    "cancelled": ("off", "⊘"),
    "crash": ("bad", "✕"),
    "expired": ("bad", "✕"),
}
"""The class and the sign of each status and outcome: no meaning is carried by colour alone."""


def span(seconds: float) -> str:
    """Return a duration for people, in its two largest units."""
    if not math.isfinite(seconds):
        return "unlimited"
    if seconds < 0.001:
        return "0 s" if seconds <= 0 else "< 1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    sizes = [(size, unit) for size, unit in _UNITS if seconds >= size]
    size, unit = sizes[0]
    whole = int(seconds // size)
    rest = next(((s, u) for s, u in _UNITS if s < size), None)
    if rest is None or not (part := int((seconds - whole * size) // rest[0])):
        return f"{whole} {unit}"
    return f"{whole} {unit} {part} {rest[1]}"


def ago(at: datetime | None, now: datetime) -> Markup:
    """Return a moment by its distance from now; its title is the moment itself."""
    if at is None:
        return Markup('<span class="none">–</span>')
    seconds = (now - at).total_seconds()
    text = f"{_short(seconds)} ago" if seconds >= 0 else f"in {_short(-seconds)}"
    whole = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        whole.isoformat(timespec="milliseconds").replace("+00:00", "Z"), f"{whole:%Y-%m-%d %H:%M:%S} UTC", text
    )


def _short(seconds: float) -> str:
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{int(seconds / size)} {unit}"


def instant(at: datetime | None) -> str:
    """Return a moment to the millisecond."""
    return "–" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def mark(word: str) -> Markup:
    """Return a status or an outcome with its sign."""
    tone, sign = MARKS.get(word, ("off", "·"))
    text = word.replace("_", " ")
    return Markup('<span class="mark {}"><i aria-hidden="true">{}</i> {}</span>').format(tone, sign, text)


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in _SIZES[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:.3g} {_SIZES[-1]}"


def number(value: float | None) -> str:
    """Return a number with separators; a dash for none."""
    return "–" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.3g}"


def query(**given: Any) -> str:
    """Return the query of a link, without what is None or empty."""
    pairs = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
    return "?" + urlencode({name: value for name, value in pairs.items() if value not in (None, "")})


def is_null(value: Any) -> bool:
    """Return whether a user's value says nothing."""
    return value is None or (isinstance(value, Raw) and bytes(value) == b"null")


def json_text(value: Any) -> str:
    """Return a user's JSON with line breaks, up to a length."""
    raw = bytes(value) if isinstance(value, Raw) else msgspec.json.encode(value)
    if (form := _encoded(raw)) is not None:
        return str(form)
    if len(raw) <= 4 * _LONGEST_VALUE:
        raw = msgspec.json.format(raw, indent=2)
    text = raw.decode(errors="replace")
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}\n… {len(text) - _LONGEST_VALUE:,} more"


def _encoded(raw: bytes) -> Encoded | None:
    """Return a user's value that a codec has encoded; None for a clear one."""
    return Encoded.of(decode_value(raw)) if b'"$codec"' in raw else None


def json_line(value: Any, most: int = 120) -> str:
    """Return a user's JSON in one line, cut to a length."""
    raw = bytes(value) if isinstance(value, Raw) else msgspec.json.encode(value)
    if (form := _encoded(raw)) is not None:
        return str(form)
    text = raw[: 4 * most].decode(errors="replace")
    return text if len(text) <= most else text[: most - 1] + "…"


def error_line(value: Any) -> str:
    """Return an error in one line: type and message without the traceback, or JSON in a form of its own."""
    with_fields = decode_value(value) if isinstance(value, Raw) else value
    match with_fields:
        case {"type": str(kind), "message": str(message)}:
            return " ".join(f"{kind}: {message}".split())[:300]
        case _:
            return json_line(value, 300)


def traceback_of(value: Any) -> str | None:
    """Return the traceback of an error, if it has one, for a block of its own."""
    with_fields = decode_value(value) if isinstance(value, Raw) else value
    match with_fields:
        case {"traceback": str(text)}:
            return text[-_LONGEST_VALUE:]
        case _:
            return None


@functools.cache
def environment() -> Environment:
    """Return the templates, with what they call."""
    made = Environment(
        loader=PackageLoader("leasekit.server.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "span": span, "instant": instant, "mark": mark, "size": size, "number": number, "json_text": json_text,
        "json_line": json_line, "error_line": error_line, "traceback_of": traceback_of,
    }  # fmt: skip
    functions: dict[str, Any] = {"query": query, "is_null": is_null}
    made.globals.update(functions)
    return made


def render(template: str, *, now: datetime, **values: Any) -> str:
    """Write a page; `now` is the moment from which relative times count."""
    return environment().get_template(template).render(now=now, ago=functools.partial(ago, now=now), **values)
