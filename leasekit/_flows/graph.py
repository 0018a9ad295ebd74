"""The graph of a flow: its steps, the edges between them, and what is wrong with them.

    step ──┬── on_success ──▶ step        the step returned
           ├── choices ─────▶ step        the step returned `flow.goto(…)`
           ├── on_failure ──▶ step        the step failed for good: the way back
           └── (retry)                    the step raised `NotYet`: the same step again

Rule 1: a step without `on_success` ends the flow when it returns. A step without `on_failure` that fails stops the flow
        where it is, and it can be resumed from there.
Rule 2: a mapped step runs once for each item of a list. Its `on_success` is the join, which runs when all have ended.
Rule 3: what is wrong with a graph is found before its first flow starts, and the message names the step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from leasekit.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A step, as the graph sees it: its edges, and for how long it is tried."""

    name: str
    on_success: str | None = None
    on_failure: str | None = None
    choices: tuple[str, ...] = ()
    is_mapped: bool = False
    max_attempts: int | None = 5
    retry_every: float | None = None
    retry_until: float | None = None

    @property
    def edges(self) -> Iterator[tuple[str, str]]:
        """The edges to other steps, each with the argument that declares it."""
        if self.on_success is not None:
            yield "on_success", self.on_success
        yield from (("choices", name) for name in self.choices)
        if self.on_failure is not None:
            yield "on_failure", self.on_failure

    @property
    def onward(self) -> Iterator[str]:
        """The steps to which this one leads without a failure."""
        return (name for kind, name in self.edges if kind != "on_failure")


class Graph:
    """The steps of one flow, checked. The first that was declared is the first that runs."""

    def __init__(self, flow: str, nodes: Mapping[str, Node]) -> None:
        """Check the graph. Raises `ConfigError`, which names the step, for one that no flow could go through."""
        self.flow = flow
        self.nodes = dict(nodes)
        if fault := next(self._faults(), None):
            raise ConfigError(f"flow {flow!r}: {fault}")

    @property
    def first(self) -> str:
        return next(iter(self.nodes))

    def _faults(self) -> Iterator[str]:
        if not self.nodes:
            yield "it has no step: declare the first with @flow.step()"
            return
        for node in self.nodes.values():
            yield from self._faults_of(node)
        if self.nodes[self.first].is_mapped:
            yield f"step {self.first!r} is the first and has `each`: begin with a step that runs once"
        reached = self._after(self.first, lambda node: [name for _, name in node.edges])
        for name in self.nodes:
            if name not in reached and name != self.first:
                yield f"step {name!r} is never reached: no way leads to it from {self.first!r}, the first step"
        for name, node in self.nodes.items():
            ways = {name} | self._after(name, lambda node: node.onward)
            if not any(self.nodes[end].on_success is None for end in ways):
                yield f"step {name!r} is in a circle without an exit: {self._way(node)}: let one step return flow.goto"
            if node.on_failure and name in self._after(name, lambda node: [node.on_failure] if node.on_failure else []):
                yield f"the failures of step {name!r} lead back to it: it would fail for ever: let one of them end"

    def _faults_of(self, node: Node) -> Iterator[str]:
        for argument, name in node.edges:
            if name not in self.nodes:
                close = get_close_matches(name, self.nodes, 1)
                hint = f": did you mean {close[0]!r}?" if close else f": they are {', '.join(self.nodes)}"
                yield f"{argument} of step {node.name!r} names {name!r}, which is no step{hint}"
        if node.retry_until is not None and node.retry_every is None:
            yield f"step {node.name!r} has retry_until and no retry_every: say how often it is tried"
        if not node.is_mapped:
            return
        if node.choices:
            yield f"step {node.name!r} has `each` and choices: its branches meet in one step, on_success"
        if node.on_success is None:
            yield f"step {node.name!r} has `each` and no on_success: name the step that gets the results"
        elif node.on_success in self.nodes and self.nodes[node.on_success].is_mapped:
            yield f"on_success of step {node.name!r} names {node.on_success!r}, which has `each`: put a step between"

    def _after(self, name: str, edges: Callable[[Node], Iterable[str]]) -> set[str]:
        """Return the steps that can follow this one, itself only if it can follow itself."""
        found: set[str] = set()
        left = [*edges(self.nodes[name])]
        while left:
            if (step := left.pop()) not in found:
                found.add(step)
                left += edges(self.nodes[step])
        return found

    def _way(self, node: Node) -> str:
        """Return the steps of a circle, in words."""
        way = [node.name]
        while way[-1] not in way[:-1]:
            way.append(next(self.nodes[way[-1]].onward))
        return " → ".join(map(repr, way))
