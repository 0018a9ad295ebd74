"""What the source says of itself: comments behind fields, docstrings below names, `parameter`: in docstrings."""

import ast
import functools
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["annotations", "comments", "documented", "of_parameters", "paragraphs", "signature"]


@functools.cache
def _tokens(path: Path) -> dict[int, str]:
    """line → the comment on it."""
    source = path.read_text(encoding="utf-8")
    return {
        token.start[0]: token.string.lstrip("# ").partition("noqa")[0].partition("type: ignore")[0].strip(" #-")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }


def _fields(cls: type) -> Iterator[tuple[Path, ast.AnnAssign]]:
    path = Path(inspect.getsourcefile(cls) or "")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    yield from ((path, node) for node in found.body if isinstance(node, ast.AnnAssign))


def comments(cls: type) -> dict[str, str]:
    """Field → its comment: behind it, or on lines of their own above it; nothing where there is none."""
    said: dict[str, str] = {}
    for path, node in _fields(cls):
        lines, tokens = path.read_text(encoding="utf-8").splitlines(), _tokens(path)
        text = tokens.get(node.end_lineno or node.lineno, "")
        above = node.lineno - 1
        while not text and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        if not text:
            text = " ".join(tokens[line] for line in range(above + 1, node.lineno))
        said[ast.unparse(node.target)] = text
    return said


def annotations(cls: type) -> dict[str, str]:
    """Field → its type, as it is written."""
    return {
        node.target.id: ast.unparse(node.annotation) for _, node in _fields(cls) if isinstance(node.target, ast.Name)
    }


def documented(module: ModuleType) -> dict[str, str]:
    """Public name → docstring; of a value, the string on the line below it."""
    names: list[str] = module.__all__
    return {name: _said(module, name, getattr(module, name)) for name in names}


def _said(module: ModuleType, name: str, value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    return _below(module).get(name) or _below(sys.modules[type(value).__module__]).get(name, "")


def _below(module: ModuleType) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(module))
    said: dict[str, str] = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        match node, after:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                said[name] = inspect.cleandoc(text)
            case _:
                pass
    return said


def of_parameters(docstring: str, names: Mapping[str, Any]) -> dict[str, str]:
    """Parameter → what a docstring says behind "`parameter`:" or "`parameter` is", as far as its paragraph goes."""
    said: dict[str, str] = {}
    marks = "|".join(map(re.escape, names))
    for paragraph in paragraphs(docstring):
        parts = re.split(rf"(?:^|(?<=[.!?] ))`({marks})`(?:: | is )", paragraph)
        said |= dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
    return said


def paragraphs(docstring: str) -> list[str]:
    """Its paragraphs, a line each; drawings and code keep their lines."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    return [block if block.startswith(" ") else " ".join(block.split()) for block in blocks]


def signature(function: Any) -> str:
    """How it is called, as it is written, without `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = next(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    node.args.args = [one for one in node.args.args if one.arg != "self"]
    returns = "" if node.returns is None else ast.unparse(node.returns).strip("'")
    text = f"({ast.unparse(node.args)})" + (f" -> {returns}" if returns not in {"", "None"} else "")
    return re.sub(r"(?<=: )'([^']+)'|(?<=\[)'([A-Z]\w+)'", r"\1\2", text)
