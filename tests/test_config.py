"""The numbers of a keeper: they fit together, their sums are right, and a refusal says what to change."""

import contextlib
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasekit.config import DRIFT, Heartbeats
from leasekit.errors import ConfigError

WEEK = 7 * 86400.0
DURATIONS = ("ttl", "cycle", "margin", "grace", "call_timeout", "retry_wait")

durations = st.one_of(st.floats(0, 1000), st.sampled_from([0.0, 0.1, 1.0, 2.0, 10.0, 60.0, 120.0, 300.0]))
choices = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(DURATIONS, durations),
        "rate": st.floats(0, 100),
        "strike_after": st.none() | durations,
        "burst": st.floats(0, 10),
        **dict.fromkeys(("batch", "in_flight", "max_failures", "retries_per_cycle"), st.integers(0, 1000)),
    },
)


def refusal(**numbers: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        Heartbeats(**numbers)
    return str(refused.value)


# What cannot be ---------------------------------------------------------------------------------------------------


def test_a_cycle_of_180_in_300_is_refused() -> None:
    assert "lower cycle from 180 to 150 or less" in refusal(cycle=180)


def test_a_cycle_of_half_the_ttl_is_accepted() -> None:
    assert Heartbeats(cycle=150).cycle == 150


def test_what_a_lease_has_to_pay_for_must_be_less_than_its_ttl() -> None:
    assert "lower cycle below 119.4" in refusal(margin=160)


def test_advice_that_cannot_be_followed_is_not_given() -> None:
    message = refusal(ttl=30, cycle=10)
    assert "below -" not in message
    assert "raise ttl above 45" in message


@pytest.mark.parametrize("name", [*DURATIONS, "rate", "batch", "in_flight", "max_failures", "burst", "strike_after"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e308, 10**400, True, "1"], ids=repr)
def test_what_is_no_number_of_zero_or_more_is_refused_by_name(name: str, value: object) -> None:
    assert refusal(**{name: value}).startswith(f"{name} must be a ")


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("ttl", "number of seconds from 2"),
        ("cycle", "number of seconds from 0.01"),
        ("burst", "number from 1"),
        ("batch", "whole number from 1"),
        ("in_flight", "whole number from 1"),
        ("max_failures", "whole number from 1"),
    ],
)
def test_what_is_too_small_is_refused_with_the_smallest_possible(name: str, least: str) -> None:
    assert refusal(**{name: 0}) == f"{name} must be a {least} to 315,360,000, got 0"


def test_a_call_that_takes_no_time_is_refused() -> None:
    assert refusal(call_timeout=0) == "call_timeout=0 would never send a heartbeat: raise call_timeout"


@pytest.mark.parametrize("name", ["batch", "in_flight", "max_failures", "retries_per_cycle"])
def test_what_counts_something_is_a_whole_number(name: str) -> None:
    assert refusal(**{name: 1.5}).startswith(f"{name} must be a whole number from ")


@pytest.mark.parametrize("rate", [0, 0.001])
def test_a_cycle_has_at_least_one_slot(rate: float) -> None:
    assert refusal(rate=rate) == f"rate={rate:g} has no slot in a cycle: raise rate to 0.00833333 or more"


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


@given(choices)
def test_following_the_advice_of_each_refusal_leads_to_numbers_that_fit(numbers: dict[str, Any]) -> None:
    for _ in range(12):
        try:
            Heartbeats(**numbers)
        except ConfigError as refused:
            numbers = follow(str(refused), numbers)
        else:
            return
    raise AssertionError(f"the advice leads nowhere: {numbers}")


def follow(message: str, numbers: dict[str, Any]) -> dict[str, Any]:
    """Do what a message says, and no more."""
    if found := re.search(r"(\w+)=0(?:\.0)? would never send a heartbeat", message):
        return {**numbers, found[1]: 1.0}
    if found := re.search(r"(\w+) must be a .*number.* from (\S+) to ", message):
        return {**numbers, found[1]: float(found[2]) if found[1] == "cycle" else int(found[2])}
    if found := re.search(r"lower (cycle) (?:from \S+ to (\S+) or less|below (\S+),)", message):
        advised = float(found[2]) if found[2] else 0.999 * float(found[3])
        assert advised > 0
        return {**numbers, "cycle": 0.99999 * advised}
    if found := re.search(r"raise (rate) to (\S+) or more", message):
        return {**numbers, "rate": 1.001 * float(found[2])}
    found = re.search(r"raise (ttl) above (\S+)$", message)
    assert found, message
    return {**numbers, "ttl": 1.001 * float(found[2])}


@given(choices)
def test_what_exists_does_not_contradict_itself(numbers: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        check(Heartbeats(**numbers))


def check(heartbeats: Heartbeats) -> None:
    assert heartbeats.ttl >= 2 * heartbeats.cycle
    assert heartbeats.cycle + heartbeats.call_timeout + heartbeats.margin + heartbeats.grace < heartbeats.ttl
    assert heartbeats.outage_survived >= 0


# The same choices for another ttl ---------------------------------------------------------------------------------


@given(st.floats(2, WEEK))
def test_for_ttl_gives_numbers_that_fit_for_any_ttl_up_to_a_week(ttl: float) -> None:
    heartbeats = Heartbeats().for_ttl(ttl)
    assert heartbeats.ttl == ttl
    assert heartbeats.outage_survived > ttl / 3


@given(
    ttl=st.floats(2, WEEK),
    batch=st.integers(1, 1000),
    in_flight=st.integers(1, 64),
    max_failures=st.integers(1, 9),
    retries=st.integers(0, 9),
    burst=st.floats(1, 9),
)
def test_for_ttl_keeps_what_the_user_chose(
    ttl: float, batch: int, in_flight: int, max_failures: int, retries: int, burst: float
) -> None:
    chosen = {
        "batch": batch,
        "in_flight": in_flight,
        "max_failures": max_failures,
        "retries_per_cycle": retries,
        "burst": burst,
    }
    heartbeats = Heartbeats(**chosen).for_ttl(ttl)  # type: ignore[arg-type]
    assert {name: getattr(heartbeats, name) for name in chosen} == chosen


@given(ttl=st.floats(2, WEEK), rate=st.floats(0.01, 100))
def test_for_ttl_has_12_slots_a_cycle_or_as_many_as_were_chosen_and_never_a_lower_rate(ttl: float, rate: float) -> None:
    heartbeats = Heartbeats(rate=rate).for_ttl(ttl)
    assert heartbeats.rate * heartbeats.cycle >= min(12, rate * 120) - 1e-9
    assert heartbeats.rate >= rate


@st.composite
def chosen_heartbeats(draw: st.DrawFn) -> Heartbeats:
    """Numbers that fit, for any ttl up to a day, with durations that somebody may have chosen."""
    ttl = draw(st.floats(2, 86400))
    cycle = ttl * draw(st.floats(0.01, 0.5))
    rest = (ttl * (1 - 2 * DRIFT) - cycle) * 0.999
    margin, grace = rest * draw(st.floats(0, 0.5)), rest * draw(st.floats(0, 0.4))
    call_timeout = rest * draw(st.floats(0.001, 0.1))
    rate = draw(st.floats(1, 100)) / cycle
    return Heartbeats(ttl=ttl, cycle=cycle, margin=margin, grace=grace, call_timeout=call_timeout, rate=rate)


NUMBERS = [field.name for field in fields(Heartbeats) if field.name != "strike_after"]


@given(chosen_heartbeats(), st.floats(2, WEEK))
def test_for_ttl_of_whatever_was_chosen_gives_numbers_that_fit(heartbeats: Heartbeats, ttl: float) -> None:
    check(heartbeats.for_ttl(ttl))


@given(chosen_heartbeats(), st.floats(2, WEEK))
def test_for_ttl_makes_no_jump(heartbeats: Heartbeats, ttl: float) -> None:
    for near in (ttl, heartbeats.ttl):
        before, after = heartbeats.for_ttl(near), heartbeats.for_ttl(near * (1 + 1e-7))
        for name in NUMBERS:
            assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-3, abs=1e-9), name


@given(st.floats(2, WEEK), st.sampled_from(["cycle", "margin", "grace", "call_timeout", "retry_wait"]))
def test_for_ttl_scales_a_duration_that_was_chosen(ttl: float, name: str) -> None:
    default = getattr(Heartbeats(), name)
    chosen = getattr(Heartbeats(**{name: 0.5 * default}).for_ttl(ttl), name)
    assert chosen == pytest.approx(0.5 * getattr(Heartbeats().for_ttl(ttl), name))


@pytest.mark.parametrize("ttl", [59, 60, 61, 299, 301])
def test_a_longer_cycle_stays_longer_for_another_ttl(ttl: float) -> None:
    assert Heartbeats(cycle=140).for_ttl(ttl).cycle > Heartbeats().for_ttl(ttl).cycle


@pytest.mark.parametrize(
    ("ttl", "cycle", "margin", "grace", "call_timeout", "retry_wait"),
    [(6, 2, 0.6, 0.3, 0.5, 0.1), (60, 20, 6, 3, 5, 1), (600, 200, 30, 10, 10, 5), (150, 50, 15, 7.5, 10, 2.5)],
)
def test_for_ttl_follows_the_table(
    ttl: float, cycle: float, margin: float, grace: float, call_timeout: float, retry_wait: float
) -> None:
    heartbeats = Heartbeats().for_ttl(ttl)
    found = (heartbeats.cycle, heartbeats.margin, heartbeats.grace, heartbeats.call_timeout, heartbeats.retry_wait)
    assert found == pytest.approx((cycle, margin, grace, call_timeout, retry_wait))


def test_for_the_ttl_that_they_are_made_for_nothing_changes() -> None:
    heartbeats = Heartbeats(cycle=100, margin=20)
    assert heartbeats.for_ttl(300) is heartbeats


def test_strike_after_follows_the_ttl() -> None:
    assert Heartbeats(strike_after=150).for_ttl(60).strike_after == pytest.approx(30)


def test_strike_after_that_was_not_set_stays_so() -> None:
    assert Heartbeats().for_ttl(60).strike_after is None


@pytest.mark.parametrize("ttl", [0, 1, 1.99, -5, math.nan, math.inf, 1e308, "300"], ids=repr)
def test_a_ttl_that_cannot_be_kept_is_refused_with_the_smallest_possible(ttl: Any) -> None:
    with pytest.raises(ConfigError, match="ttl must be a number of seconds from 2 to"):
        Heartbeats().for_ttl(ttl)


# Sums -------------------------------------------------------------------------------------------------------------


def test_trust_is_the_ttl_less_drift_and_margin() -> None:
    assert Heartbeats().trust == pytest.approx(300 * (1 - 2 * DRIFT) - 15)
    assert Heartbeats().trust == pytest.approx(284.4)


def test_slack_is_trust_less_grace() -> None:
    assert Heartbeats().slack == pytest.approx(274.4)


def test_strikes_count_from_when_no_further_try_could_be_answered_in_time() -> None:
    assert Heartbeats().strikes_from == pytest.approx(264.4)


def test_strikes_count_from_strike_after_where_it_is_set() -> None:
    assert Heartbeats(strike_after=0).strikes_from == 0
    assert Heartbeats(strike_after=100).strikes_from == 100


def test_strikes_never_count_from_after_the_end() -> None:
    assert Heartbeats(strike_after=1000).strikes_from == Heartbeats().slack


def test_the_default_survives_an_outage_of_139_s() -> None:
    assert Heartbeats().outage_survived == pytest.approx(139.4)


def test_an_early_exit_shortens_the_outage_survived() -> None:
    assert Heartbeats(strike_after=200).outage_survived == pytest.approx(80)


def test_three_strikes_at_once_survive_two_waits() -> None:
    assert Heartbeats(strike_after=0).outage_survived == pytest.approx(10)


@pytest.mark.parametrize(("batch", "capacity"), [(1, 120), (100, 12_000), (500, 60_000)])
def test_capacity_is_rate_times_batch_times_cycle(batch: int, capacity: int) -> None:
    assert Heartbeats(batch=batch).capacity == capacity


def test_capacity_counts_whole_slots_only() -> None:
    assert Heartbeats(rate=0.0199, batch=10).capacity == 20


def test_numbers_that_fit_only_without_the_drift_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lower cycle below 49\.7,"):
        Heartbeats(ttl=100, cycle=49.8, call_timeout=0.1, margin=50, grace=0)


def test_a_slot_that_is_further_away_than_a_retry_shortens_the_outage_survived() -> None:
    heartbeats = Heartbeats(rate=0.1)
    assert heartbeats.outage_survived == pytest.approx(134.4)
    assert "− 1 / rate            -10.0 s" in heartbeats.budget()


def test_capacity_is_not_one_short_for_a_rate_that_floats_cannot_hold() -> None:
    assert Heartbeats(rate=0.1, batch=1).capacity == 12
    assert Heartbeats(rate=0.7, batch=10, cycle=100).capacity == 700


@pytest.mark.parametrize(
    "heartbeats",
    [
        Heartbeats(),
        Heartbeats(batch=1),
        Heartbeats(strike_after=0),
        Heartbeats(strike_after=200),
        Heartbeats(cycle=150),
        Heartbeats(retry_wait=1000),
        Heartbeats().for_ttl(6),
        Heartbeats().for_ttl(WEEK),
    ],
    ids=["default", "batch 1", "strikes at once", "strikes later", "long cycle", "nothing survived", "6 s", "a week"],
)
def test_the_lines_of_the_budget_add_up(heartbeats: Heartbeats) -> None:
    total, summed = 0.0, 0
    for line in heartbeats.budget().splitlines()[:-1]:
        name, value = re.fullmatch(r"(.{18})\s*(-?[\d.]+) s  .*", line).groups()  # type: ignore[union-attr]
        if name.startswith("="):
            assert float(value) == pytest.approx(total, abs=0.05 * (summed + 1) + 1e-9), line
            total, summed = float(value), 1
        else:
            total, summed = total + float(value), summed + 1
    assert total == pytest.approx(heartbeats.outage_survived, abs=0.051)


def test_the_budget_ends_with_the_capacity() -> None:
    assert re.search(
        r"^capacity +12,000 +1 slots/s × 100 leases × 120 s, if answers take 4 s at most$",
        Heartbeats().budget().splitlines()[-1],
    )


def test_the_budget_says_what_an_early_exit_costs() -> None:
    assert "strike" in Heartbeats(strike_after=0).budget()
    assert "strike" not in Heartbeats().budget()


def test_beats_are_values() -> None:
    assert Heartbeats() == Heartbeats()
    assert replace(Heartbeats(), batch=1) == Heartbeats(batch=1)
