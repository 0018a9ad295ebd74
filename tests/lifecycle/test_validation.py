"""What may come in: sizes, nesting, and JSON that others can read."""

import msgspec
import pytest
from msgspec import Raw

from leasekit._lifecycle import validation
from leasekit.errors import Refused
from leasekit.task import Beat, NewTask, Settlement, effective
from leasekit.wire import (
    MAX_NESTING,
    MAX_PAYLOAD,
    MAX_PROGRESS,
    BeatsRequest,
    CancelRequest,
    ClaimRequest,
    ResultsRequest,
    ScheduleRequest,
)


def tasks(*payloads: object) -> list[NewTask]:
    return [NewTask(kind="a", payload=payload) for payload in payloads]


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "raw",
    [
        b"null",
        b'{"a": [1, 2.5, "\\u0000", true]}',
        b'"' + b"[" * 1000 + b'"',
        nested(MAX_NESTING),
        b'"' + b"x" * (MAX_PAYLOAD - 2) + b'"',
    ],
)
def test_a_value_within_the_bounds_passes(raw: bytes) -> None:
    validation.check_new_tasks(tasks(Raw(raw)))


@pytest.mark.parametrize(
    "raw",
    [
        b'"\xff"',
        b'"\\ud800"',
        b'"\\ud800 and more text"',
        b"1e999",
        b"9" * 5000,
        b"NaN",
        b"[1,]",
        b'{"a":1',
        b"",
        nested(MAX_NESTING + 1),
        b'{"a":' * 100 + b"1" + b"}" * 100,
        nested(100_000),
        b'"' + b"x" * (MAX_PAYLOAD - 1) + b'"',
    ],
)
def test_a_value_that_others_could_not_read_is_refused_with_its_place(raw: bytes) -> None:
    with pytest.raises(Refused) as refused:
        validation.check_new_tasks(tasks(1, Raw(raw)))
    assert [(e["item"], e["field"]) for e in refused.value.errors] == [(1, "payload")]
    assert refused.value.errors[0]["detail"]


def test_every_item_that_does_not_fit_is_named() -> None:
    with pytest.raises(Refused) as refused:
        validation.check_new_tasks(tasks(Raw(b"1e999"), 1, Raw(b"[1,]")))
    assert [e["item"] for e in refused.value.errors] == [0, 2]


def test_a_field_that_is_not_json_is_named_and_not_one_that_is_not_given() -> None:
    with pytest.raises(Refused) as refused:
        validation.checked(ScheduleRequest, {"tasks": [NewTask(kind="k", payload=object())]})
    assert [(error["item"], error["field"]) for error in refused.value.errors] == [(0, "payload")]


def test_plain_values_are_measured_as_they_would_travel() -> None:
    with pytest.raises(Refused):
        validation.check_new_tasks(tasks("x" * MAX_PAYLOAD))
    with pytest.raises(Refused):
        validation.check_new_tasks(tasks(object()))
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Refused, match="nested too deep"):
        validation.check_new_tasks(tasks(loop))


def test_a_beat_without_progress_has_nothing_to_refuse() -> None:
    validation.check_beats([Beat(id="a", token="t"), Beat(id="a", token="t", progress=None)])


def test_progress_is_bounded_on_beats_and_settlements() -> None:
    much = "x" * MAX_PROGRESS
    with pytest.raises(Refused):
        validation.check_beats([Beat(id="a", token="t", progress=much)])
    with pytest.raises(Refused):
        validation.check_settlements([Settlement(id="a", token="t", outcome="success", progress=much)])


@pytest.mark.parametrize("outcome", ["retry", "release", "cancelled", "crash"])
def test_successors_go_with_an_end_only(outcome: str) -> None:
    one = msgspec.convert({"id": "a", "token": "t", "outcome": outcome, "then": [{"kind": "b"}]}, Settlement)
    with pytest.raises(Refused) as refused:
        validation.check_settlements([one])
    assert refused.value.errors[0]["field"] == "then"


def test_a_successors_payload_is_looked_at_too() -> None:
    one = Settlement(id="a", token="t", outcome="success", then=[*tasks(1), *tasks(Raw(b"1e999"))])
    with pytest.raises(Refused) as refused:
        validation.check_settlements([one])
    assert refused.value.errors[0]["field"] == "then[1].payload"


def test_a_task_that_is_to_wait_for_others_is_refused_with_what_to_do_instead() -> None:
    waiting = NewTask(kind="b", after=["a-1"])
    one = Settlement(id="a", token="t", outcome="success", then=[waiting])
    with pytest.raises(Refused, match="schedule this task from the one before") as refused:
        validation.check_new_tasks([*tasks(1), waiting], lacks={"after"})
    assert [(e["item"], e["field"]) for e in refused.value.errors] == [(1, "after")]
    with pytest.raises(Refused) as refused:
        validation.check_settlements([one], lacks={"after"})
    assert refused.value.errors[0]["field"] == "then[0].after"


@pytest.mark.parametrize(
    ("body", "kind", "item", "field"),
    [
        (b'{"tasks": [{"kind": "a"}, {"kind": "a/b"}]}', ScheduleRequest, 1, "kind"),
        (b'{"tasks": [{"kind": "a", "retry": {"policy": "list", "waits": []}}]}', ScheduleRequest, 0, "retry.waits"),
        (b'{"tasks": []}', ScheduleRequest, None, "tasks"),
        (b'{"tasks": [{"kind": "a"}, 7]}', ScheduleRequest, 1, "tasks"),
        (b'{"tasks": [{"kind": "a", "colour": 1}]}', ScheduleRequest, 0, "colour"),
        (b"7", ScheduleRequest, None, None),
        (b'{"worker": "w", "results": [{"id": "a", "token": "t"}]}', ResultsRequest, 0, "outcome"),
        (b'{"results": [{"id": "a", "token": "t", "outcome": "crash"}]}', ResultsRequest, None, "worker"),
        (b'{"worker": "a/b", "results": []}', ResultsRequest, None, "worker"),
        (b'{"ids": ["a", "b", "c", ""]}', CancelRequest, 3, "ids"),
    ],
)
def test_what_the_types_refuse_is_told_with_item_and_field(
    body: bytes, kind: type, item: int | None, field: str | None
) -> None:
    with pytest.raises(msgspec.ValidationError) as invalid:
        msgspec.json.decode(body, type=kind)
    (error,) = validation.refusal(invalid.value).errors
    assert (error.get("item"), error.get("field")) == (item, field)
    assert error["detail"]


def test_a_refusal_repeats_no_more_than_a_little_of_what_came() -> None:
    with pytest.raises(msgspec.ValidationError) as invalid:
        msgspec.json.decode(b'{"ids": ["a"], "' + b"x" * 100_000 + b'": 1}', type=CancelRequest)
    refused = validation.refusal(invalid.value)
    assert len(str(refused)) + len(str(refused.errors)) < 3000


def test_an_integral_number_is_an_integer_however_it_is_written() -> None:
    body = (
        b'{"tasks":[{"kind":"a","priority":1,"payload":[39.0]},{"kind":"b"},'
        b'{"kind":"c","priority":3.0,"max_attempts":2e1,"max_crashes":4.00,"payload":39.0}]}'
    )
    tasks = validation.read(body, ScheduleRequest).tasks
    settings = [effective(task) for task in tasks[::2]]
    assert [(it.priority, it.max_attempts, it.max_crashes) for it in settings] == [(1, 25, 5), (3, 20, 4)]
    assert [bytes(task.payload) for task in tasks[::2]] == [b"[39.0]", b"39.0"]
    assert type(tasks[2].priority) is int
    beat = b'{"worker":"w","beats":[{"id":"a","token":"t","progress":1.0,"progress_seq":7.0}]}'
    assert validation.read(beat, BeatsRequest).beats[0].progress_seq == 7
    assert validation.checked(ClaimRequest, {"worker": "w", "kinds": ["a"], "claim_id": "c", "limit": 2.0}).limit == 2


@pytest.mark.parametrize(
    "tasks",
    [
        b'{"kind":"a","priority":1.5}',
        b'{"kind":"a","priority":"1"}',
        b'{"kind":"a","priority":7.0}',
        b'{"kind":"a","priority":-1e300}',
        b'{"kind":"a","priority":1.0},[]',
        b'{"kind":"a","priority":1.0,"colour":1.0}',
    ],
)
def test_a_number_that_is_no_integer_of_the_schema_is_refused(tasks: bytes) -> None:
    with pytest.raises(Refused):
        validation.read(b'{"tasks":[%b]}' % tasks, ScheduleRequest)
