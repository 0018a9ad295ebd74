"""How values are written in pages."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import Raw

from leasekit.server.console.rendering import (
    MARKS,
    ago,
    error_line,
    json_line,
    json_text,
    mark,
    number,
    query,
    size,
    span,
)
from leasekit.task import Status

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0004, "< 1 ms"), (0.042, "42 ms"), (5, "5 s"), (5.25, "5.2 s"), (60, "1 min"),
        (252, "4 min 12 s"), (7200, "2 h"), (90_000, "1 d 1 h"), (float("inf"), "unlimited"),
    ],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_moment_is_relative_and_has_its_date_as_title() -> None:
    text = ago(NOW - timedelta(minutes=5), NOW)
    assert ">5 min ago<" in text
    assert 'title="2025-12-31 23:55:00 UTC"' in text
    assert ">in 2 d<" in ago(NOW + timedelta(days=2), NOW)


def test_each_status_has_a_sign_besides_its_colour() -> None:
    for status in Status:
        assert MARKS[status][1] in mark(status)


def test_an_unknown_outcome_is_escaped() -> None:
    assert "<b>" not in mark("<b>")


def test_a_query_leaves_out_what_is_not_given_and_encodes_the_rest() -> None:
    assert query(kind="a&b=c", cursor=None, worker="") == "?kind=a%26b%3Dc"
    assert query(newest=True) == "?newest=true"


def test_a_value_is_cut_at_a_length_and_says_how_much_is_left() -> None:
    text = json_text(Raw(b'"' + b"x" * 100_000 + b'"'))
    assert len(text) < 21_000
    assert text.endswith("… 80,002 more")
    assert json_text(Raw(b'{"a":1}')) == '{\n  "a": 1\n}'
    assert len(json_line(Raw(b'"' + b"x" * 1000 + b'"'))) == 120


def test_big_numbers_of_users_keep_all_their_digits() -> None:
    digits = b"123456789012345678901234567890.12345678901234567890"
    assert json_text(Raw(digits)) == digits.decode()


def test_an_error_is_one_line_without_its_traceback() -> None:
    assert error_line({"type": "E", "message": "a\nb", "traceback": "long"}) == "E: a b"
    assert error_line(Raw(b'"plain"')) == '"plain"'


def test_numbers_and_sizes() -> None:
    assert number(1_234_567) == "1,234,567"
    assert number(None) == "–"
    assert size(900) == "900 bytes"
    assert size(12_345_678) == "12.3 MB"
