"""Secrets are compared in constant time only: `==` tells by its duration how much of a guess is right."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("leasekit", "adapters") for path in (ROOT / top).rglob("*.py"))
SECRET = {"secret", "password", "authorization", "bearer", "cookie", "digest", "former_digest", "_digest", "digest_of"}
OF_TOKENS = {
    "leasekit/tokens.py", "leasekit/_token_calls.py", "leasekit/cli/token.py", "leasekit/server/access.py",
    "leasekit/server/console/sessions.py", "leasekit/server/http/auth.py", "leasekit/server/roles/tokens.py",
    "leasekit/server/token_book.py", "leasekit/server/token_watch.py",
}  # fmt: skip
"""Where a digest is that of a secret; elsewhere it is that of a payload, which nobody guesses."""
OF_CLAIMS = {"leasekit/_lifecycle/transitions.py", "leasekit/server/roles/hsc.py"}
"""Where the token of a claim is judged; elsewhere a token is an access token, or that of a dry run."""


def compared(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield the comparisons of secrets by operators, each with its line."""
    operators = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(operator, operators) for operator in node.ops):
            operands = [part for side in (node.left, *node.comparators) for part in parts(side)]
            if any(name_of(operand) in names for operand in operands):
                yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.MatchValue) and name_of(node.value) in names:
            yield f"{node.lineno}: {ast.unparse(node)}"


def parts(node: ast.expr) -> list[ast.expr]:
    """Return the elements of a tuple, a list or a set; else the node itself."""
    return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return name_of(function)
        case ast.Subscript(value=value) | ast.Await(value=value) | ast.NamedExpr(value=value):
            return name_of(value)
        case _:
            return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_operator_compares_a_secret(path: Path) -> None:
    file = path.relative_to(ROOT).as_posix()
    names = SECRET if file in OF_TOKENS else SECRET - {"digest", "former_digest", "_digest", "digest_of"}
    names = names | {"token"} if file in OF_CLAIMS else names
    assert list(compared(ast.parse(path.read_text()), names)) == [], "use hmac.compare_digest"


def test_the_files_of_tokens_are_there() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in FILES} >= OF_TOKENS | OF_CLAIMS


@pytest.mark.parametrize(
    "code",
    [
        "row.digest == digest", "digest != row.digest", "digest in (row.digest, row.former_digest)",
        "(row.digest, 1) == (digest, 1)", "digest_of(secret) == known", "a if secret == b else c",
        "sorted(x for x in rows if x.secret == guess)", "1 if secret[3:] == b else 0",
    ],
)  # fmt: skip
def test_a_comparison_is_found(code: str) -> None:
    assert list(compared(ast.parse(code), SECRET))


@pytest.mark.parametrize("code", ["compare_digest(a.digest, b)", "digest is None", "rows.get(digest)", "x.digest = y"])
def test_what_compares_no_secret_is_not_found(code: str) -> None:
    assert not list(compared(ast.parse(code), SECRET))
