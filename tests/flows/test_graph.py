"""The graph of a flow: what is wrong with it is said before its first flow starts, and names the step."""

from collections.abc import Callable
from typing import Any

import pytest

from leasekit import ConfigError, Flow
from leasekit._flows.graph import Graph, Node

Steps = dict[str, dict[str, Any]]


def graph(steps: Steps) -> Graph:
    return Graph("f", {name: Node(name=name, **edges) for name, edges in steps.items()})


@pytest.mark.parametrize(
    "steps",
    [
        {"a": {}},
        {"a": {"on_success": "b", "on_failure": "c"}, "b": {}, "c": {}},
        {"a": {"on_success": "b"}, "b": {"on_success": "a", "choices": ("c",)}, "c": {}},
        {"a": {"on_success": "a", "choices": ("b",)}, "b": {}},
        {"a": {"on_success": "b"}, "b": {"is_mapped": True, "on_success": "c"}, "c": {"retry_every": 1}},
        {"a": {"on_success": "b"}, "b": {"on_failure": "clean"}, "clean": {"on_success": "a"}},
        {"a": {"on_failure": "b"}, "b": {"on_failure": "c"}, "c": {}},
    ],
)
def test_a_graph_with_a_way_to_an_end_is_taken(steps: Steps) -> None:
    assert graph(steps).first == "a"


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ({}, "it has no step: declare the first with @flow.step()"),
        (
            {"verify": {}, "create": {"on_success": "verfy"}},
            "on_success of step 'create' names 'verfy', which is no step: did you mean 'verify'?",
        ),
        ({"a": {"on_failure": "x"}}, "on_failure of step 'a' names 'x', which is no step: they are a"),
        ({"a": {"choices": ("x",)}}, "choices of step 'a' names 'x', which is no step: they are a"),
        ({"a": {}, "b": {}}, "step 'b' is never reached: no way leads to it from 'a', the first step"),
        (
            {"a": {"on_success": "b"}, "b": {"on_success": "c"}, "c": {"on_success": "b"}},
            "step 'a' is in a circle without an exit: 'a' → 'b' → 'c' → 'b': let one step return flow.goto",
        ),
        (
            {"a": {"on_success": "a"}},
            "step 'a' is in a circle without an exit: 'a' → 'a': let one step return flow.goto",
        ),
        (
            {"a": {"on_success": "a", "on_failure": "b"}, "b": {}},
            "step 'a' is in a circle without an exit: 'a' → 'a': let one step return flow.goto",
        ),
        (
            {"a": {"on_failure": "a"}},
            "the failures of step 'a' lead back to it: it would fail for ever: let one of them end",
        ),
        (
            {"a": {"on_failure": "b"}, "b": {"on_failure": "a"}},
            "the failures of step 'a' lead back to it: it would fail for ever: let one of them end",
        ),
        ({"a": {"retry_until": 5}}, "step 'a' has retry_until and no retry_every: say how often it is tried"),
        (
            {"a": {"is_mapped": True, "on_success": "b"}, "b": {}},
            "step 'a' is the first and has `each`: begin with a step that runs once",
        ),
        (
            {"a": {"on_success": "b"}, "b": {"is_mapped": True}},
            "step 'b' has `each` and no on_success: name the step that gets the results",
        ),
        (
            {"a": {"on_success": "b"}, "b": {"is_mapped": True, "on_success": "a", "choices": ("a",)}},
            "step 'b' has `each` and choices: its branches meet in one step, on_success",
        ),
        (
            {
                "a": {"on_success": "b"},
                "b": {"is_mapped": True, "on_success": "c"},
                "c": {"is_mapped": True, "on_success": "d"},
                "d": {},
            },
            "on_success of step 'b' names 'c', which has `each`: put a step between",
        ),
    ],
)
def test_a_graph_with_a_fault_is_refused(steps: Steps, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        graph(steps)
    assert str(refused.value) == f"flow 'f': {fault}"


def test_a_step_is_declared_once() -> None:
    flow = Flow("f", state=dict)
    flow.step()(lambda_named("a"))
    with pytest.raises(ConfigError, match="flow 'f': step 'a' is declared twice: give one of them another name"):
        flow.step()(lambda_named("a"))


def lambda_named(name: str) -> Callable[[dict[str, Any]], None]:
    def function(state: dict[str, Any]) -> None: ...

    function.__name__ = name
    return function


def test_a_name_that_is_no_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="flow 'a/b': this is not a valid name"):
        Flow("a/b", state=dict)


def test_a_step_has_options_of_tasks_and_of_steps() -> None:
    flow = Flow("f", state=dict)
    with pytest.raises(TypeError, match="'max_crashes' is no option of a step"):
        flow.step(max_crashes=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="flow 'f': step 'a': max_attempts must be a whole number"):
        flow.step(max_attempts=0)(lambda_named("a"))
    with pytest.raises(ConfigError, match=r"flow 'f': step 'a': .*priority"):
        flow.step(priority=9)(lambda_named("a"))


def test_a_step_takes_the_state_and_may_take_the_step() -> None:
    flow = Flow("f", state=dict)

    def nothing() -> None: ...

    with pytest.raises(ConfigError, match=r"step 'nothing' must take the state, and may take the step: \(state\) or"):
        flow.step()(nothing)


def test_a_flow_is_drawn() -> None:
    flow = Flow("f", state=dict)
    flow.step(on_success="verify", on_failure="back")(lambda_named("create"))
    flow.step(retry_every=3, retry_until=120, on_success="convert", on_failure="back")(lambda_named("verify"))
    flow.step(each=lambda state: state["pages"], on_success="done")(lambda_named("convert"))
    flow.step(choices=["create"])(lambda_named("done"))
    flow.step()(lambda_named("back"))
    assert flow.draw().splitlines() == [
        "create",
        "  ──▶ verify",
        "  ──✗ back",
        "verify (again every 3 s, for 120 s)",
        "  ──▶ convert",
        "  ──✗ back",
        "convert (for each item)",
        "  ──▶ done",
        "done",
        "  ─ ─▶ create",
        "  ──■ end",
        "back",
        "  ──■ end",
    ]
    assert flow.draw("mermaid").splitlines() == [
        "flowchart LR",
        '    s0["create"]',
        '    s1["verify (again every 3 s, for 120 s)"]',
        '    s2["convert (for each item)"]',
        '    s3["done"]',
        '    s4["back"]',
        "    s0 --> s1",
        "    s0 -.->|failure| s4",
        "    s1 --> s2",
        "    s1 -.->|failure| s4",
        "    s1 -->|not yet| s1",
        "    s2 --> s3",
        "    s3 -->|chosen| s0",
        "    s3 --> done((end))",
        "    s4 --> done((end))",
    ]
