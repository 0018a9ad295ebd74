"""`leasekit tree`, and the options of other commands that name a chain."""

import json

import leasekit
from leasekit.client import Client
from tests.cli.conftest import Run


def chain(client: Client) -> None:
    client.schedule("order", id="a")
    for task in client.tasks("order", until_idle=0):
        with leasekit.lease(task) as held:
            client.schedule("pack", id="b")
            held.then("mail", id="c")
    client.schedule("bill", id="d", after=["b"])
    client.schedule("bill", id="e", after=["c"], parent="unknown")


def test_a_chain_is_drawn_from_any_of_its_tasks(run: Run, client: Client) -> None:
    chain(client)
    drawn = [
        "a        order  success",
        "├─ b     pack   new",
        '│  └─ d  bill   new      waits for "b" to succeed',
        "└─ c     mail   new",
    ]
    for name in "abcd":
        assert run("tree", name).stdout.splitlines() == drawn
    assert run("tree", "e").stdout == 'e  bill  new  waits for "c" to succeed\n'
    found = [json.loads(line) for line in run("tree", "a", "--json").stdout.splitlines()]
    assert [(task["id"], task["parent"], task["root"]) for task in found] == [
        ("a", None, "a"), ("b", "a", "a"), ("d", "b", "a"), ("c", "a", "a"),
    ]  # fmt: skip


def test_a_long_chain_is_drawn_whole(run: Run, client: Client) -> None:
    client.schedule_all([leasekit.NewTask(kind="k", id=f"t{n}", parent=f"t{n - 1}" if n else None) for n in range(100)])
    lines = run("tree", "t99").stdout.splitlines()
    assert [line.split()[-3] for line in lines] == [f"t{n}" for n in range(100)]
    assert max(map(len, lines)) < 150
    done = run("tree", "t99", "--limit", "3")
    assert len(done.stdout.splitlines()) == 3
    assert "there are more" in done.stderr


def test_a_task_that_is_unknown_has_no_tree(run: Run) -> None:
    done = run("tree", "a")
    assert done.exit_code == 1
    assert "there is no task 'a'" in done.stderr


def test_a_chain_is_listed_and_cancelled(run: Run, client: Client) -> None:
    chain(client)
    assert [line.split("\t")[0] for line in run("tasks", "--root", "a").stdout.splitlines()] == ["a", "b", "c", "d"]
    assert run("cancel", "--chain", "d").stdout == "b\tcancelled\nc\tcancelled\nd\tcancelled\n"
    assert run("tasks", "--root", "a", "--follow").exit_code == 2
    assert run("cancel", "--chain", "--named", "a").exit_code == 2


def test_what_a_run_schedules_comes_from_it(client: Client) -> None:
    client.schedule("order", id="a")
    with client.named("n"):
        client.schedule("k", id="alone")
        with leasekit.lease(next(client.tasks("order"))):
            client.schedule("k", id="inside")
        client.schedule("k", id="behind")
    found = {name: client.get(name) for name in ("alone", "inside", "behind")}
    assert {name: info.parent for name, info in found.items() if info} == {"alone": None, "inside": "a", "behind": None}
