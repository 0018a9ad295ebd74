"""The values that everyone exchanges: how long to wait for the next attempt, what a name is, what is compared."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasekit._binding import bind, reserve_of
from leasekit.task import (
    DEFAULTS,
    Beat,
    CompleteSettings,
    Exponential,
    FixedDelays,
    Name,
    NewTask,
    Polynomial,
    RetryPolicy,
    Status,
    Task,
    TaskSettings,
    effective,
)

tries = st.integers(1, 1_000_000)


class Fixed(random.Random):
    """Chance that always gives the same."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def random(self) -> float:
        return self._value


NONE, MOST = Fixed(0.0), Fixed(1 - 2**-53)


# Exponential ------------------------------------------------------------------------------------------------------


def test_an_exponential_wait_grows_by_its_factor() -> None:
    policy = Exponential(first=2, factor=3)
    assert [policy.wait(n, NONE) for n in (1, 2, 3, 4)] == [2, 6, 18, 54]


def test_an_exponential_wait_ends_at_its_max() -> None:
    assert Exponential(first=1, factor=2, max=60).wait(30, NONE) == 60


def test_the_default_doubles_from_a_second_to_twelve_hours() -> None:
    assert [Exponential().wait(n, NONE) for n in (1, 2, 16, 17, 100)] == [1, 2, 32_768, 43_200, 43_200]


def test_the_default_attempts_outlast_a_night_whatever_the_chance_and_a_weekend_on_average() -> None:
    """A broken deploy that is mended in the morning, or on Monday, has killed no task."""
    attempts = DEFAULTS.max_attempts
    assert attempts is not None
    longest, shortest = (sum(Exponential().wait(n, chance) for n in range(1, attempts)) for chance in (NONE, MOST))
    assert [round(seconds / 3600) for seconds in (shortest, longest)] == [57, 114]


def test_jitter_shortens_a_wait_and_never_lengthens_it() -> None:
    policy = Exponential(first=100, jitter=0.5)
    assert policy.wait(1, NONE) == 100
    assert policy.wait(1, MOST) == pytest.approx(50)


def test_without_jitter_chance_changes_nothing() -> None:
    assert Exponential(first=7, jitter=0).wait(1, MOST) == 7


@given(
    n=tries,
    first=st.floats(1e-3, 1e6),
    factor=st.floats(1, 100),
    most=st.floats(1e-3, 1e6),
    jitter=st.floats(0, 1),
    seed=st.integers(),
)
def test_an_exponential_wait_is_between_nothing_and_its_max_after_any_number_of_tries(
    n: int, first: float, factor: float, most: float, jitter: float, seed: int
) -> None:
    policy = Exponential(first=first, factor=factor, max=most, jitter=jitter)
    assert 0 <= policy.wait(n, random.Random(seed)) <= most


# Polynomial and lists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "shortest", "longest"), [(1, 16, 76), (2, 31, 121), (5, 640, 820)])
def test_a_polynomial_wait_is_n_to_the_fourth_and_15_and_some_chance(n: int, shortest: float, longest: float) -> None:
    assert Polynomial().wait(n, NONE) == shortest
    assert Polynomial().wait(n, MOST) == pytest.approx(longest)


@given(tries)
def test_a_polynomial_wait_stays_within_four_years(n: int) -> None:
    assert Polynomial().wait(n, NONE) <= 100**4 + 15


def test_a_list_gives_its_waits_in_order_and_its_last_for_ever() -> None:
    policy = FixedDelays(waits=[1, 5, 30])
    assert [policy.wait(n, MOST) for n in (1, 2, 3, 4, 1000)] == [1, 5, 30, 30, 30]


# On the wire ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ('{"policy":"exponential","first":1,"factor":2,"max":43200,"jitter":0.5}', Exponential()),
        ('{"policy":"exponential"}', Exponential()),
        ('{"policy":"polynomial"}', Polynomial()),
        ('{"policy":"list","waits":[1,5]}', FixedDelays(waits=[1, 5])),
    ],
)
def test_a_retry_policy_is_told_by_its_name(text: str, policy: RetryPolicy) -> None:
    decoded: RetryPolicy = msgspec.json.decode(text, type=RetryPolicy)
    assert decoded == policy
    again: RetryPolicy = msgspec.json.decode(msgspec.json.encode(policy), type=RetryPolicy)
    assert again == policy


@pytest.mark.parametrize(
    "text",
    [
        '{"policy":"exponential","first":0}',
        '{"policy":"exponential","factor":0.5}',
        '{"policy":"exponential","jitter":1.5}',
        '{"policy":"exponential","max":1e12}',
        '{"policy":"list","waits":[]}',
        '{"policy":"list","waits":[-1]}',
        '{"policy":"list"}',
        '{"policy":"never"}',
        "{}",
    ],
)
def test_a_retry_policy_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=RetryPolicy)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="/"), min_size=1, max_size=128))
def test_a_name_is_printable_ascii_without_a_slash(name: str) -> None:
    assert msgspec.convert(name, Name) == name


@pytest.mark.parametrize("name", ["", "a/b", "a\n", "\n", "a\0", "é", "a\x7f", "a" * 129])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, Name)


def test_a_task_that_is_scheduled_needs_its_kind_alone() -> None:
    assert msgspec.json.encode(NewTask(kind="k")) == b'{"kind":"k"}'


def test_a_setting_travels_where_it_is_given_also_if_it_is_the_default() -> None:
    task = NewTask(kind="k", priority=2, max_attempts=None)
    assert msgspec.json.encode(task) == b'{"priority":2,"max_attempts":null,"kind":"k"}'
    assert msgspec.json.decode(b'{"kind":"k","priority":2,"max_attempts":null}', type=NewTask) == task
    assert task != NewTask(kind="k")


def test_the_repr_of_a_task_has_the_settings_that_are_given_only() -> None:
    text = repr(NewTask(kind="k", priority=1))
    assert "priority=1" in text
    assert "UNSET" not in text


def test_a_task_has_what_it_says_then_what_its_kind_says_then_the_defaults() -> None:
    kind = effective(TaskSettings(priority=0, max_attempts=3, claim_timeout=60.0))
    settings = effective(NewTask(kind="k", max_attempts=None, priority=2), kind)
    assert settings == CompleteSettings(priority=2, max_attempts=None, claim_timeout=60.0)
    assert effective(NewTask(kind="k"), kind) is kind
    assert effective(NewTask(kind="k")) is DEFAULTS == CompleteSettings()


def test_every_setting_of_a_task_has_a_default() -> None:
    assert {*TaskSettings.__struct_fields__} == {*CompleteSettings.__struct_fields__}


def test_a_claim_grants_the_ttl_of_a_heartbeat_unless_it_has_its_own() -> None:
    assert effective(NewTask(kind="k", heartbeat_timeout=9.0)).claim_ttl == 9
    assert effective(NewTask(kind="k", heartbeat_timeout=9.0, claim_timeout=20.0)).claim_ttl == 20


def test_an_unknown_field_of_a_task_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="kynd"):
        msgspec.json.decode('{"kind":"k","kynd":1}', type=NewTask)


def test_a_beat_says_progress_only_where_there_is_some() -> None:
    assert msgspec.json.encode(Beat(id="a", token="t")) == b'{"id":"a","token":"t"}'
    assert msgspec.json.encode(Beat(id="a", token="t", progress=None)) == b'{"id":"a","token":"t","progress":null}'


# Tasks ------------------------------------------------------------------------------------------------------------


def task() -> Task:
    return Task(id="a", kind="k", token="t", ttl=300.0)


def test_a_task_has_no_client_until_it_is_bound() -> None:
    assert reserve_of(task()) is None


def test_the_client_of_a_task_is_neither_compared_nor_serialised() -> None:
    def reserve(task: Task, lease: object) -> None: ...

    bound = bind(task(), reserve)
    assert reserve_of(bound) is reserve
    assert bound == task()
    assert msgspec.json.encode(bound) == msgspec.json.encode(task())


def test_a_task_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        task().token = "another"  # type: ignore[misc]


@pytest.mark.parametrize("status", list(Status))
def test_a_status_that_has_ended_is_one_of_five(status: Status) -> None:
    assert status.ended == (status.value in {"success", "fatal_failure", "cancelled", "dropped", "dead"})
