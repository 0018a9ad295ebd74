"""The pictures, drawn from what the code is: the table of states, the places of the cycle, the sums of `Beats`.

What the code has and a picture has no place for is an error, so that none is out of date.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from leasekit import Beats, Status
from leasekit._core.cycle import Cycle
from leasekit.server.states import LEASED, NEXT, WAITING, Event

__all__ = ["PICTURES", "cycle", "lease", "life"]

_STYLE = """
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
.what { font-style: italic; fill: #57606a }
.box { fill: #ffffff; stroke: #57606a }
.group { fill: none; stroke: #57606a; stroke-dasharray: 4 4 }
.end { fill: #eaeef2 }
.arrow { fill: none; stroke: #57606a; marker-end: url(#tip) }
.tip { fill: #57606a }
.trust { fill: #2da44e } .grace { fill: #bf8700 } .margin { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #d0d7de } .what { fill: #9ea7b0 }
  .box { fill: #22272e; stroke: #9ea7b0 } .group { stroke: #9ea7b0 } .end { fill: #373e47 }
  .arrow { stroke: #9ea7b0 } .tip { fill: #9ea7b0 }
}
""".strip()
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>'
)


class Box(NamedTuple):
    """A rectangle; x and y are its left upper corner."""

    x: float
    y: float
    width: float = 150
    height: float = 34

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    @property
    def centre(self) -> float:
        return self.x + self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


def _svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>\n{_STYLE}\n</style>", _TIP, *parts, "</svg>\n"]
    )


def _box(box: Box, text: str, style: str = "box", below: str = "") -> str:
    parts = [
        f'<rect class="{style}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="6"/>'
    ]
    parts.append(_text(box.centre, box.middle + 4.5, text))
    if below:
        parts.append(_text(box.centre - 8, box.bottom + 15, below, style="what", anchor="end"))
    return "".join(parts)


def _text(x: float, y: float, text: str, *, style: str = "", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{f" class={style!r}" if style else ""}>{escape(text)}</text>'
    )


def _arrow(*points: tuple[float, float]) -> str:
    return f'<polyline class="arrow" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


# The life of a task -------------------------------------------------------------------------------------------

_GROUPS = {"waiting": WAITING, "leased": LEASED}
_STATES = {
    Status.NEW: Box(20, 40),
    Status.ENQUEUED: Box(20, 150),
    Status.RETRIABLE_FAILURE: Box(20, 260),
    Status.CLAIMED: Box(370, 40),
    Status.PROCESSING: Box(370, 150),
    Status.SUCCESS: Box(690, 40),
    Status.FATAL_FAILURE: Box(690, 105),
    Status.DEAD: Box(690, 170),
    Status.CANCELLED: Box(690, 300),
}
_FRAMES = {"waiting": Box(8, 10, 174, 300), "leased": Box(358, 10, 174, 330)}


def arrows() -> dict[tuple[Status | str, Status], list[Event]]:
    """From a status, or a group all of whose members can, to the next: what makes it so."""
    found: dict[tuple[Status | str, Status], list[Event]] = defaultdict(list)
    for event in Event:
        for name, group in _GROUPS.items():
            targets = {NEXT[status].get(event) for status in group}
            if len(targets) == 1 and (target := targets.pop()) is not None:
                found[name, target].append(event)
        for status, row in NEXT.items():
            if event in row and not any(
                status in group and event in found.get((name, row[event]), []) for name, group in _GROUPS.items()
            ):
                found[status, row[event]].append(event)
    return dict(found)


def late() -> list[Event]:
    """What an *enqueued* task still takes from its last holder, as if its lease had not expired."""
    return [event for (source, _), events in arrows().items() if source is Status.ENQUEUED for event in events]


def life() -> str:
    """The table of states."""
    parts = [_box(frame, "", "group") for frame in _FRAMES.values()]
    parts += [_text(frame.x + 8, frame.y + 16, name, style="what", anchor="start") for name, frame in _FRAMES.items()]
    staying: dict[Status, list[str]] = defaultdict(list)
    for (source, target), events in arrows().items():
        if source is Status.ENQUEUED:
            continue  # late: said in words
        if source == target:
            staying[target] += events
        else:
            parts += _drawn(source, target, ", ".join(events))
    for status, box in _STATES.items():
        style = "box" if status in NEXT else "box end"
        parts.append(_box(box, status, style, ", ".join(staying[status])))
    words = f"an enqueued task takes a late report of its last holder: {', '.join(late())}"
    parts.append(_text(8, 378, words, style="what", anchor="start"))
    return _svg(850, 392, "The life of a task", parts)


def _drawn(source: Status | str, target: Status, said: str) -> list[str]:
    """One arrow, or one from each neighbour where a whole group can: level, upright, or along the bottom."""
    to = _STATES[target]
    if not isinstance(source, Status) and target in _GROUPS[source]:
        neighbours = [_STATES[status] for status in sorted(_GROUPS[source] - {target})]
        words = _text(to.centre + 6, to.y - 34, said, anchor="start")
        return [words, *(_upright(box, to) for box in neighbours)]
    box = _STATES[source] if isinstance(source, Status) else _FRAMES[source]
    if box.y <= to.middle <= box.bottom:
        begin, end = (box.right, to.x) if box.x < to.x else (box.x, to.right)
        return [_arrow((begin, to.middle), (end, to.middle)), _text((begin + end) / 2, to.middle - 6, said)]
    low = to.bottom + 14
    path = _arrow((box.centre, box.bottom), (box.centre, low), (to.centre, low), (to.centre, to.bottom))
    return [path, _text(box.centre + 60, low - 6, said)]


def _upright(box: Box, to: Box) -> str:
    return (
        _arrow((to.centre, box.bottom), (to.centre, to.y))
        if box.y < to.y
        else _arrow((to.centre, box.y), (to.centre, to.bottom))
    )


# The two-deque cycle ------------------------------------------------------------------------------------------

_WIDE = {"width": 210, "height": 50}
_PLACES = {
    "urgent": (Box(10, 10, **_WIDE), "no beat acknowledged yet"),
    "main": (Box(10, 110, **_WIDE), "still to beat, oldest first"),
    "waiting": (Box(10, 210, **_WIDE), "failed, not before retry_wait"),
    "backup": (Box(610, 110, **_WIDE), "has beaten in this cycle"),
    "rested": (Box(610, 210, **_WIDE), "failed often enough for now"),
}
_IN_FLIGHT = Box(330, 110, 170, 50)
_NO_PLACES = {"_calls", "_news"}  # what is in flight is drawn apart, and what has news is in main or backup as well


def places() -> set[str]:
    """Where a cycle has its terms, by the names in the code."""
    fresh = Cycle(Beats(), now=0, random=random.Random(0).random)  # noqa: S311 - of a picture
    return {
        name.strip("_") for name, value in vars(fresh).items() if isinstance(value, dict) and name not in _NO_PLACES
    }


def cycle() -> str:
    """Where a lease is between two beats."""
    if places() != _PLACES.keys():
        raise ValueError(f"the cycle has the places {sorted(places())}, the picture {sorted(_PLACES)}")
    urgent, main, waiting, backup, rested = (box for box, _ in _PLACES.values())
    flight = _IN_FLIGHT
    parts = [_place(box, name, why) for name, (box, why) in _PLACES.items()]
    parts.append(_place(flight, "in flight", "one call, a batch"))
    back = (
        (rested.right + 20, rested.middle),
        (rested.right + 20, 80),
        (main.centre + 60, 80),
        (main.centre + 60, main.y),
    )
    parts += [
        _arrow((main.right, main.middle - 8), (flight.x, main.middle - 8)),
        _text((main.right + flight.x) / 2, main.middle - 14, "a slot"),
        _arrow((flight.x, main.middle + 8), (main.right, main.middle + 8)),
        _text((main.right + flight.x) / 2, main.middle + 24, "throttled"),
        _arrow((urgent.right, urgent.middle), (flight.centre, urgent.middle), (flight.centre, flight.y)),
        _text((main.right + flight.x) / 2, urgent.middle - 6, "the next slot"),
        _arrow((flight.right, flight.middle), (backup.x, flight.middle)),
        _text((flight.right + backup.x) / 2, flight.middle - 6, "renewed"),
        _arrow((flight.centre, flight.bottom), (flight.centre, waiting.middle), (waiting.right, waiting.middle)),
        _arrow((flight.centre, flight.bottom), (flight.centre, rested.middle), (rested.x, rested.middle)),
        _text(flight.centre + 8, waiting.middle - 8, "failed", anchor="start"),
        _arrow((waiting.centre, waiting.y), (main.centre, main.bottom)),
        _text(waiting.centre + 6, waiting.y - 20, "then", anchor="start"),
        _arrow((rested.right, rested.middle), *back),
        _arrow((backup.right, backup.middle), (backup.right + 20, backup.middle)),
        _text((flight.right + backup.right) / 2, 72, "the next cycle begins; the rested: or the service is back"),
    ]
    return _svg(850, 270, "The places of the heartbeat cycle", parts)


def _place(box: Box, name: str, why: str) -> str:
    return (
        _box(box, "") + _text(box.centre, box.middle - 4, name) + _text(box.centre, box.middle + 14, why, style="what")
    )


# One lease in time --------------------------------------------------------------------------------------------


def lease() -> str:
    """How the seconds of one grant are spent, at the default settings."""
    beats = Beats()
    scale, top, height = 700 / beats.ttl, 70.0, 30.0
    spans = [("trust", 0.0, beats.slack), ("grace", beats.slack, beats.trust), ("margin", beats.trust, beats.ttl)]
    parts = [
        f'<rect class="{name}" x="{20 + begin * scale:.1f}" y="{top:g}" '
        f'width="{(end - begin) * scale:.1f}" height="{height:g}"/>'
        for name, begin, end in spans
    ]
    marks = [
        (0.0, "the request leaves", top - 30, "start"),
        (beats.cycle, "the next beat is due", top - 30, "middle"),
        (beats.slack, "lost: the body is told to stop", top - 30, "end"),
        (beats.trust, "end of trust: no body runs on", top + 60, "end"),
        (beats.ttl, "the service may give it to another", top + 80, "end"),
    ]
    for at, said, y, anchor in marks:
        x = 20 + at * scale
        near, far = (top, y + 6) if y < top else (top + height, y - 12)
        parts.append(f'<path class="box" d="M{x:.1f} {near:g}V{far:g}"/>')
        parts.append(_text(x, y, f"{at:g} s  {said}", anchor=anchor))
    return _svg(740, 170, "One grant of a lease in time", parts)


PICTURES = {"life": life, "cycle": cycle, "lease": lease}
"""File name → what draws it."""
