"""Lines that requests cause in a log: ten of a kind in a minute, then a count."""

import logging

from leasekit.server.log_limit import LogLimit


def test_after_ten_lines_of_a_message_the_rest_of_a_minute_is_counted() -> None:
    now = [0.0]
    limit = LogLimit(clock=lambda: now[0])

    def log(message: str, *args: object) -> str | None:
        record = logging.LogRecord("x", logging.ERROR, "", 1, message, args, None)
        return record.getMessage() if limit.filter(record) else None

    assert [log("%s failed", n) for n in range(25)] == [*(f"{n} failed" for n in range(10)), *[None] * 15]
    assert log("another") == "another"
    now[0] = 60.0
    assert log("%s failed", 1) == "1 failed (15 more of these were left out)"
    assert log("%s failed", 2) == "2 failed"
