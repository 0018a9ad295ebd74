"""The chain of a task as a picture."""

from datetime import UTC, datetime

from leasekit.server.console.chain_picture import drawn
from leasekit.task import Status, TaskInfo

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def task(name: str, parent: str | None = None) -> TaskInfo:
    return TaskInfo(
        id=name, kind="k", status=Status.NEW, priority=2, attempt=0, crashes=0, fence=0, at=NOW, parent=parent,
        root="root",
    )  # fmt: skip


def test_each_task_is_to_the_right_of_the_one_that_it_came_from() -> None:
    picture = drawn([task("root"), task("a", "root"), task("b", "root"), task("c", "a")], "a")
    x = {node.id: node.x for node in picture.nodes}
    assert x["root"] < x["a"] == x["b"] < x["c"]
    assert len(picture.edges) == 3


def test_no_two_tasks_are_in_one_place() -> None:
    tasks = [task("root"), *(task(f"a{i}", "root") for i in range(5)), *(task(f"b{i}", f"a{i}") for i in range(5))]
    places = [(node.x, node.y) for node in drawn(tasks, "root").nodes]
    assert len(set(places)) == len(places)


def test_the_current_task_is_lit() -> None:
    nodes = drawn([task("root"), task("a", "root")], "a").nodes
    assert [node.id for node in nodes if node.is_current] == ["a"]


def test_a_task_whose_parent_is_gone_and_a_circle_are_drawn_without_lines() -> None:
    assert not drawn([task("a", "gone"), task("b", "gone")], "a").edges
    assert len(drawn([task("a", "b"), task("b", "a")], "a").nodes) == 2
