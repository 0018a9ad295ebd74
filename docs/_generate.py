"""Writes what the documents say from the code: pictures, the reference, and what stands between marks in pages.

    <!-- begin: budget -->
    …
    <!-- end -->

`python docs/_generate.py` writes; `generated()` says what there should be, for the test that it is there.
"""

import re
from collections.abc import Callable
from pathlib import Path

from _pictures import PICTURES
from _protocol import bounds, calls, items, refusals, states
from _reference import PAGES, table
from _words import unused
from leasekit import Beats

__all__ = ["generated"]

HERE = Path(__file__).parent


def budget() -> str:
    """The sum, as it is printed."""
    return f"```text\n{Beats().budget()}\n```"


def rhythms() -> str:
    """What follows from a ttl."""
    rows = [
        [
            *(f"{number:.3g}" for number in (b.ttl, b.cycle, b.rate, b.margin, b.grace, b.call_timeout, b.retry_wait)),
            f"{b.outage_survived:.3g}",
            f"{b.capacity:,d}",
        ]
        for b in (Beats().for_ttl(ttl) for ttl in (10, 30, 60, 300, 900))
    ]
    head = ("ttl", "cycle", "rate", "margin", "grace", "call_timeout", "retry_wait", "outage survived", "capacity")
    return table(head, rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "bounds": bounds,
    "budget": budget,
    "calls": calls,
    "items": items,
    "refusals": refusals,
    "rhythms": rhythms,
    "states": states,
}
"""Name of a mark → what stands there."""

_MARK = re.compile(r"(<!-- begin: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def generated() -> dict[Path, str]:
    """Every file that is generated, or has a part that is, as it should be."""
    files = {HERE / "pictures" / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    files |= {HERE / "reference" / f"{name}.md": write() for name, write in PAGES.items()}
    sections = {name: write() for name, write in SECTIONS.items()}
    for path in HERE.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        if _MARK.search(text):
            files[path] = _MARK.sub(lambda mark: f"{mark[1]}\n{sections[mark[2]]}\n{mark[3]}", text)
    if spare := unused():
        raise ValueError(f"words in docs/_words.py that nobody needs: {', '.join(sorted(spare))}")
    return files


if __name__ == "__main__":
    for path, text in generated().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(HERE.parent)}")
