"""Batches that are legal and odd, made up from a seed: tasks in rows, fans and circles, doubles, and all at once.

Each has as many items as a request may have. What workers and operators do with the tasks is made up too.
"""

import json
from collections.abc import Generator
from random import Random
from typing import Any

from leasekit.wire import MAX_BATCH, MAX_BODY, MAX_WAITS

Request = tuple[str, str, Any]
"""Method, path, and the body before it is JSON."""
Batches = Generator[Request, Any, None]
"""Yields requests, and is sent the answer to each; None: it was refused."""

_FIELDS = ("after", "collection", "debounce", "dedupe", "delay", "id", "key", "labels", "limits", "parent", "tags")
_SHAPES = ("row", "fan", "net", "circle", "old", "doubles")
_OUTCOMES = ("success", "success", "retry", "release", "crash", "fatal")


def batches(rng: Random, name: str) -> Batches:
    """Make requests without end; `name` begins all ids."""
    client = _Client(rng, name)
    for _ in range(10):
        yield from client.schedule()
    acts = [client.schedule, client.work, client.work, client.act, client.settings, client.search]
    while True:
        yield from rng.choice(acts)()


class _Client:
    """A client with pools of words, some large and some small, and the tasks that it has put."""

    def __init__(self, rng: Random, name: str) -> None:
        self._rng, self._name, self._number = rng, name, 0
        self._kinds = self._words("kind", 1, 3, 100)
        self._keys, self._tags = self._words("key", 1, 10, 10_000), self._words("tag", 1, 30, 3_000)
        self._dedupes, self._labels = self._words("dedupe", 1, 10_000), self._words("label", 4, 300)
        self._ids: list[str] = []

    def _words(self, word: str, *sizes: int) -> list[str]:
        filler = "x" * self._rng.choice((0, 40))
        return [f"{self._name}-{word}-{n}{filler}" for n in range(self._rng.choice(sizes))]

    def _new(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    def _tasks(self, count: int = MAX_BATCH) -> list[dict[str, Any]]:
        rng = self._rng
        fields, shape = set(rng.sample(_FIELDS, rng.randrange(len(_FIELDS)))), rng.choice(_SHAPES)
        fields |= {"id"} if shape in {"row", "net", "circle"} else set()
        names, width = [self._new() for _ in range(count)], rng.choice((1, 3, MAX_WAITS // count))
        payload: Any = rng.choice((None, None, "x" * 1_000, [[]] * 50))
        return [self._task(at, names, fields, shape, width) | {"payload": payload} for at in range(count)]

    def _task(self, at: int, names: list[str], fields: set[str], shape: str, width: int) -> dict[str, Any]:
        rng = self._rng
        before: list[str] = {
            "row": names[max(0, at - width) : at],
            "fan": names[:1],
            "net": rng.choices(names[:at], k=width) if at else [],
            "circle": [names[(at + 1) % len(names)]] if rng.random() < 0.01 else [],
            "old": rng.choices(self._ids, k=width) if self._ids else [],
            "doubles": names[:1] * width,
        }[shape]
        task: dict[str, Any] = {"kind": rng.choice(self._kinds), "priority": rng.randrange(5)}
        has_key = "key" in fields
        made: dict[str, dict[str, Any]] = {
            "id": {"id": names[0] if shape == "doubles" and at % 2 and "after" not in fields else names[at]},
            "after": {} if "debounce" in fields else {"after": before},
            "parent": {"parent": before[0]} if before else {},
            "collection": {"collection": rng.choice(self._tags)},
            "tags": {"tags": rng.choices(self._tags, k=20)},
            "key": {"key": rng.choice(self._keys)},
            "delay": {"delay": rng.choice((0, 0.5, 60))},
            "dedupe": {"dedupe_key": rng.choice(self._dedupes)},
            "debounce": {"dedupe_key": rng.choice(self._dedupes), "debounce": rng.choice((0.1, 60))},
            "limits": {"claim_timeout": 2, "max_crashes": 1, "start_deadline": rng.choice((1, 60))},
            "labels": {"requires": self._worn(4)} | ({} if has_key else {"prefers": {"best": "x"}}),
        }
        for field in sorted(fields):
            task |= made[field]
        return task

    def _worn(self, count: int) -> dict[str, str]:
        return {label[-4:]: label for label in self._rng.choices(self._labels, k=count)}

    def schedule(self) -> Batches:
        tasks = self._tasks()
        while len(json.dumps(tasks)) > MAX_BODY:
            tasks = tasks[: len(tasks) // 2]
        if (answer := (yield "POST", "/v1/tasks", {"tasks": tasks})) is not None:
            self._ids += [task["id"] for task in answer["tasks"] if "id" in task]

    def work(self) -> Batches:
        """Claim tasks, renew them all together, and end them."""
        worker, kinds = self._new(), self._rng.sample(self._kinds, self._rng.randint(1, len(self._kinds)))
        claim = {"worker": worker, "kinds": kinds, "claim_id": worker, "limit": MAX_BATCH, "labels": self._worn(16)}
        answer = yield "POST", "/v1/claims", claim
        leases = [{"id": task["id"], "token": task["token"]} for task in (answer or {"tasks": ()})["tasks"]]
        if not leases:
            return
        yield (
            "POST",
            "/v1/heartbeats",
            {"worker": worker, "beats": [lease | {"progress": "x" * 900} for lease in leases]},
        )
        results = [lease | {"outcome": self._rng.choice(_OUTCOMES)} for lease in leases]
        if self._rng.random() < 0.5:
            results[0] |= {"outcome": "success", "then": self._tasks(500)}
        yield "POST", "/v1/results", {"worker": worker, "results": results}

    def act(self) -> Batches:
        """Do what operators do with many tasks at once."""
        ids = self._rng.choices(self._ids, k=MAX_BATCH) if self._ids else ["none"]
        yield self._rng.choice(
            (
                ("POST", "/v1/tasks/cancel", {"ids": ids}),
                ("POST", "/v1/tasks/redrive", {"ids": ids}),
                ("POST", "/v1/tasks/ended", {"ids": ids}),
                ("POST", "/v1/chains/cancel", {"id": ids[0]}),
                ("POST", "/v1/tasks/purge", {"kind": self._rng.choice(self._kinds)}),
                ("PATCH", f"/v1/tasks/{ids[0]}", {"delay": 1}),
            )
        )

    def settings(self) -> Batches:
        """Change the settings of a kind, or its gate."""
        given = {"concurrency": 5, "key_concurrency": 1, "rate": 100.0, "key_rate": 1.0, "ordered": True, "aging": 1.0}
        some = {name: given[name] for name in self._rng.sample(sorted(given), 2)}
        kind = self._rng.choice(self._kinds)
        yield "PUT", f"/v1/kinds/{kind}", some
        yield "PUT", f"/v1/gates/kinds/{kind}", {"mode": self._rng.choice(("pause", "drop")), "duration": 0.5}

    def search(self) -> Batches:
        """List tasks, by what has an index and by what has none."""
        wanted = {"kind": self._kinds, "tag": self._tags, "key": self._keys, "root": self._ids[-50:], "error": ["none"]}
        given = [f"{name}={self._rng.choice(wanted[name] or ['none'])}" for name in self._rng.sample(sorted(wanted), 2)]
        yield "GET", "/v1/tasks?limit=1000&" + "&".join(given), None
