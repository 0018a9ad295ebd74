"""Rows about floods: clients of one access token send what is dear or refused, and others have tokens of their own."""

import itertools
import json
import secrets
import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import urlencode

from harness.chaos.calls import MEGABYTES, SLOWEST, call, claim, encoded, headers, loaded, peak
from harness.chaos.scenarios import scenario
from harness.chaos.world import World
from leasekit.tokens import digest_of, new_secret
from leasekit.wire import MAX_BATCH, MAX_KINDS

CONNECTIONS = 240
SECONDS = 6.0  # for which each flood lasts
_KEYS = 20_000  # that tasks of a flood have
_SCOPES = {"flooder": ["submit", "work", "read", "operate"], "honest": ["submit", "work", "read"]}
_GIVEN_UP = 0  # in place of a status
_PAGES = ("", "tasks?kind=honest", "kind?kind=honest")  # of the console


class Request(NamedTuple):
    """A request of the flooder. With a `cookie`, it comes from a browser, without the access token."""

    path: str
    body: bytes | Callable[[], bytes] = b""
    method: str = "POST"
    cookie: str = ""
    patience: float = 120.0
    """Seconds for the answer. A search, or a claim, ends when its client has gone."""
    then: "Callable[[Any], Request | None] | None" = None
    """Makes, of the answer, a request that follows it."""


Send = Callable[..., Any]
"""Sends the fields of one request to a path, as the flooder, and returns the answer."""


@scenario(35, "floods-of-one-token", faults=("load",), alone=True)
def floods(world: World) -> None:
    """Floods of what is dear or refused, by one access token: others are served meanwhile."""
    _flood(world, "loaded.db")


@scenario(35, "floods-of-one-token-on-postgresql", faults=("load",), service="postgresql", alone=True)
def floods_on_postgresql(world: World) -> None:
    """The same with a database that is new."""
    _flood(world, world.database.create("loaded"))


def _flood(world: World, store: str) -> None:
    server, port, beat = loaded(world, store)
    tokens = _tokens(port)

    def send(path: str, **fields: Any) -> Any:
        return json.loads(call(port, path, encoded(**fields), token=tokens["flooder"])[1])

    cookie = _log_in(port, tokens["honest"])
    for name, parts in _FLOODS.items():
        over, statuses, seconds = Event(), Counter[int](), defaultdict[str, list[float]](list)
        loads = [(tokens[token], _REQUESTS[what](send), count) for token, what, count in parts]
        with ThreadPoolExecutor(2 * CONNECTIONS) as threads:
            work = [
                threads.submit(_send, port, token, [*requests[at:], *requests[:at]], statuses, over)
                for token, requests, count in loads
                for at in range(count)
            ]
            work += [
                threads.submit(_beat, port, tokens["honest"], beat, seconds["heartbeats"], over),
                threads.submit(_work, port, tokens["honest"], seconds["new tasks"], over),
                threads.submit(_look, port, cookie, seconds["pages"], over),
            ]
            over.wait(SECONDS)
            over.set()
            for each in work:
                each.result(300)
        usual = {what: _nine_of_ten(some) for what, some in seconds.items()}
        told = ", ".join(f"{what} {usual[what]:.2f} s ({max(some):.2f})" for what, some in seconds.items())
        print(f"      {name:<40} {told}, answers {dict(sorted(statuses.items()))}")
        slowest = max(seconds["heartbeats"])
        assert slowest < SLOWEST, f"{name}: a heartbeat took {slowest:.1f} s"
        assert max(usual.values()) < SLOWEST, f"{name}: of 10 requests of another token, one took so long: {told}"
        assert statuses.keys() <= {_GIVEN_UP, 200, 303, 409, 422, 429}, f"{name}: {statuses}"
        world.fault("load", target=name)
    assert peak(server) < MEGABYTES
    assert server.stop() == 0


def _nine_of_ten(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


def _tokens(port: int) -> dict[str, str]:
    """Make an access token for an administrator, then one for each of `_SCOPES`; return secrets by name."""
    made: dict[str, str] = {}
    for name, scopes in {"admin": ["submit", "work", "read", "operate"], **_SCOPES}.items():
        secret = new_secret()
        new = {"name": name, "digest": digest_of(secret).hex(), "scopes": scopes, "kinds": ["*"]}
        body = encoded(id=str(uuid.uuid4()), **new)
        status, raw = call(port, "/v1/tokens", body, token=made.get("admin", ""))
        assert status == 200, raw
        made[name] = secret
    return made


def _send(port: int, token: str, requests: Sequence[Request], statuses: "Counter[int]", over: Event) -> None:
    """Send requests again and again on one connection, from an address of their own."""
    flooder = ("127.0.0.2", 0)
    with closing(HTTPConnection("127.0.0.1", port, timeout=requests[0].patience, source_address=flooder)) as connection:
        for first in itertools.cycle(requests):
            request: Request | None = first
            while request is not None:
                if over.is_set():
                    return
                body = request.body if isinstance(request.body, bytes) else request.body()
                sent = {"cookie": request.cookie} if request.cookie else headers(token)
                try:
                    connection.request(request.method, request.path, body or None, sent)
                    answer = connection.getresponse()
                    raw = answer.read()
                except TimeoutError:
                    statuses[_GIVEN_UP] += 1
                    connection.close()  # the next request opens it again
                    break
                statuses[answer.status] += 1
                over.wait(0.1 if answer.status == 429 else 0)
                request = request.then(json.loads(raw)) if request.then and answer.status == 200 else None


def _beat(port: int, token: str, beat: bytes, seconds: list[float], over: Event) -> None:
    while not (over.is_set() and seconds):
        began_at = time.monotonic()
        status, raw = call(port, "/v1/heartbeats", beat, token=token)
        seconds.append(time.monotonic() - began_at)
        assert status == 200, raw
        over.wait(0.02)


def _work(port: int, token: str, seconds: list[float], over: Event) -> None:
    """Schedule a task, claim it, and end it, again and again; note how long each new task took."""
    while not (over.is_set() and seconds):
        began_at = time.monotonic()
        status, raw = call(port, "/v1/tasks", encoded(tasks=[{"kind": "honest"}]), token=token)
        seconds.append(time.monotonic() - began_at)
        assert status == 200, raw
        results = [
            {"id": task["id"], "token": task["token"], "outcome": "success"}
            for task in claim(port, "honest", 10, token=token)
        ]
        if results:
            call(port, "/v1/results", encoded(worker="w", results=results), token=token)


def _log_in(port: int, token: str) -> str:
    """Begin a session of the console, and return its cookie."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        form = {"content-type": "application/x-www-form-urlencoded", "origin": f"http://127.0.0.1:{port}"}
        connection.request("POST", "/console/login", urlencode({"token": token}), form)
        answer = connection.getresponse()
        answer.read()
        return (answer.headers["set-cookie"] or "").partition(";")[0]


def _look(port: int, cookie: str, seconds: list[float], over: Event) -> None:
    """Look at pages of the console, one after another."""
    while not (over.is_set() and seconds):
        for page in _PAGES:
            with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
                began_at = time.monotonic()
                connection.request("GET", f"/console/{page}", headers={"cookie": cookie})
                answer = connection.getresponse()
                answer.read()
                seconds.append(time.monotonic() - began_at)
                assert answer.status == 200, f"{page}: {answer.status}"
        over.wait(0.1)


def _settled(send: Send) -> Sequence[Request]:
    send("/v1/tasks", tasks=[{"kind": "settled"}] * MAX_BATCH)
    kinds = {"kinds": ["settled"], "claim_id": str(uuid.uuid4()), "limit": MAX_BATCH}
    tasks = send("/v1/claims", worker="w", **kinds)["tasks"]
    results = [{"id": task["id"], "token": task["token"], "outcome": "success"} for task in tasks]
    send("/v1/results", worker="w", results=results)
    return [Request("/v1/results", encoded(worker="w", results=results))]


def _ended(send: Send) -> Sequence[Request]:
    ids = [task["id"] for task in send("/v1/tasks", tasks=[{"kind": "ended"}] * MAX_BATCH)["tasks"]]
    send("/v1/tasks/cancel", ids=ids)
    return [Request("/v1/tasks/cancel", encoded(ids=ids))]


def _circles(send: Send) -> Sequence[Request]:
    """Each request is refused only after all that waits behind it was read: layers, each after all of the one below."""
    name = str(uuid.uuid4())
    first = f"{name}-first"
    below = [first]
    for layer in range(9):
        ids = [f"{name}-{layer}-{n}" for n in range(100)]
        send("/v1/tasks", tasks=[{"kind": "layer", "id": task_id, "after": below} for task_id in ids])
        below = ids
    return [Request("/v1/tasks", encoded(tasks=[{"kind": "layer", "id": first, "after": below}]))]


def _labels(send: Send) -> Sequence[Request]:
    """Of a kind whose waiting tasks have as many different sets of labels as they may have."""
    kind = f"labels-{uuid.uuid4()}"
    tasks = [{"kind": kind, "requires": {"label": f"x{n}"}} for n in range(33)]
    send("/v1/tasks", tasks=tasks[:32])
    return [Request("/v1/tasks", encoded(tasks=[{"kind": "good"}] * 100 + tasks[32:]))]


def _claims(_: Send) -> Sequence[Request]:
    kinds = [[f"none-{n}-{m}" for m in range(50)] for n in range(50)]
    return [
        Request("/v1/claims", encoded(worker="w", claim_id=f"c{n}", wait=0, kinds=some)) for n, some in enumerate(kinds)
    ]


def _claims_given_back(send: Send) -> Sequence[Request]:
    """Each claim is for as many tasks as one may have, each of another key, and gives them back."""
    for at in range(0, _KEYS, MAX_BATCH):
        send("/v1/tasks", tasks=[{"kind": "keyed", "key": f"k{n}"} for n in range(at, at + MAX_BATCH)])

    def given_back(claimed: Any) -> Request | None:
        results = [{"id": task["id"], "token": task["token"], "outcome": "release"} for task in claimed["tasks"]]
        return Request("/v1/results", encoded(worker="w", results=results)) if results else None

    return [Request("/v1/claims", lambda: _new_claim(["keyed"]), then=given_back)]


def _claims_cut(_: Send) -> Sequence[Request]:
    """Each claim is for kinds that were never seen, and its client leaves at once."""

    numbers = itertools.count()

    def new() -> bytes:
        number = next(numbers)
        return _new_claim([f"cut-{number}-{n}" for n in range(MAX_KINDS)], wait=60)

    return [Request("/v1/claims", new, patience=0.1)]


def _new_claim(kinds: Sequence[str], *, wait: float = 0) -> bytes:
    return encoded(worker="w", claim_id=str(uuid.uuid4()), limit=MAX_BATCH, wait=wait, kinds=kinds)


def _lists(_: Send) -> Sequence[Request]:
    return [Request(f"/v1/tasks?limit={MAX_BATCH}", method="GET", patience=SECONDS)]


def _tasks(_: Send) -> Sequence[Request]:
    return [Request("/v1/tasks", encoded(tasks=[{"kind": "flood"}] * 100))]


def _searches(_: Send) -> Sequence[Request]:
    """Search all tasks, also those of other floods, for errors that none of them had."""
    filters = ("error=none", "error_type=None", "tag=none", "worker=none", "error=none&newest=true")
    return [Request(f"/v1/tasks?{each}", method="GET", patience=SECONDS) for each in filters]


def _dry_runs(_: Send) -> Sequence[Request]:
    return [
        Request("/v1/tasks/cancel-matching", encoded(kind="flood", dry_run=True), patience=SECONDS),
        Request("/v1/tasks/cancel-matching", encoded(error="none", dry_run=True), patience=SECONDS),
        Request("/v1/tasks/purge", encoded(older_than=60, dry_run=True), patience=SECONDS),
    ]


def _made_up(_: Send) -> Sequence[Request]:
    return [
        Request(f"/console/{page}", method="GET", cookie=f"leasekit-console={secrets.token_urlsafe(32)}")
        for page in _PAGES
    ]


_REQUESTS: dict[str, Callable[[Send], Sequence[Request]]] = {
    "results of what is settled": _settled,
    "cancels of what has ended": _ended,
    "circles": _circles,
    "labels": _labels,
    "claims": _claims,
    "claims given back": _claims_given_back,
    "claims that are cut": _claims_cut,
    "tasks": _tasks,
    "lists": _lists,
    "searches": _searches,
    "dry runs": _dry_runs,
    "made-up cookies": _made_up,
}
_FLOODS: dict[str, Sequence[tuple[str, str, int]]] = {
    **{what: [("flooder", what, CONNECTIONS)] for what in _REQUESTS},
    # Each opens a connection, which costs this process, in which others are measured, as much as the server.
    "claims that are cut": [("flooder", "claims that are cut", CONNECTIONS // 10)],
    "results, claims and tasks": [
        ("flooder", what, CONNECTIONS // 3) for what in ("results of what is settled", "claims", "tasks")
    ],
    "circles and tasks": [("flooder", what, CONNECTIONS // 2) for what in ("circles", "tasks")],
    "searches and made-up cookies": [("flooder", what, CONNECTIONS // 2) for what in ("searches", "made-up cookies")],
    "tasks, and one bad client of the honest": [("flooder", "tasks", CONNECTIONS), ("honest", "circles", 1)],
    "circles, and a bad client of the honest": [("flooder", "circles", CONNECTIONS), ("honest", "labels", 1)],
}
