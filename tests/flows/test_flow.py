"""Flows, from the first step to an end: on a worker, over stores that know chains."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

import leasekit
from leasekit import Client, ConfigError, Fatal, FixedDelays, Flow, NotYet, Refused, Step, Worker
from leasekit._flows.records import Call
from leasekit.flows import Goto
from leasekit.task import Settlement, Status
from tests.sampling import slow_after


class Vm(Struct):
    name: str
    ip: str | None = None
    log: list[str] = []


@pytest.fixture(params=["memory", "sqlite"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    with leasekit.connect("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db") as client:
        yield client


class Cloud:
    """A flow, and what its steps do."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.fails: dict[str, Exception] = {}
        self.waits = 0
        self.ran: list[str] = []
        self.flow = flow = Flow("create-vm", state=Vm)

        @flow.step(on_success="verify", on_failure="roll_back", retry=FixedDelays(waits=[0]))
        def create(vm: Vm) -> Vm:
            self.run("create")
            return Vm(vm.name, ip="10.0.0.1")

        @flow.step(retry_every=0, retry_until=60, on_success="record", on_failure="roll_back")
        def verify(vm: Vm) -> Vm:
            self.run("verify")
            if self.waits:
                self.waits -= 1
                raise NotYet
            return vm

        @flow.step(retry=FixedDelays(waits=[0]))
        def record(vm: Vm) -> None:
            self.run("record")

        @flow.step()
        def roll_back(vm: Vm, step: Step) -> Vm:
            self.run("roll_back")
            assert step.failure is not None
            return Vm(vm.name, log=[step.failure.step])

        self.worker = Worker(client)
        self.worker.add(flow)

    def run(self, step: str) -> None:
        self.ran.append(step)
        if step in self.fails:
            raise self.fails[step]

    def start(self) -> leasekit.FlowInfo:
        flow_id = self.flow.start(self.client, Vm("web")).id
        self.worker.drain()
        return self.info(flow_id)

    def info(self, flow_id: str) -> leasekit.FlowInfo:
        found = self.client.flow(flow_id)
        assert found is not None
        return found


@pytest.fixture
def cloud(client: Client) -> Cloud:
    return Cloud(client)


def test_each_step_gets_what_the_one_before_returned(cloud: Cloud) -> None:
    info = cloud.start()
    assert cloud.ran == ["create", "verify", "record"]
    assert (info.status, info.steps, info.workload) == ("succeeded", [], 3)
    assert info.state == {"name": "web", "ip": "10.0.0.1", "log": []}
    assert [(step.step, step.edge, step.to) for step in info.history] == [
        ("create", "success", "verify"),
        ("verify", "success", "record"),
        ("record", "success", None),
    ]


def test_a_step_that_is_not_ready_is_called_again(cloud: Cloud) -> None:
    cloud.waits = 4
    info = cloud.start()
    assert (info.status, info.workload) == ("succeeded", 7)
    assert [step.executions for step in info.history] == [1, 5, 1]


def test_a_fatal_failure_takes_its_edge_at_once(cloud: Cloud) -> None:
    cloud.fails["create"] = Fatal("no quota")
    info = cloud.start()
    assert cloud.ran == ["create", "roll_back"]
    assert (info.status, info.state["log"]) == ("rolled_back", ["create"])
    assert info.failure is not None
    assert (info.failure.step, info.failure.error["message"]) == ("create", "no quota")
    assert info.history[0].error["message"] == "no quota"


def test_a_failure_takes_its_edge_after_the_last_attempt(cloud: Cloud) -> None:
    cloud.fails["create"] = RuntimeError("busy")
    info = cloud.start()
    assert cloud.ran == ["create"] * 5 + ["roll_back"]
    assert (info.status, info.workload) == ("rolled_back", 6)
    task = cloud.client.get(info.history[0].task_id)
    assert task is not None
    assert task.attempt == 5  # no sixth one had to find out that there were five


def test_a_step_that_fails_without_an_edge_stops_the_flow_which_can_be_resumed_from_there(cloud: Cloud) -> None:
    cloud.fails["record"] = RuntimeError("database down")
    info = cloud.start()
    assert (info.status, info.steps) == ("failed", ["record"])
    assert info.failure is not None
    assert info.failure.error["message"] == "database down"
    assert cloud.ran == ["create", "verify"] + ["record"] * 5
    cloud.ran.clear()
    cloud.client.resume_flow(info.id)
    cloud.worker.drain()
    assert cloud.ran == ["record"] * 5  # as many attempts as at first
    del cloud.fails["record"]
    cloud.client.resume_flow(info.id)
    cloud.worker.drain()
    info = cloud.info(info.id)
    assert (info.status, info.failure, info.workload) == ("succeeded", None, 2 + 5 + 5 + 1)


def test_a_cancelled_flow_goes_no_further_whatever_ends_meanwhile(cloud: Cloud) -> None:
    flow_id = cloud.flow.start(cloud.client, Vm("web")).id

    def cancelled(step: str) -> None:
        cloud.ran.append(step)
        cloud.client.cancel_flow(flow_id)

    cloud.run = cancelled  # type: ignore[method-assign]
    cloud.worker.drain()
    info = cloud.info(flow_id)
    assert cloud.ran == ["create"]
    assert (info.status, info.steps) == ("cancelled", [])
    assert [(step.step, step.status) for step in info.history] == [
        ("create", Status.SUCCESS),
        ("verify", Status.CANCELLED),  # it is where the cancel was found, in the transaction that settled `create`
    ]
    with pytest.raises(Refused, match=f"flow '{flow_id}' is cancelled: no step of it has failed"):
        cloud.client.resume_flow(flow_id)


def test_a_flow_goes_on_when_the_steps_behind_it_have_been_removed(cloud: Cloud) -> None:
    def purged(step: str) -> None:
        cloud.ran.append(step)
        cloud.client.purge(older_than=0, dry_run=False)

    cloud.run = purged  # type: ignore[method-assign]
    flow_id = cloud.flow.start(cloud.client, Vm("web")).id
    cloud.worker.drain()
    assert cloud.ran == ["create", "verify", "record"]
    assert [task.status for task in cloud.client.list_tasks(root=flow_id).tasks] == [Status.SUCCESS]


def test_a_flow_that_waits_is_cancelled_at_once(cloud: Cloud) -> None:
    flow_id = cloud.flow.start(cloud.client, Vm("web"), delay=60).id
    assert [verdict.verdict for verdict in cloud.client.cancel_flow(flow_id)] == ["cancelled"]
    assert cloud.info(flow_id).status == "cancelled"


def test_a_flow_is_known_by_its_id_and_by_those_of_its_steps(cloud: Cloud) -> None:
    info = cloud.start()
    assert [cloud.client.flow(step.task_id) for step in info.history] == [info] * 3
    assert cloud.client.flow("another") is None
    with pytest.raises(Refused, match="there is no flow 'another'"):
        cloud.client.cancel_flow("another")
    with pytest.raises(Refused, match="there is no flow 'another'"):
        cloud.client.resume_flow("another")


def test_a_flow_is_started_once(cloud: Cloud) -> None:
    assert cloud.flow.start(cloud.client, Vm("web"), id="web").created
    again = cloud.flow.start(cloud.client, Vm("web"), id="web")
    assert (again.id, again.created, again.conflict) == ("web", False, False)
    assert cloud.flow.start(cloud.client, Vm("other"), id="web").conflict


def test_options_hold_for_all_steps(cloud: Cloud) -> None:
    flow_id = cloud.flow.start(cloud.client, Vm("web"), collection="eu", key="acme", priority=1).id
    cloud.worker.drain()
    tasks = cloud.client.list_tasks(root=flow_id).tasks
    assert [(task.collection, task.key, task.priority) for task in tasks] == [("eu", "acme", 1)] * 3


def test_a_flow_is_a_chain_of_its_own(cloud: Cloud) -> None:
    cloud.client.schedule("other", id="other")
    with leasekit.lease(next(cloud.client.tasks("other"))):
        cloud.flow.start(cloud.client, Vm("web"), id="web")
    cloud.worker.drain()
    assert cloud.info("web").workload == 3
    assert {task.root for task in cloud.client.list_tasks(kind=cloud.flow.kind).tasks} == {"web"}


def test_flows_are_listed_newest_first(cloud: Cloud) -> None:
    for name in ("a", "b"):
        cloud.flow.start(cloud.client, Vm(name), id=name)
    cloud.worker.drain()
    found, cursor = cloud.client.flows("create-vm")
    assert ([info.id for info in found], cursor) == (["b", "a"], None)
    assert cloud.client.flows("other") == ([], None)


def test_a_state_that_does_not_fit_is_refused(cloud: Cloud) -> None:
    with pytest.raises(ValueError, match="this state of flow 'create-vm' does not fit"):
        cloud.flow.start(cloud.client, {"name": 7})  # type: ignore[arg-type]


# One step ---------------------------------------------------------------------------------------------------------


def ends(client: Client, flow: Flow[Any], state: Any = None, **options: Any) -> leasekit.FlowInfo:
    """Start a flow, run it, and return it."""
    flow_id = flow.start(client, {} if state is None else state, **options).id
    worker = Worker(client)
    worker.add(flow)
    worker.drain()
    info = client.flow(flow_id)
    assert info is not None
    return info


def test_a_step_chooses_its_edge(client: Client) -> None:
    flow = Flow("order", state=dict[str, Any])

    @flow.step(on_success="ship", choices=["refund"])
    def check(order: dict[str, Any]) -> dict[str, Any] | Goto[dict[str, Any]]:
        return order if order["paid"] else flow.goto("refund", {"paid": False, "asked": 1})

    @flow.step()
    def ship(order: dict[str, Any]) -> dict[str, Any]:
        return {"shipped": True}

    @flow.step()
    def refund(order: dict[str, Any]) -> dict[str, Any]:
        return {**order, "refunded": True}

    assert ends(client, flow, {"paid": True}).state == {"shipped": True}
    info = ends(client, flow, {"paid": False})
    assert (info.status, info.state) == ("succeeded", {"paid": False, "asked": 1, "refunded": True})
    assert (info.history[0].edge, info.history[0].to) == ("choice", "refund")


def test_a_step_chooses_among_its_choices(client: Client) -> None:
    flow = Flow("order", state=dict[str, Any])

    @flow.step()
    def check(order: dict[str, Any]) -> Goto[dict[str, Any]]:
        return flow.goto("elsewhere", order)

    info = ends(client, flow)
    assert (info.status, info.steps) == ("failed", ["check"])
    assert info.failure is not None
    assert info.failure.error["message"] == "step 'check' chose 'elsewhere': declare it, choices=['elsewhere']"


def test_a_loop_ends_by_a_choice(client: Client) -> None:
    flow = Flow("loop", state=int)

    @flow.step(on_success="count", choices=["done"])
    def count(n: int) -> int | Goto[int]:
        return n + 1 if n < 5 else flow.goto("done", n)

    @flow.step()
    def done(n: int) -> int:
        return n * 10

    info = ends(client, flow, 1)
    assert (info.state, info.workload) == (50, 6)


def test_a_failure_that_is_made_good_is_none_of_the_flow(client: Client) -> None:
    flow = Flow("repair", state=dict[str, Any])
    tries: list[int] = []

    @flow.step(on_failure="clean", max_attempts=1)
    def build(state: dict[str, Any]) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("dirty")

    @flow.step(on_success="build")
    def clean(state: dict[str, Any]) -> None: ...

    info = ends(client, flow)
    assert [step.step for step in info.history] == ["build", "clean", "build"]
    assert (info.status, info.failure) == ("succeeded", None)


def test_a_step_that_is_never_ready_fails_in_time(client: Client) -> None:
    flow = Flow("wait", state=dict[str, Any])

    @flow.step(retry_every=0.01, retry_until=0.2, on_failure="give_up")
    def look(state: dict[str, Any]) -> None:
        raise NotYet("still pending")

    @flow.step()
    def give_up(state: dict[str, Any]) -> None: ...

    worker = Worker(client)
    worker.add(flow)
    flow_id = flow.start(client, {}).id
    info = client.flow(flow_id)
    while info is not None and info.status == "running":
        worker.drain()
        info = client.flow(flow_id)
    assert info is not None
    assert info.failure is not None
    assert info.status == "rolled_back"
    assert info.failure.error["message"].startswith("step 'look' was not ready within 0.2 s, ")
    assert info.failure.error["message"].endswith(" executions: still pending")
    assert info.workload == sum(step.executions for step in info.history)


def test_a_state_that_is_returned_must_fit(client: Client) -> None:
    flow = Flow("typed", state=Vm)

    @flow.step(on_success="done")
    def first(vm: Vm) -> Any:
        return {"name": 3}

    @flow.step()
    def done(vm: Vm) -> None: ...

    info = ends(client, flow, Vm("web"))
    assert (info.status, info.steps) == ("failed", ["first"])
    assert info.failure is not None
    assert "step 'first' returned a state that does not fit" in info.failure.error["message"]


def test_a_step_keeps_a_checkpoint_from_one_attempt_to_the_next(client: Client) -> None:
    flow = Flow("long", state=dict[str, Any])
    seen: list[tuple[int, Any]] = []

    @flow.step(retry=FixedDelays(waits=[0]))
    def work(state: dict[str, Any], step: Step) -> None:
        seen.append((step.execution, step.checkpoint))
        step.progress({"page": step.execution})
        if step.execution == 2:
            raise NotYet(after=0)
        if step.execution < 4:
            raise RuntimeError

    info = ends(client, flow)
    assert seen == [(1, None), (2, {"page": 1}), (3, {"page": 2}), (4, {"page": 3})]
    assert info.workload == 4


def test_a_step_that_waits_in_its_process_counts_what_it_does_there(client: Client) -> None:
    flow = Flow("poll", state=int)
    seen: list[tuple[int, Any]] = []

    @flow.step(retry_every=0.02)
    def look(n: int, step: Step) -> int:
        seen.append((step.execution, step.checkpoint))
        step.progress(step.execution)
        if step.execution < 4:
            raise NotYet
        return n + 1

    worker = Worker(client)
    worker.add(flow)
    at_work = threading.Thread(target=worker.run)
    at_work.start()
    try:
        flow_id = flow.start(client, 1).id
        (task,) = client.wait_tasks(flow_id, timeout=60)
    finally:
        worker.stop()
        at_work.join()
    info = client.flow(flow_id)
    assert info is not None
    assert seen == [(1, None), (2, 1), (3, 2), (4, 3)]
    assert (info.status, info.state, info.workload, len(task.history)) == ("succeeded", 2, 4, 1)


def test_a_step_of_another_version_is_left_to_the_workers_that_have_it(client: Client) -> None:
    old, new = Flow("deploy", state=dict[str, Any]), Flow("deploy", state=dict[str, Any])
    old.step()(lambda_named("first"))
    new.step(on_success="second")(lambda_named("first"))
    new.step()(lambda_named("second"))
    flow_id = new.start(client, {}).id
    with leasekit.lease(next(client.tasks("flow:deploy", until_idle=5))) as held:
        held.then("flow:deploy", {"step": "second", "flow": flow_id})
    info = client.flow(flow_id)
    worker = Worker(client)
    worker.add(old)
    worker.drain()
    info = client.flow(flow_id)
    assert info is not None
    assert (info.status, info.steps) == ("running", ["second"])


def lambda_named(name: str) -> Callable[[dict[str, Any]], None]:
    def function(state: dict[str, Any]) -> None: ...

    function.__name__ = name
    return function


def test_a_step_whose_workers_vanish_takes_the_edge_of_its_failure(client: Client) -> None:
    flow = Flow("poison", state=dict[str, Any])

    @flow.step(on_failure="back", max_attempts=2)
    def eat(state: dict[str, Any]) -> None:
        raise AssertionError("not called")

    @flow.step()
    def back(state: dict[str, Any]) -> None: ...

    flow_id = flow.start(client, {}).id
    for _ in range(2):
        task = next(client.tasks(flow.kind, until_idle=5))
        client.__connection__().run(crash(client, task))
    worker = Worker(client)
    worker.add(flow)
    worker.drain()
    info = client.flow(flow_id)
    assert info is not None
    assert info.failure is not None
    assert (info.status, info.failure.step) == ("rolled_back", "eat")
    assert info.workload == 2 + 1  # the last run of `eat` called nothing
    assert info.failure.error["message"] == "step 'eat' was begun 2 times, and its worker vanished: 2 is the most"


def test_the_service_ends_no_step_by_itself(client: Client) -> None:
    flow = Flow("tough", state=dict[str, Any])

    @flow.step(max_attempts=9, retry=FixedDelays(waits=[0]), on_success="second")
    def first(state: dict[str, Any]) -> None: ...

    @flow.step(max_attempts=9, retry=FixedDelays(waits=[0]))
    def second(state: dict[str, Any]) -> None: ...

    flow_id = flow.start(client, {}).id
    worker = Worker(client)
    worker.add(flow)
    for _ in range(2):
        for _ in range(8):  # more than the crashes that tasks have
            client.__connection__().run(crash(client, next(client.tasks(flow.kind, until_idle=5))))
        with leasekit.lease(next(client.tasks(flow.kind, until_idle=5))) as held:
            flow.__handler__()(msgspec.convert(held.task.payload, Call), held)
    info = client.flow(flow_id)
    assert info is not None
    assert (info.status, info.workload) == ("succeeded", 18)


async def crash(client: Client, task: leasekit.Task) -> None:
    backend: Any = client.__connection__().backend
    await backend.settle([Settlement(id=task.id, token=task.token, outcome="crash")])


def test_all_steps_are_async_or_none(client: Client) -> None:
    flow = Flow("mixed", state=dict[str, Any])
    flow.step(on_success="second")(lambda_named("first"))

    @flow.step()
    async def second(state: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match="flow 'mixed': some steps are `async def` and some are not"):
        Worker(client).add(flow)


def test_async_steps(client: Client) -> None:
    flow = Flow("async", state=list[int])

    @flow.step(on_success="square")
    async def first(numbers: list[int]) -> list[int]:
        return [*numbers, 3]

    @flow.step(each=lambda numbers: numbers, on_success="add")
    async def square(number: int) -> int:
        return number * number

    @flow.step()
    async def add(numbers: list[int], step: Step) -> list[int]:
        return [sum(step.results)]

    assert ends(client, flow, [1, 2]).state == [14]


@pytest.mark.parametrize("kinds", [(), ("flow:web",)])
def test_code_around_runs_is_run_around_each_call_of_a_step(client: Client, kinds: tuple[str, ...]) -> None:
    flow, worker, seen = Flow("web", state=dict[str, Any]), Worker(client), list[str]()

    @flow.step(on_success="verify")
    def create(state: dict[str, Any]) -> None:
        seen.append("create")

    @flow.step(retry_every=0)
    def verify(state: dict[str, Any]) -> None:
        seen.append("verify")
        if len(seen) < 8:
            raise NotYet

    def around(held: leasekit.Lease) -> Iterator[None]:
        seen.append("(")
        try:
            yield
        finally:
            seen.append(")")

    worker.around(*kinds)(around) if kinds else worker.around(around)
    worker.add(flow)
    flow.start(client, {})
    assert worker.drain() == 3
    assert " ".join(seen) == "( create ) ( verify ) ( verify )"


# Branches ---------------------------------------------------------------------------------------------------------


def squares(fail: tuple[int, ...] = (), *, on_failure: str | None = "back") -> Flow[list[int]]:
    """Return a flow that squares numbers, each in a branch of its own; some fail."""
    flow = Flow("squares", state=list[int])

    @flow.step(on_success="square")
    def first(numbers: list[int]) -> None: ...

    @flow.step(each=lambda numbers: numbers, on_success="add", on_failure=on_failure, max_attempts=1)
    def square(number: int) -> int:
        if number in fail:
            raise ValueError(f"{number} is odd")
        return number * number

    @flow.step()
    def add(numbers: list[int], step: Step) -> list[int]:
        return [sum(step.results), *step.results]

    if on_failure is not None:

        @flow.step()
        def back(numbers: list[int], step: Step) -> list[int]:
            assert step.failure is not None
            return [-1]

    return flow


def test_a_step_runs_for_each_item_and_the_next_has_all_results_in_order(client: Client) -> None:
    info = ends(client, squares(), [3, 1, 2])
    assert (info.status, info.state, info.workload) == ("succeeded", [14, 9, 1, 4], 5)
    assert [(step.step, step.item) for step in info.history] == [
        ("first", None), ("square", 0), ("square", 1), ("square", 2), ("add", None),
    ]  # fmt: skip


def test_an_empty_list_joins_at_once(client: Client) -> None:
    info = ends(client, squares(), [])
    assert (info.status, info.state, info.workload) == ("succeeded", [0], 2)


def test_empty_lists_one_after_the_other_join_at_once(client: Client) -> None:
    flow = Flow("nothing", state=list[int])

    @flow.step(on_success="first")
    def begin(numbers: list[int]) -> None: ...

    @flow.step(each=lambda numbers: numbers, on_success="between")
    def first(number: int) -> int:
        return number

    @flow.step(on_success="second")
    def between(numbers: list[int], step: Step) -> list[int]:
        return list(step.results)

    @flow.step(each=lambda numbers: numbers, on_success="end")
    def second(number: int) -> int:
        return number

    @flow.step()
    def end(numbers: list[int], step: Step) -> list[int]:
        return [len(step.results)]

    info = ends(client, flow, [])
    assert (info.status, info.state, info.workload) == ("succeeded", [0], 3)


def test_a_join_of_empty_lists_that_fails_is_tried_again_and_resumed(client: Client) -> None:
    flow, runs = Flow("nothing", state=list[int]), list[list[int]]()

    @flow.step(on_success="first")
    def begin(numbers: list[int]) -> None: ...

    @flow.step(each=lambda numbers: numbers, on_success="join")
    def first(number: int) -> int:
        return number

    @flow.step(on_success="second", max_attempts=2, retry=FixedDelays(waits=[0]))
    def join(numbers: list[int], step: Step) -> None:
        runs.append(list(step.results))
        if len(runs) < 4:
            raise ConnectionError

    @flow.step(each=lambda numbers: numbers, on_success="end")
    def second(number: int) -> int:
        return number

    @flow.step()
    def end(numbers: list[int], step: Step) -> list[int]:
        return [len(step.results)]

    info = ends(client, flow, [], id="f")
    assert (info.status, info.steps, runs) == ("failed", ["join"], [[]] * 2)
    client.resume_flow("f")
    worker = Worker(client)
    worker.add(flow)
    worker.drain()
    info = client.flow("f")  # type: ignore[assignment]
    assert (info.status, info.state, runs) == ("succeeded", [0], [[]] * 4)


@pytest.mark.parametrize("many", slow_after(1, [101, 100, 900]))
def test_a_step_runs_for_very_many_items(client: Client, many: int) -> None:
    info = ends(client, squares(), list(range(many)))
    assert (info.status, info.workload) == ("succeeded", many + 2)
    assert info.state == [sum(n * n for n in range(many)), *(n * n for n in range(many))]


def test_more_items_than_one_settlement_has_room_for_are_refused(client: Client) -> None:
    info = ends(client, squares(), [0] * 901)
    assert (info.status, info.steps) == ("failed", ["first"])
    assert info.failure is not None
    assert info.failure.error["message"] == "`each` of step 'square' gave 901 items, 900 is the most: group them"


def test_a_failed_branch_takes_the_edge_of_failure_when_the_others_have_ended(client: Client) -> None:
    info = ends(client, squares((1, 5)), [4, 1, 5, 2])
    assert (info.status, info.state) == ("rolled_back", [-1])
    assert info.failure is not None
    assert info.failure.step == "square"
    assert info.failure.error["message"] == "2 of 4 branches failed; the first of them is that of item 1"
    assert info.failure.error["first"]["message"] == "1 is odd"
    assert [step.step for step in info.history if step.executions] == ["first", *["square"] * 4, "back"]
    assert info.workload == 6


def test_a_branch_that_fails_without_an_edge_stops_the_flow_and_is_resumed_alone(client: Client) -> None:
    flow_id = squares((1,), on_failure=None).start(client, [4, 1, 2]).id
    info = ends(client, squares((1,), on_failure=None), [9], id="other")
    info = client.flow(flow_id)  # type: ignore[assignment]
    assert (info.status, info.steps, info.workload) == ("failed", ["square"], 4)
    client.resume_flow(flow_id)
    worker = Worker(client)
    worker.add(squares(on_failure=None))
    worker.drain()
    info = client.flow(flow_id)  # type: ignore[assignment]
    assert (info.status, info.state) == ("succeeded", [21, 16, 1, 4])
    assert info.workload == 1 + 3 + 1 + 1  # the branch that failed had two executions


def test_a_flow_that_is_cancelled_in_a_branch_runs_no_other_branch_and_does_not_join(client: Client) -> None:
    flow, ran = Flow("branches", state=list[int]), list[str]()

    @flow.step(on_success="branch")
    def first(numbers: list[int]) -> None:
        ran.append("first")

    @flow.step(each=lambda numbers: numbers, on_success="join")
    def branch(number: int) -> None:
        ran.append("branch")
        client.cancel_flow("cancelled")

    @flow.step()
    def join(numbers: list[int]) -> None:
        ran.append("join")

    flow.start(client, [1, 2, 3], id="cancelled")
    worker = Worker(client, concurrency=1, window=1)
    worker.add(flow)
    worker.drain()
    info = client.flow("cancelled")
    assert info is not None
    assert (info.status, info.steps, ran) == ("cancelled", [], ["first", "branch"])
    assert {task.status for task in client.list_tasks(root="cancelled").tasks} == {Status.SUCCESS, Status.CANCELLED}


def test_the_branches_are_where_a_flow_is_until_they_join(client: Client) -> None:
    flow = squares()
    flow_id = flow.start(client, [1, 2]).id
    worker = Worker(client)
    worker.add(flow)
    with leasekit.lease(next(client.tasks(flow.kind, until_idle=5))) as held:
        flow.__handler__()(msgspec.convert(held.task.payload, Call), held)
    info = client.flow(flow_id)
    assert info is not None
    assert (info.status, info.steps) == ("running", ["square"])
    worker.drain()


def test_a_failure_leads_back_to_branches_of_the_state(client: Client) -> None:
    flow = Flow("undo-all", state=Vm)
    undone: list[str] = []

    @flow.step(on_failure="undo")
    def build(vm: Vm) -> None:
        raise Fatal("no room")

    @flow.step(each=lambda vm: vm.log, on_success="end")
    def undo(entry: str) -> None:
        undone.append(entry)

    @flow.step()
    def end(vm: Vm) -> None: ...

    info = ends(client, flow, Vm("web", log=["disk", "net"]))
    assert (info.status, sorted(undone)) == ("rolled_back", ["disk", "net"])


def test_an_execution_changes_the_state_of_no_other(client: Client) -> None:
    flow = Flow("own", state=dict[str, Any])
    got: list[Any] = []

    def changes(state: dict[str, Any]) -> None:
        got.append([*state["pages"]])
        state["pages"].append("changed")

    @flow.step(retry_every=0, on_failure="back")
    def first(state: dict[str, Any]) -> None:
        changes(state)
        if len(got) == 1:
            raise NotYet
        raise Fatal("no room")

    @flow.step()
    def back(state: dict[str, Any]) -> None:
        changes(state)
        worker.stop()

    flow_id = flow.start(client, {"pages": []}).id
    worker = Worker(client)
    worker.add(flow)
    asyncio.run(worker.serve())
    info = client.flow(flow_id)
    assert info is not None
    assert (info.status, got) == ("rolled_back", [[], [], []])


def test_a_join_that_cannot_run_is_a_failure_of_its_step(client: Client) -> None:
    joined: list[Any] = []

    def version(on_failure: str | None) -> Flow[list[int]]:
        flow = Flow("deploy", state=list[int])
        flow.step(name="first", on_success="convert")(passes)
        flow.step(name="convert", each=lambda pages: pages, on_success="end", on_failure=on_failure)(fails)
        flow.step(name="end", max_attempts=1)(joined.append)
        if on_failure is not None:
            flow.step(name=on_failure)(passes)
        return flow

    def passes(pages: list[int]) -> None: ...

    def fails(page: int) -> None:
        raise Fatal("no paper")

    flow_id = version("back").start(client, [1]).id
    for task in client.tasks("flow:deploy", until_idle=0):
        call = msgspec.convert(task.payload, Call)
        with suppress(Fatal), leasekit.lease(task) as held:
            version(None if call.joins else "back").__handler__()(call, held)
    for _ in range(2):  # as it is run again, it says the same
        info = client.flow(flow_id)
        assert info is not None
        assert (info.status, info.steps, joined) == ("failed", ["end"], [])
        assert info.failure is not None
        assert "no on_failure" in info.failure.error["message"]
        client.resume_flow(flow_id)
        for task in client.tasks("flow:deploy", until_idle=0):
            with suppress(Fatal), leasekit.lease(task) as held:
                version(None).__handler__()(msgspec.convert(task.payload, Call), held)
