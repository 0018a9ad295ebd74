"""Decide what the copy button of a code block copies: what a reader can paste."""

import html
import re

# A block as pymdownx.highlight writes it. Pygments marks the prompts of a console (gp) and new lines of a diff (gi).
_BLOCK = re.compile(r"<pre(?=><span></span><code>(?P<code>.*?)</code></pre>)", re.S)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.M)


def commands(console: str) -> str:
    """Return the commands of a console without their prompts, and nothing of what they print."""
    return "\n".join(_COMMAND.findall(console))


def changed(diff: str) -> str:
    """Return the code of a diff as it is after the change."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(("-", "@@")))


def _with_copy(block: re.Match[str]) -> str:
    text = html.unescape(re.sub(r"<[^>]+>", "", block["code"]))
    if '<span class="gp">' in block["code"]:
        return f'<pre data-copy="{html.escape(commands(text))}"'
    if '<span class="gi">' in block["code"]:
        return f'<pre data-copy="{html.escape(changed(text))}"'
    return block[0]


def with_copies(page: str) -> str:
    """Return the HTML of a page with what the theme copies, at each block that is not copied as it is shown."""
    return _BLOCK.sub(_with_copy, page)
