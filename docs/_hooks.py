"""MkDocs hooks: add pages for linked files and for the help of commands, say what copy buttons copy, refuse pages that
load from elsewhere.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel
from typer.testing import CliRunner

from _copied import with_copies
from leasekit.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[1]

# A relative link out of docs/, which GitHub follows too.
_OUT = re.compile(r"\]\(((?:\.\./)+)((?!\.\./)[\w./-]+)(#[\w-]*)?\)")
# What a page says only to readers of its source.
_SOURCE = re.compile(r"^> This is the source of the page.*\n\n", re.M)
_FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def _outside(source: Path, match: re.Match[str]) -> Path | None:
    target = (source.parent / match[1] / match[2]).resolve()
    return None if target.is_relative_to(ROOT / "docs") else target.relative_to(ROOT)


def _shown(path: Path) -> str:
    """Render a file outside of docs/ as a page; render a folder as the list of its files."""
    if (ROOT / path).is_dir():
        names = sorted(entry.name for entry in (ROOT / path).iterdir() if not entry.name.startswith(("_", ".")))
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path}\n\n````{path.suffix[1:] or 'text'}\n{text}````\n"


def _help() -> str:
    """Return the help of each command as `--help` prints it."""
    help_texts = {name: CliRunner().invoke(app, [name, "--help"], prog_name="leasekit").stdout for name in COMMANDS}
    return "\n".join(f"## leasekit {name}\n\n```text\n{text}```\n" for name, text in help_texts.items())


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file or folder outside of docs/ to which a page links."""
    linked: set[Path] = set()
    for file in files.documentation_pages():
        source = Path(file.abs_src_path)
        linked |= {
            out for match in _OUT.finditer(source.read_text(encoding="utf-8")) if (out := _outside(source, match))
        }
    for path in sorted(linked):
        content = f"---\nsearch:\n  exclude: true\n---\n\n{_shown(path)}"
        page = File.generated(config, f"source/{path}.md", content=content, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to the added pages; in an added page, replace relative links by their text."""
    if page.file.abs_src_path is None or page.file.generated_by:
        return (
            re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", markdown)
            if page.file.src_uri.endswith(".md.md")
            else markdown
        )
    markdown = _SOURCE.sub("", markdown)
    if page.file.src_uri == "reference/commands.md":
        markdown += f"\n{_help()}"
    source = Path(page.file.abs_src_path)
    up = "../" * page.file.src_uri.count("/")

    def redirect(match: re.Match[str]) -> str:
        out = _outside(source, match)
        return match[0] if out is None else f"]({up}source/{out}.md)"

    return _OUT.sub(redirect, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let a copy button copy what a reader can paste."""
    return with_copies(html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load anything from another site."""
    if fetched := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {fetched[0]} from another site: remove it")
    return output
