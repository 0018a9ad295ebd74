"""Texts can be followed: none leads to a document that is not in the project, and no docstring is a riddle."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("leasekit", "adapters", "harness", "examples", "benchmarks", "docs", "tests", ".ci")
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


OPENS = re.compile(
    r"(?:It|Its|They|Them|Their|These|Those|That|This|He|Who|Whoever|Whose|What|Whatever|Nobody|Somebody|Someone"
    r"|Anybody|Everybody|One|All|Some|Any|None|Here|There|So)\b(?! (?:lease|task|process|module|test)\b)"
)
RIDDLE = re.compile(r"\b(?:nobody|somebody|someone|anybody|everybody|whoever|whomever|no more)\b", re.IGNORECASE)
READ = ("leasekit", "adapters", "harness", "benchmarks", "examples", "docs")


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def is_riddle(docstring: str) -> bool:
    """Whether a docstring opens with a pronoun, or has one without its noun in its first sentence."""
    first = re.split(r"(?<=[.:;])\s", docstring, maxsplit=1)[0]
    return bool(OPENS.match(docstring) or RIDDLE.search(first))


def test_a_docstring_names_its_subject() -> None:
    riddles = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for top in READ
        for path in sorted((ROOT / top).rglob("*.py")) or [ROOT / top]
        for text in docstrings(path)
        if is_riddle(text)
    ]
    assert not riddles, "begin with a verb in the imperative, or with the noun: " + "\n".join(riddles)


def test_a_riddle_is_found() -> None:
    assert is_riddle("It is over: beat it no more.")
    assert is_riddle("Make what nobody has taken visible again.")
    assert not is_riddle("Stop renewing this lease and drop its bookkeeping.")
