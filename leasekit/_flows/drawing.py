"""Pictures of a graph: as text, for a terminal, and for Mermaid, for documents."""

from collections.abc import Iterator

from leasekit._flows.graph import Graph, Node

_WORDS = {"on_success": "", "choices": "chosen", "on_failure": "failure"}


def text(graph: Graph) -> str:
    """Return a line for each step, in the order in which they are declared, and one for each edge below it."""
    lines: list[str] = []
    for node in graph.nodes.values():
        lines.append(f"{node.name}{_notes(node)}")
        lines += [f"  {mark} {to}" for mark, to in _edges(node)]
    return "\n".join(lines)


def _edges(node: Node) -> Iterator[tuple[str, str]]:
    marks = {"on_success": "──▶", "choices": "─ ─▶", "on_failure": "──✗"}
    yield from ((marks[kind], name) for kind, name in node.edges)
    if node.on_success is None:
        yield "──■", "end"


def _notes(node: Node) -> str:
    notes = ["for each item"] if node.is_mapped else []
    if node.retry_every is not None:
        until = "" if node.retry_until is None else f", for {node.retry_until:g} s"
        notes.append(f"again every {node.retry_every:g} s{until}")
    return f" ({'; '.join(notes)})" if notes else ""


def mermaid(graph: Graph) -> str:
    """Return the graph as a flowchart of Mermaid."""
    ids = {name: f"s{number}" for number, name in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for name, node in graph.nodes.items():
        label = f"{name}{_notes(node)}".replace('"', "#quot;")
        lines.append(f'    {ids[name]}["{label}"]')
    for name, node in graph.nodes.items():
        for kind, to in node.edges:
            arrow = "-.->" if kind == "on_failure" else "-->"
            word = f"|{_WORDS[kind]}|" if _WORDS[kind] else ""
            lines.append(f"    {ids[name]} {arrow}{word} {ids[to]}")
        if node.retry_every is not None:
            lines.append(f"    {ids[name]} -->|not yet| {ids[name]}")
        if node.on_success is None:
            lines.append(f"    {ids[name]} --> done((end))")
    return "\n".join(lines)
