"""When periodic tasks fire: wall times that are skipped and repeated, intervals, jitter, and what is due."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import msgspec
import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from leasekit.errors import Refused
from leasekit.periodic import PeriodicTask
from leasekit.server import firings
from leasekit.server.firings import LATE, Cron, Due, Interval, Rule, delay, due, firing_id, next_times, rule_of

BERLIN, LORD_HOWE, APIA = "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia"
ZONES = ["UTC", BERLIN, "America/New_York", "America/Santiago", LORD_HOWE, "Pacific/Chatham", "Antarctica/Troll",
         "Asia/Kathmandu", APIA, "Africa/Casablanca", "America/St_Johns"]  # fmt: skip
DAY = 86400
YEARS = (int(datetime(2024, 1, 1, tzinfo=UTC).timestamp()), int(datetime(2027, 1, 1, tzinfo=UTC).timestamp()))
instants = st.integers(*YEARS)
EXPRESSIONS = ["* * * * *", "*/15 * * * *", "30 * * * *", "0 */2 * * *", "*/10 0-4 * * *", "30 2 * * *", "0 3 * * SUN",
               "59 23 * * *", "0 0 * * *", "15,45 1,2,3 * * *", "0 0 1 * *", "0 12 L * *"]  # fmt: skip


def cron(expression: str, tz: str = "UTC") -> Cron:
    rule = rule_of(PeriodicTask(kind="k", cron=expression, tz=tz))
    assert isinstance(rule, Cron)
    return rule


rules = st.builds(cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES))


def task(**options: Any) -> PeriodicTask:
    return PeriodicTask(kind="k", **({"every": 60} | options if "cron" not in options else options))


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def local(rule: Cron, start: str, count: int) -> list[str]:
    """The next wall times after a wall time, with their offsets."""
    begin = datetime.fromisoformat(start).replace(tzinfo=rule.zone).timestamp()
    times = [datetime.fromtimestamp(one, rule.zone) for one in islice(rule.after(begin), count)]
    return [f"{time:%d %H:%M %z}" for time in times]


def shown(rule: Cron, start: int, end: int) -> list[int]:
    """Brute force: the instants in (start, end] at which the wall clock shows a time of the expression."""
    first = datetime.fromtimestamp(start, rule.zone).replace(tzinfo=None) - timedelta(days=2)
    last = datetime.fromtimestamp(end, rule.zone).replace(tzinfo=None) + timedelta(days=2)
    walls = set[datetime]()
    for wall in CronSim(rule.expression, first):
        if wall > last:
            break
        walls.add(wall)
    minutes = range(start - start % 60 + 60, end + 1, 60)
    return [one for one in minutes if datetime.fromtimestamp(one, rule.zone).replace(tzinfo=None, fold=0) in walls]


# Wall times -----------------------------------------------------------------------------------------------------


def test_a_wall_time_that_is_skipped_fires_once_at_the_end_of_the_gap() -> None:
    rule = cron("30 2 * * *", BERLIN)
    assert local(rule, "2026-03-28T00:00", 3) == ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"]


def test_several_wall_times_of_one_gap_fire_once_together() -> None:
    rule = cron("*/10 2 * * *", BERLIN)
    assert local(rule, "2026-03-28T02:45", 3) == ["28 02:50 +0100", "29 03:00 +0200", "30 02:00 +0200"]


def test_a_skipped_wall_time_and_the_end_of_the_gap_are_one_firing() -> None:
    assert local(cron("0,30 2,3 * * *", BERLIN), "2026-03-29T01:00", 2) == ["29 03:00 +0200", "29 03:30 +0200"]


def test_a_wall_time_that_is_repeated_fires_the_first_time() -> None:
    rule = cron("30 2 * * *", BERLIN)
    assert local(rule, "2026-10-24T12:00", 2) == ["25 02:30 +0200", "26 02:30 +0100"]


def test_a_rule_for_every_hour_fires_in_the_repeated_hour_too() -> None:
    rule = cron("30 * * * *", BERLIN)
    assert local(rule, "2026-10-25T01:00", 4) == [
        "25 01:30 +0200", "25 02:30 +0200", "25 02:30 +0100", "25 03:30 +0100"
    ]  # fmt: skip


def test_a_rule_for_every_hour_leaves_the_skipped_hour_out() -> None:
    assert local(cron("30 * * * *", BERLIN), "2026-03-29T01:00", 2) == ["29 01:30 +0100", "29 03:30 +0200"]


def test_a_rule_for_every_minute_goes_through_a_repeated_hour_minute_by_minute() -> None:
    rule, start = cron("* * * * *", BERLIN), at("2026-10-24T23:00+00:00")
    assert list(islice(rule.after(start), 240)) == [start + 60 * minute for minute in range(1, 241)]


def test_a_gap_of_half_an_hour() -> None:
    rule = cron("15 2 * * *", LORD_HOWE)
    assert local(rule, "2026-10-03T00:00", 3) == ["03 02:15 +1030", "04 02:30 +1100", "05 02:15 +1100"]


def test_a_repetition_of_half_an_hour() -> None:
    rule = cron("45 1 * * *", LORD_HOWE)
    assert local(rule, "2026-04-04T00:00", 3) == ["04 01:45 +1100", "05 01:45 +1100", "06 01:45 +1030"]


def test_a_gap_of_two_hours() -> None:
    rule = cron("30 2 * * *", "Antarctica/Troll")
    assert local(rule, "2026-03-28T12:00", 2) == ["29 03:00 +0200", "30 02:30 +0200"]


def test_a_midnight_that_is_skipped() -> None:
    rule = cron("0 0 * * *", "America/Santiago")
    assert local(rule, "2026-09-05T12:00", 2) == ["06 01:00 -0300", "07 00:00 -0300"]


def test_a_midnight_that_is_repeated_with_the_date() -> None:
    rule = cron("30 23 * * *", "America/Santiago")
    assert local(rule, "2026-04-04T12:00", 2) == ["04 23:30 -0300", "05 23:30 -0400"]


def test_a_day_that_is_skipped_fires_when_the_next_begins() -> None:
    assert local(cron("0 12 30 12 *", APIA), "2011-12-29T13:00", 1) == ["31 00:00 +1400"]


def test_a_monthly_firing_comes_once_a_month() -> None:
    months = [datetime.fromtimestamp(one, UTC).month for one in islice(cron("0 0 1 * *").after(YEARS[0]), 24)]
    assert months == [*range(2, 13), *range(1, 13), 1]


@given(rules, instants, st.integers(1, 3 * DAY))
def test_a_rule_for_every_hour_is_what_the_wall_clock_shows_minute_by_minute(rule: Cron, start: int, span: int) -> None:
    rule = cron(f"{rule.expression.split()[0]} * * * *", rule.zone.key)
    listed = [one for one in islice(rule.after(start), span // 60 + 1) if one <= start + span]
    assert listed == shown(rule, start, start + span)


@given(rules.filter(lambda rule: not rule.is_hourly), instants)
def test_a_rule_for_chosen_hours_fires_once_for_each_wall_time(rule: Cron, start: int) -> None:
    found = list(islice(rule.after(start), 30))
    walls = [datetime.fromtimestamp(one, rule.zone).replace(tzinfo=None, fold=0) for one in found]
    assert walls == sorted(set(walls))
    lowest = walls[0] - timedelta(minutes=1)
    expected = set(islice(CronSim(rule.expression, lowest), 30))
    # Those that are not in the expression are the ends of gaps.
    for one, wall in zip(found, walls, strict=True):
        if wall not in expected and wall < max(expected):
            before, after = (datetime.fromtimestamp(one - back, rule.zone).utcoffset() for back in (1, 0))
            assert before != after


@given(rules, instants)
def test_firings_increase_strictly(rule: Cron, start: int) -> None:
    found = list(islice(rule.after(start), 50))
    assert all(first < second for first, second in zip([start, *found], found, strict=False))


@given(rules, instants, st.integers(0, 20))
def test_each_firing_is_found_from_any_moment_before_it(rule: Cron, start: int, skip: int) -> None:
    found = list(islice(rule.after(start), skip + 2))
    between = (found[skip] + found[skip + 1]) // 2
    assert next(rule.after(found[skip])) == next(rule.after(between)) == found[skip + 1]
    assert next(rule.after(found[skip + 1] - 1)) == found[skip + 1]


@given(rules, instants, st.integers(1, 60))
def test_backwards_is_the_same_as_forwards(rule: Cron, start: int, count: int) -> None:
    found = list(islice(rule.after(start), count))
    assert list(islice(rule.until(found[-1]), count)) == found[::-1]
    assert next(rule.until(found[-1] - 1), 0) < found[-1]


@given(st.integers(1, 100 * DAY), instants)
def test_an_interval_is_counted_from_the_epoch(every: int, start: int) -> None:
    rule = Interval(every)
    first, second = islice(rule.after(start), 2)
    assert first % every == 0
    assert start < first <= start + every
    assert second == first + every
    assert list(islice(rule.until(second), 2)) == [second, first]
    assert next(rule.until(first - 0.5)) == first - every


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("0 7 * *", "five fields"),
        ("0 0 7 * * *", "five fields"),
        ("61 * * * *", "Bad minute"),
        ("0 24 * * *", "Bad hour"),
        ("0 0 0 * *", "Bad day-of-month"),
        ("0 0 * 13 *", "Bad month"),
        ("0 0 * * MOO", "Bad day-of-week"),
        ("0 0 31 2 *", "Bad day-of-month"),
        ("0 0 31 4,6,9,11 *", "Bad day-of-month"),
        ("0 0 1-7 2 * #", "five fields"),
        ("0 0 30 FEB */7", "Bad day-of-month"),
        ("1-0 * * * *", "Bad minute"),
        ("*/0 * * * *", "Bad minute"),
        ("@daily at 7", "five fields"),
    ],
)
def test_an_expression_that_never_fires_or_is_none_is_refused(expression: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        cron(expression)
    assert refused.value.errors[0]["field"] == "cron"


def test_a_search_without_end_is_bounded() -> None:
    with pytest.raises(Refused, match="days that do not exist"):
        cron("0 0 */31 * MON#5")  # the first of a month as its fifth Monday


def test_a_leap_day_and_a_leap_day_on_a_sunday_are_accepted() -> None:
    assert local(cron("0 0 29 2 *"), "2026-01-01T00:00", 1) == ["29 00:00 +0000"]
    rule = cron("0 0 29 2 */7")
    assert datetime.fromtimestamp(next(rule.after(YEARS[0])), UTC) == datetime(2032, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize("tz", ["Europe/Berln", "../etc/passwd", "Europe", "/etc/localtime", "berlin", "\x00"])
def test_an_unknown_zone_is_refused(tz: str) -> None:
    with pytest.raises(Refused, match=r"tz is no time zone that the service knows, as in Europe/Berlin: got"):
        cron("0 7 * * *", tz)


def test_a_service_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(Refused, match=r"pip install 'leasekit\[server\]'"):
        rule_of(task(cron="17 3 * * *"))


@given(st.text("0123456789*/-,#L ?WMONabc", max_size=20))
def test_no_text_makes_any_other_error(text: str) -> None:
    try:
        rule = rule_of(PeriodicTask(kind="k", cron=text))
    except Refused:
        return
    assert next(rule.after(YEARS[0]))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "give one of them"),
        ({"every": 60, "cron": "0 7 * * *"}, "give one of them"),
        ({"every": 60, "tz": "UTC"}, "leave it out with `every`"),
        ({"every": 60, "jitter": 61}, "`jitter` must be at most `every`, which is 60 s, got 61"),
        ({"every": 0}, ">= 1"),
        ({"every": 1.5}, "Expected `int"),
        ({"every": 60, "catch_up": 101}, "<= 100"),
        ({"every": 60, "start_deadline": 1}, ">= 10"),
        ({"every": 60, "overlap": "allow"}, "Invalid enum value"),
        ({"every": 60, "id": "x"}, "unknown field"),
    ],
)
def test_a_contradictory_periodic_task_cannot_exist(body: dict[str, Any], why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.convert({"kind": "k"} | body, PeriodicTask)


# Names and jitter -----------------------------------------------------------------------------------------------


def test_the_id_of_a_firing_is_its_name_and_instant() -> None:
    assert firing_id("report", at("2026-03-29T03:00+02:00")) == "report@2026-03-29T01:00:00Z"
    assert firing_id("a@b", at("2026-03-29T03:00+02:00") + 0.25) == "a@b@2026-03-29T01:00:00.250Z"


def test_the_longest_name_makes_an_id_that_is_valid() -> None:
    assert len(firing_id("n" * 100, YEARS[0] + 0.999)) <= 128


@given(st.text(min_size=1), instants, st.floats(0.001, DAY))
def test_jitter_is_the_same_each_time_and_below_its_bound(name: str, instant: int, jitter: float) -> None:
    assert 0 <= delay(name, instant, jitter) <= jitter
    assert delay(name, instant, jitter) == delay(name, instant, jitter)


def test_jitter_spreads_names_and_instants() -> None:
    of_names = [delay(f"n{number}", YEARS[0], 100) for number in range(200)]
    of_instants = [delay("n", YEARS[0] + number, 100) for number in range(200)]
    for delays in (of_names, of_instants):
        assert len(set(delays)) > 190
        assert 40 < sum(delays) / 200 < 60


def test_jitter_moves_the_moment_and_not_the_name() -> None:
    (moment,) = next_times("n", task(jitter=30), since=0, count=1)
    assert moment == 60 + delay("n", 60, 30) > 60
    assert due("n", task(jitter=30), since=0, now=moment - 0.001).made == []
    assert due("n", task(jitter=30), since=0, now=moment).made == [60]


# What is due ----------------------------------------------------------------------------------------------------


def test_nothing_is_due_before_its_time() -> None:
    assert due("n", task(), since=60, now=119.9) == Due([], [], None)


def test_a_firing_is_due_at_its_time_and_once() -> None:
    assert due("n", task(), since=60, now=120) == Due([120], [], 120)
    assert due("n", task(), since=120, now=120) == Due([], [], None)


def test_firings_that_are_a_little_late_are_all_made() -> None:
    assert due("n", task(every=20), since=0, now=60).made == [20, 40, 60]
    assert due("n", task(every=20, catch_up=0), since=0, now=60).made == [20, 40, 60]


OUTAGE = DAY  # of a firing each minute: 1440 are missed


@pytest.mark.parametrize(
    ("catch_up", "made"),
    [(0, []), (1, [DAY]), (3, [DAY - 7200, DAY - 3600, DAY]), (100, list(range(3600, DAY + 1, 3600)))],
)
def test_after_a_day_of_outage_the_latest_are_made_up_for(catch_up: int, made: list[int]) -> None:
    found = due("n", task(every=3600, catch_up=catch_up), since=0, now=DAY + LATE + 1)
    assert found.made == made
    assert sorted([*found.made, *found.missed]) == list(range(3600, DAY + 1, 3600))
    assert found.since == DAY


def test_a_timely_firing_counts_as_made_up_for() -> None:
    found = due("n", task(every=60, catch_up=1), since=0, now=DAY)
    assert found.made == [DAY - 60, DAY]
    assert len(found.missed) == firings._MOST - 2


def test_a_year_of_outage_is_judged_without_a_look_at_each_firing() -> None:
    looked = Counting(rule_of(task(cron="* * * * *", tz=BERLIN)))
    found = list(islice(looked.until(YEARS[1]), firings._MOST))
    assert looked.count == len(found) == firings._MOST
    assert due("n", task(cron="* * * * *", tz=BERLIN, catch_up=2), since=YEARS[0], now=YEARS[1]).made == [
        YEARS[1] - 60, YEARS[1]
    ]  # fmt: skip


class Counting:
    """A rule that counts how many instants are taken from it."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self.count = rule, 0

    def until(self, instant: float) -> Iterator[int]:
        for one in self._rule.until(instant):
            self.count += 1
            yield one


def test_a_firing_past_its_start_deadline_is_missed_also_if_it_is_made_up_for() -> None:
    assert due("n", task(start_deadline=100, catch_up=9), since=0, now=281).made == [240]
    assert due("n", task(start_deadline=10), since=0, now=71) == Due([], [60], 60)
    assert due("n", task(start_deadline=10), since=0, now=70).made == [60]


@given(st.integers(0, 5), st.integers(1, 100), st.lists(st.floats(0, 400), min_size=1, max_size=8), st.integers(0, 20))
def test_each_firing_is_judged_once_however_often_one_looks(
    catch_up: int, every: int, looks: list[float], jitter: int
) -> None:
    of = task(every=every, catch_up=catch_up, jitter=min(jitter, every))
    since, judged = 0.0, list[int]()
    for now in sorted(looks):
        found = due("n", of, since=since, now=now)
        judged += sorted([*found.made, *found.missed])
        since = since if found.since is None else found.since
    end = max(looks)
    times = [every * number for number in range(1, int(end // every) + 1)]
    assert judged == times[: len(judged)]
    assert all(one + delay("n", one, of.jitter) > end for one in times[len(judged) :][:1])
    (upcoming,) = next_times("n", of, since=since, count=1)
    assert upcoming > end
