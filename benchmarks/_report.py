"""Make README.md's tables and charts from the lines in results/."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from _common import HERE, RESULTS

__all__ = ["chart", "write"]

Line = dict[str, Any]

_BEGIN, _END = "<!-- results: made by `make bench` -->", "<!-- end of results -->"
_WIDTH, _LABEL, _NUMBER, _BAR, _GAP = 720, 170, 90, 18, 8


def write() -> None:
    """Put the tables between the markers of README.md, and the charts into results/."""
    parts = [part for name, shown in _SHOWN.items() if (lines := _lines(name)) for part in shown(lines)]
    readme = HERE / "README.md"
    head, _, rest = readme.read_text(encoding="utf-8").partition(_BEGIN)
    tail = rest.partition(_END)[2]
    readme.write_text("\n\n".join([f"{head}{_BEGIN}", *parts, f"{_END}{tail}"]), encoding="utf-8")


def _lines(name: str) -> list[Line]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _lives(lines: Sequence[Line]) -> list[str]:
    floor = next((line["cpu_us_per_life"]["process"] for line in lines if line["case"].startswith("bare")), math.nan)
    rows = [
        [
            line["case"],
            f"{line['lives_per_second']:,}",
            _range(line["all"]),
            f"{line['of_bare']:.2f}",
            f"{sum(line['cpu_us_per_life'].values()) / floor:.1f}",
            ", ".join(f"{name} {value:g}" for name, value in line["cpu_us_per_life"].items()),
        ]
        for line in lines
    ]
    drawn = _draw("lives", "whole lives a second", [(line["case"], line["lives_per_second"]) for line in lines])
    head = ["", "lives/s", "all runs", "of bare sqlite3", "CPU of all, times bare", "CPU µs a life"]
    return ["### Whole lives", _machine(lines), _table(head, rows), drawn]


def _held(lines: Sequence[Line]) -> list[str]:
    columns = {
        "held for s": "seconds",
        "CPU µs a renewal": "cpu_us_per_renewal",
        "renewals/s": "renewals_per_second",
        "longest gap s": "longest_gap",
        "late beats": "late_beats",
        "lost": "lost",
        "latest slot ms": "latest_slot_ms",
        "bytes a lease": "bytes_per_lease",
    }
    drawn = _draw(
        "held", "CPU µs of the holder a renewal", [(line["case"], line["cpu_us_per_renewal"]) for line in lines]
    )
    return ["### Leases held", _machine(lines), _columns(columns, lines), drawn]


def _latency(lines: Sequence[Line]) -> list[str]:
    names = ("p50_ms", "p95_ms", "p99_ms")
    rows = [
        [line["case"], *(f"{line[name]:.1f}" for name in names), _range(line["all_p95"]), f"{line['fsync_ms']:.2f}"]
        for line in lines
    ]
    drawn = _draw(
        "latency",
        "ms from schedule to the body",
        [(f"{line['case']} {name[:3]}", line[name]) for line in lines for name in names],
    )
    head = ["", "p50 ms", "p95 ms", "p99 ms", "p95 of all runs", "one fsync ms"]
    return ["### From schedule to the body", _machine(lines), _table(head, rows), drawn]


def _server(lines: Sequence[Line]) -> list[str]:
    rows = [
        [line["case"], f"{line['items_per_second']:,}", _range(line["all"]), f"{line['server_cpu_us_per_item']:g}"]
        for line in lines
    ]
    drawn = _draw("server", "items a second", [(line["case"], line["items_per_second"]) for line in lines])
    return [
        "### The server alone",
        _machine(lines),
        _table(["", "items/s", "all runs", "server's CPU µs an item"], rows),
        drawn,
    ]


def _last_instruction(lines: Sequence[Line]) -> list[str]:
    columns = {
        "runs": "runs",
        "median ms": "median_ms",
        "p95 ms": "p95_ms",
        "latest ms": "max_ms",
        "later than 1 ms": "over_1_ms",
        "later than 10 ms": "over_10_ms",
        "seen dead after ms": "seen_dead_ms",
    }
    return ["### The last instruction after the end of trust", _machine(lines), _columns(columns, lines)]


def _telemetry(lines: Sequence[Line]) -> list[str]:
    rows = [[line["case"], f"{line['cpu_us_per_life']:,}", f"{line['of_bare']:.3f}"] for line in lines]
    drawn = _draw("telemetry", "CPU µs a life", [(line["case"], line["cpu_us_per_life"]) for line in lines])
    return ["### Telemetry", _machine(lines), _table(["", "CPU µs a life", "of not instrumented"], rows), drawn]


def _access(lines: Sequence[Line]) -> list[str]:
    rows = [[line["case"], f"{line['server_cpu_us_per_request']:,}", f"{line['of_bare']:.3f}"] for line in lines]
    return ["### Access tokens", _machine(lines), _table(["", "server CPU µs a request", "of no token"], rows)]


def _pages(lines: Sequence[Line]) -> list[str]:
    columns = {
        "lives/s": "lives_per_second",
        "server's CPU, of a core": "server_cpu",
        "more than without a page": "more_cpu",
    }
    return ["### Open pages of the console", _machine(lines), _columns(columns, lines)]


def _on_redis(lines: Sequence[Line]) -> list[str]:
    renewals = [line for line in lines if "beyond_us" in line]
    lives = [line for line in lines if "lives_per_second" in line]
    renewal_rows = [
        [line["case"], f"{line['cpu_us_per_renewal']:g}", f"{line['bare_evalsha_us']:g}", f"{line['beyond_us']:g}"]
        for line in renewals
    ]
    life_rows = [
        [
            line["case"],
            f"{line['lives_per_second']:,}",
            _range(line["all"]),
            ", ".join(f"{name} {value:g}" for name, value in line["cpu_us_per_life"].items()),
        ]
        for line in lives
    ]
    return [
        "### On Redis",
        _machine(lines),
        _table(["", "client's CPU µs a renewal", "of a bare EVALSHA", "ours"], renewal_rows),
        _table(["", "lives/s", "all runs", "CPU µs a life"], life_rows),
        _draw("on_redis", "whole lives a second", [(line["case"], line["lives_per_second"]) for line in lives]),
    ]


def _worst(lines: Sequence[Line]) -> list[str]:
    rows = [
        [
            line["case"],
            *(f"{line[name]:.1f}" for name in ("p50_ms", "p99_ms", "slowest_ms")),
            f"{line['slowest_script_ms']:.1f}" if "slowest_script_ms" in line else "",
            f"{line['a_second']:,}" if "a_second" in line else "",
        ]
        for line in lines
    ]
    head = ["", "heartbeat p50 ms", "p99 ms", "slowest ms", "slowest script ms", "items/s"]
    return ["### Heartbeats beside the largest requests", _machine(lines), _table(head, rows)]


def _postgres(lines: Sequence[Line]) -> list[str]:
    rates = [line for line in lines if "per_second" in line]
    rate_rows = [
        [
            line["case"],
            f"{line['per_second']:,}",
            _range(line["all"]),
            ", ".join(f"{name} {value:g}" for name, value in line["cpu_us"].items()),
            f"{line['cpu_of_first']:.2f}",
        ]
        for line in rates
    ]
    time_rows = [[line["case"], f"{line['p50_ms']:,}", f"{line['p95_ms']:,}"] for line in lines if "p50_ms" in line]
    return [
        "### On PostgreSQL",
        _machine(lines),
        _table(["", "items/s", "all runs", "CPU µs an item", "CPU of the first by hand"], rate_rows),
        _table(["", "p50 ms", "p95 ms"], time_rows),
        _draw("postgres", "items a second", [(line["case"], line["per_second"]) for line in rates]),
    ]


def _renewals(lines: Sequence[Line]) -> list[str]:
    columns = {
        "s": "seconds",
        "renewals/s": "renewals_per_second",
        "lost": "lost",
        "p50 ms": "p50_ms",
        "p99 ms": "p99_ms",
        "slowest ms": "slowest_ms",
        "in their page": "hot_share",
        "dead rows": "most_dead_rows",
        "vacuums": "autovacuums",
        "table MB": "table_mb",
        "indexes MB": "indexes_mb",
    }
    return ["### Renewals on PostgreSQL for a long time", _machine(lines), _columns(columns, lines)]


def _brokers(lines: Sequence[Line]) -> list[str]:
    columns = {"CPU µs without": "cpu_us_without", "with leases": "cpu_us_with", "more": "more_us"}
    return ["### A message of a broker, with a lease", _machine(lines), _columns(columns, lines)]


def _shares(lines: Sequence[Line]) -> list[str]:
    costs = {
        "CPU µs a task: schedule": "schedule_cpu_us",
        "claim one": "claim_by_1_cpu_us",
        "claim 100": "claim_by_100_cpu_us",
        "settle": "settle_by_100_cpu_us",
    }
    delays = {"tasks started before": "before", "s": "seconds"}
    ideal = {"off by tasks of a key, at most": "off", "tasks started": "started", "CPU µs a claimed task": "cpu_us"}
    of_costs, of_delays, of_ideal = (
        [line for line in lines if next(iter(names.values())) in line] for names in (costs, delays, ideal)
    )
    return [
        "### Fair shares by key",
        _machine(lines),
        _columns(costs, of_costs),
        "A single task of another key, or without keys, is scheduled behind a backlog:",
        _columns(delays, of_delays),
        "Beside ideal fair queueing: one key has a million tasks, and behind them each other key has one:",
        _columns(ideal, of_ideal),
    ]


def _rules(lines: Sequence[Line]) -> list[str]:
    return _ratios(lines, "What kinds, gates, limits, keys and queues cost", "times nothing set")


def _features(lines: Sequence[Line]) -> list[str]:
    return _ratios(lines, "What tags, labels, start deadlines, dedupe keys and dependencies cost", "times nothing")


def _clients(lines: Sequence[Line]) -> list[str]:
    return _ratios(lines, "What code around runs, periodic tasks, waiting for ends and codecs cost", "times nothing")


def _ratios(lines: Sequence[Line], title: str, of_first: str) -> list[str]:
    rows = [
        [
            line["case"],
            f"{line['cpu_us']:g}",
            f"{line['ratio']:.2f}",
            "-".join(f"{part:.2f}" for part in line["ratios"]),
        ]
        for line in lines
    ]
    head = ["", "CPU µs a life", of_first, "of all rounds"]
    return [f"### {title}", _machine(lines), _table(head, rows)]


def _isolation(lines: Sequence[Line]) -> list[str]:
    columns = {"p50 ms": "p50_ms", "p95 ms": "p95_ms", "p99 ms": "p99_ms", "loud tasks/s": "loud_started_per_s"}
    return ["### A kind beside one that is over its quota", _machine(lines), _columns(columns, lines)]


def _flows(lines: Sequence[Line]) -> list[str]:
    costs = [line for line in lines if "per_s" in line]
    polls = [line for line in lines if "mean" in line]
    step = next(line for line in costs if "ratio" in line)
    beside = f"An execution took {step['ratio']:g} times as long as a plain task of the same run"
    return [
        "### Flows",
        _machine(lines),
        _columns({"a second": "per_s", "CPU ms": "cpu_ms"}, costs),
        f"{beside}, and {step['cpu_ratio']:g} times its CPU. Below: the mean time of a flow, by its time alone.",
        _columns({"mean": "mean", "perfect scheduling": "ideal"}, polls),
        _draw("flows", "time of a flow, by its time alone", [(line["case"], line["mean"]) for line in polls]),
    ]


def _polling(lines: Sequence[Line]) -> list[str]:
    columns = {"mean": "mean", "ran": "ran", "scale": "scale"}
    skews = {"mean": "mean", "first: tasks": "first_tasks", "mean ": "first_mean", "second: tasks": "second_tasks"}
    skews["mean  "] = "second_mean"
    alone, skewed = ([line for line in lines if ("first_mean" in line) is both] for both in (False, True))
    rows = [
        [line["case"], *(f"{line[name]:,}" for name in columns.values()), f"{line['ideal_mean']:,}"] for line in alone
    ]
    series: dict[str, list[tuple[float, float]]] = {"ideal scheduling": []}
    for line in alone:
        count, _, window = line["case"].partition(" at once, window ")
        if window:
            series.setdefault(f"window {window}", []).append((int(count), line["mean"]))
            if window == "for all":
                series["ideal scheduling"].append((int(count), line["ideal_mean"]))
    title = "Mean time of a task from its arrival, by the tasks that come at once (1: alone)"
    (RESULTS / "polling.svg").write_text(plot(title, series), encoding="utf-8")
    return [
        "### Tasks that poll, in one process and in two",
        _machine(lines),
        "Ratios to a task that never waits for a slot: from its arrival (*mean*), from its first call (*ran*).",
        f"![{title}](results/polling.svg)",
        _table(["", *columns, "ideal scheduling: mean"], rows),
        _columns(skews, skewed),
    ]


_SHOWN = {
    "lives": _lives,
    "held": _held,
    "latency": _latency,
    "server": _server,
    "last_instruction": _last_instruction,
    "telemetry": _telemetry,
    "on_redis": _on_redis,
    "postgres": _postgres,
    "renewals": _renewals,
    "worst": _worst,
    "brokers": _brokers,
    "shares": _shares,
    "isolation": _isolation,
    "flows": _flows,
    "polling": _polling,
    "rules": _rules,
    "features": _features,
    "clients": _clients,
    "access": _access,
    "pages": _pages,
}


def _machine(lines: Sequence[Line]) -> str:
    first = lines[0]
    loads = [line["load"] for line in lines]
    return (
        f"{first['cpus']} cores (load {min(loads)}-{max(loads)} at the end), Python {first['python']}, "
        f"SQLite {first['sqlite']}, {first['on']}."
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,}-{max(values):,}"


def _columns(columns: dict[str, str], lines: Sequence[Line]) -> str:
    """Make a table of these values of each line; `columns` maps heads to names."""
    return _table(["", *columns], [[line["case"], *(f"{line[name]:,}" for name in columns.values())] for line in lines])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("--:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _draw(name: str, title: str, bars: Sequence[tuple[str, float]]) -> str:
    (RESULTS / f"{name}.svg").write_text(chart(title, bars), encoding="utf-8")
    return f"![{title}](results/{name}.svg)"


def chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Draw horizontal bars with their numbers as SVG that is readable on light and dark pages."""
    most = max((value for _, value in bars), default=0) or 1
    size = f'width="{_WIDTH}" height="{36 + len(bars) * (_BAR + _GAP)}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#808890"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>',
        f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (label, value) in enumerate(bars):
        top = 28 + number * (_BAR + _GAP)
        width = (_WIDTH - _LABEL - _NUMBER) * value / most
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        parts += [
            f'<text x="0" y="{top + 13}">{escape(label)}</text>',
            f'<rect x="{_LABEL}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2" fill="#3b82c4"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{top + 13}">{shown}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


_COLOURS = ("#808890", "#3b82c4", "#c4633b", "#3ba36b")


def plot(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw lines through points as SVG that is readable on light and dark pages; the y axis begins at 1."""
    width, height, left, top = _WIDTH, 260, 40, 40
    points = [point for line in series.values() for point in line]
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points)

    def at(x: float, y: float) -> str:
        across, up = (width - left - 20) * x / most_x, (height - top - 30) * (y - 1) / (most_y - 1)
        return f"{left + across:.1f},{height - 30 - up:.1f}"

    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#808890"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>',
        f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        across = at(x, 1).partition(",")[0]
        parts.append(f'<text x="{across}" y="{height - 10}" text-anchor="middle">{x:g}</text>')
    for y in (1 + (most_y - 1) * step / 4 for step in range(5)):
        up = at(0, y).partition(",")[2]
        parts.append(f'<text x="0" y="{float(up) + 4:.1f}">{y:.2f}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in sorted(line))
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{left + 12}" y="{top + 16 * number}" fill="{colour}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
