"""What the documents say is true: code runs, links lead somewhere, commands and files exist.

A ```python block is run as a file of its own, in an empty folder, unless the line before it says why not:
`<!-- not run: needs a server -->`.
"""

import html
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name  # pyright: ignore[reportUnknownVariableType]

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


class Block(NamedTuple):
    """A fenced block, and the line above it."""

    path: Path
    line: int
    language: str
    text: str
    before: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    lines = path.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            before = next((above for above in reversed(lines[:start]) if above.strip()), "")
            yield Block(path, start + 1, lines[start][3:].strip(), "\n".join(lines[start + 1 : number]), before)
            start = None
    assert start is None, f"{path.name}:{start}: a fence without an end"


BLOCKS = [block for path in DOCS for block in blocks(path)]
PYTHON = [block for block in BLOCKS if block.language.partition(" ")[0] in {"python", "py"}]


def prose(path: Path) -> str:
    """A document without its blocks and `code`."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """What `#…` may follow a link to this document: its headings, written as GitHub does."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)|^\[[^\]]+\]: *(\S+)", prose(path), re.M):
        target, _, anchor = "".join(link).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (path.parent / target) if target else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            yield "".join(link)


def commands(path: Path) -> set[str]:
    """Every `make X` that a document names, in a block or in `code`."""
    code = [block.text for block in BLOCKS if block.path == path and block.language not in {"python", "py"}]
    spans = re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8"))
    return set(re.findall(r"^(?:\$ *)?make +([a-z][\w-]*)", "\n".join([*code, *spans]), re.M))


def tree(block: Block) -> Iterator[str]:
    """What a drawing of folders names that is not there.

    An entry is `name/` or `name.py`; its folder shows in its indentation. More of them on the same line stand beside
    the first, or in it.
    """
    folders: list[tuple[int, Path]] = [(-1, ROOT)]
    for line in block.text.splitlines():
        names = re.findall(r"(?<!\S)\(?([\w.-]+(?:/|\.py))(?=[\s,;:)]|$)", line)
        if not names or not line.strip().startswith(names[0]):
            continue
        indent = len(line) - len(line.lstrip())
        folders = [(deep, folder) for deep, folder in folders if deep < indent]
        beside = folders[-1][1]
        first = beside / names[0]
        if first.is_dir():
            folders.append((indent, first))
        yield from (f"{name} in: {line}" for name in names if not ((beside / name).exists() or (first / name).exists()))


Forks = Callable[[Path, Path, Path], tuple[int, str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Run a script in a folder, with a file for its output, in a process whose imports have been made before."""
    package = ["testing.memory", "server.shared", "server.store.sqlite.store"]
    modules = [*(f"leasekit.{module}" for module in package), "leasekit_http"]
    command = [sys.executable, str(ROOT / "tests/forking.py"), *modules]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:

        def run(script: Path, folder: Path, output: Path) -> tuple[int, str]:
            assert parent.stdin is not None
            assert parent.stdout is not None
            print(json.dumps([str(script), str(folder), str(output)]), file=parent.stdin, flush=True)
            return int(parent.stdout.readline()), output.read_text(encoding="utf-8")

        yield run
        os.killpg(parent.pid, signal.SIGKILL)  # with a script that hangs


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_in_a_document_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec")


@pytest.mark.parametrize(
    "block", [one for one in PYTHON if not one.before.startswith("<!-- not run: ")], ids=lambda block: block.where
)
def test_python_in_a_document_runs(block: Block, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.text, encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    code, output = forks(script, empty, tmp_path / "output")
    assert code == 0, f"{block.where}\n{output}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert list(dead_links(path)) == []


def test_what_is_cloned_is_the_source_that_the_package_names() -> None:
    cloned = {block.where: re.findall(r"git clone (\S+)", block.text) for block in BLOCKS}
    assert {tuple(urls) for urls in cloned.values() if urls} == {(URLS["Source"],)}


def test_the_addresses_of_the_project_begin_with_that_of_its_source() -> None:
    assert [url for url in URLS.values() if not url.startswith(URLS["Source"])] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_command_exists(path: Path) -> None:
    assert commands(path) <= TARGETS


def copied(language: str, text: str) -> str:
    """What the copy button of a block copies: the theme takes `data-copy`, if there is one."""
    shown = highlight(text, get_lexer_by_name(language), HtmlFormatter[str](wrapcode=True))
    page = runpy.run_path(str(ROOT / "docs/_copied.py"))["with_copies"](f"<p>before</p>{shown}")
    found = re.search(r'<pre data-copy="([^"]*)"><span></span><code>', page)
    return html.unescape(found[1]) if found else ""


def test_a_console_is_copied_as_its_commands_without_prompts_and_output() -> None:
    shown = "$ echo 'a <b> & \"c\"' \\\n    > file  # why\n$100 printed\n$ cat file\na <b>\n…printed…\n"
    assert copied("console", shown) == "echo 'a <b> & \"c\"' \\\n    > file  # why\ncat file"


def test_a_diff_is_copied_as_the_code_after_the_change() -> None:
    assert copied("diff", "@@ imports\n+import b\n a = 1\n-old(a)\n+new(\n+    a)\n") == "import b\na = 1\nnew(\n    a)"


def test_other_code_is_copied_as_it_is_shown() -> None:
    assert copied("python", "a = 1\n") == copied("text", "$ a\n") == ""


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "console"], ids=lambda block: block.where)
def test_every_console_of_the_documents_can_be_copied(block: Block) -> None:
    typed = copied("console", dedent(block.text)).splitlines()
    assert typed
    assert [line for line in typed if line.startswith("$")] == []


def test_a_reader_of_the_readme_sees_at_once_that_it_is_alpha_and_which_door_is_theirs() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    seen = "\n".join(lines[:36])  # about what 1280 × 900 show
    assert len(lines) <= 160
    assert "**Alpha**" in "\n".join(lines[:5])
    assert re.findall(r"^\*\*(You [a-z]+)", seen, re.M) == ["You run", "You poll", "You have"]


def test_every_file_of_the_drawn_tree_exists() -> None:
    drawn = [block for block in BLOCKS if block.path.name == "ARCHITECTURE.md" and block.text.startswith("leasekit/")]
    assert drawn or not (ROOT / "ARCHITECTURE.md").exists(), "ARCHITECTURE.md draws no tree that begins with leasekit/"
    assert [missing for block in drawn for missing in tree(block)] == []
