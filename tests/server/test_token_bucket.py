"""A token bucket beside the rule that it keeps: in any time t, at most burst + rate * t tokens are taken."""

from hypothesis import given
from hypothesis import strategies as st

from leasekit.server.token_bucket import Bucket

NOW = 1.7e9
rates = st.sampled_from([0.001, 1 / 3, 1.0, 7.0, 1000.0])
waits = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 20)), max_size=40)


@given(rates, st.integers(1, 50), waits)
def test_no_window_has_more_starts_than_the_burst_and_what_comes_in_it(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, starts = Bucket(rate, burst, 0.0), NOW, list[float]()
    for wait, wanted in steps:
        now += wait
        count = min(wanted, bucket.tokens(now))
        bucket = bucket.less(count, now)
        starts += [now] * count
    for first, since in enumerate(starts):
        for last, at in enumerate(starts[first:], first):
            assert last - first + 1 <= burst + rate * (at - since) + 1e-3


@given(rates, st.integers(1, 50), waits)
def test_a_token_is_there_when_the_bucket_says_so_and_not_much_before(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(rate, burst, 0.0), NOW
    for wait, _ in steps:
        now += wait / rate
        bucket = bucket.less(bucket.tokens(now), now)
        assert bucket.tokens(now) == 0
        assert bucket.next_at > now
        assert bucket.tokens(bucket.next_at) == 1
        assert bucket.tokens(bucket.next_at - 0.1 / rate) == 0


def test_a_bucket_that_was_kept_by_another_clock_or_rate_is_empty_at_most() -> None:
    bucket = Bucket.kept(2.0, 4, NOW + 1e6, now=NOW)
    assert bucket.tokens(NOW) == 0
    assert bucket.next_at == NOW + 0.5
    assert Bucket.kept(2.0, 4, 0.0, now=NOW).tokens(NOW) == 4
