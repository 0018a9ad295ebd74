"""What the project says of itself can be followed: no text leads to a document that is not here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("leasekit", "adapters", "simulation", "chaos", "examples", "benchmarks", "docs", "tests", ".ci")
TEXTS = sorted(
    path
    for path in [*ROOT.glob("*.*"), ROOT / "Makefile", *(path for top in TOPS for path in (ROOT / top).rglob("*"))]
    if path.suffix in {".py", ".lua", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ""} and path.is_file()
)
ELSEWHERE = re.compile(r"\b(?:SYSTEMS|DESIGN|RELIABILITY|PITFALLS|STYLE|RENAMES|SECURITY)(?:\.md)? (?:§|[A-Z]?\d)")


def test_a_reason_stands_where_it_is_needed() -> None:
    leading = [path for path in TEXTS if ELSEWHERE.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert not leading, "these refer to a document that is not in the project: write the reason instead"


def test_a_reference_is_found() -> None:
    assert ELSEWHERE.search("as it must (" + "DESIGN" + " §6)")
    assert ELSEWHERE.search("PITFALLS" + " 17, 21")
    assert not ELSEWHERE.search("see SECURITY.md")
