"""The rules that a client of the protocol must obey, each a function that judges a record.

Rule 1: every rule holds in every scenario, whatever was disturbed.
Rule 2: this module reads no clock and does no I/O.
A rule yields one sentence for each time that it was broken.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from leasekit.server.conformance.record import Exchange, Record

Rule = Callable[[Record], Iterator[str]]

LATE = 0.3  # seconds by which a request may arrive after it left; more is not assumed of a loopback connection
REFUSED = "urn:leasekit:problem:refused"


def requests_fit_the_schema(record: Record) -> Iterator[str]:
    """Send requests that the server does not refuse: `/openapi.json` describes them."""
    for exchange in record.exchanges:
        if _is_refused(exchange):
            yield f"{exchange.method} {exchange.path} was answered {exchange.status}: {exchange.answer.get('detail')}"


def a_refused_request_is_not_repeated(record: Record) -> Iterator[str]:
    """Do not send a request again that was refused with the type `urn:leasekit:problem:refused`."""
    refused: list[Exchange] = []
    for exchange in record.exchanges:
        if any((other.path, other.body) == (exchange.path, exchange.body) for other in refused):
            yield f"{exchange.method} {exchange.path} was refused, and sent again"
        if exchange.status == 422 and exchange.answer.get("type") == REFUSED:
            refused.append(exchange)


def a_claim_id_names_one_claim(record: Record) -> Iterator[str]:
    """Use a new `claim_id` for each claim, and the same one to repeat a claim whose answer was lost."""
    bodies: dict[tuple[str, str], Any] = {}
    done: set[tuple[str, str]] = set()
    for exchange in _accepted(record, "/v1/claims"):
        key = exchange.body["worker"], exchange.body["claim_id"]
        asked = {name: exchange.body.get(name) for name in ("kinds",)}
        if exchange.body.get("limit", 1) != 0:
            if bodies.setdefault(key, asked) != asked:
                yield f"the claim {key[1]!r} was repeated with other kinds"
            if key in done:
                yield f"the claim {key[1]!r} was answered with tasks, and its id was used for another claim"
        if exchange.is_readable and exchange.status == 200 and any(exchange.granted()):
            done.add(key)


def a_lost_claim_is_repeated_or_ended(record: Record) -> Iterator[str]:
    """Repeat a claim whose answer was lost, or end it with `limit` 0: it may have been granted tasks."""
    claims = list(_accepted(record, "/v1/claims"))
    for index, lost in enumerate(claims):
        if not lost.is_readable and any(lost.granted()):
            name = lost.body["claim_id"]
            if not any(later.body["claim_id"] == name for later in claims[index + 1 :]):
                yield f"the answer to the claim {name!r}, which was granted tasks, was lost, and it was not repeated"


def tokens_are_those_of_claims(record: Record) -> Iterator[str]:
    """Send heartbeats and results with the token that the claim of the task was granted."""
    tokens = {(lease.task_id, lease.token) for exchange in record.exchanges for lease in exchange.granted()}
    for path, name in (("/v1/heartbeats", "beats"), ("/v1/results", "results")):
        for exchange in _accepted(record, path):
            for item, _ in exchange.items(name):
                if (item["id"], item["token"]) not in tokens:
                    yield f"{path} has a token for the task {item['id']!r} that no claim was granted"


def heartbeats_come_in_time(record: Record) -> Iterator[str]:
    """Send a heartbeat before the lease of a running task ends."""
    for (task_id, attempt, token), renewals in _renewals(record).items():
        last = max(
            (sign.at for sign in record.signs if (sign.task_id, sign.attempt) == (task_id, attempt)), default=0.0
        )
        tries = _sent(record, token)
        for at, until in renewals:
            if last > until and not any(at < sent <= until for sent in tries):
                yield f"no heartbeat of {task_id!r} (attempt {attempt}) was sent in the {until - at:.1f} s of its lease"


def no_run_outlives_its_lease(record: Record) -> Iterator[str]:
    """Stop a run when its lease may have ended: `ttl` seconds after the last request that renewed it *left*."""
    for (task_id, attempt, _), renewals in _renewals(record).items():
        until = max(until for _, until in renewals)
        late = [sign.at for sign in record.signs if (sign.task_id, sign.attempt) == (task_id, attempt)]
        if late and max(late) > until + LATE:
            over = max(late) - until
            yield f"{task_id!r} (attempt {attempt}) ran on for {over:.1f} s after the end of its lease"


def no_run_goes_on_after_gone(record: Record) -> Iterator[str]:
    """Stop a run at once when the verdict on its heartbeat is `gone`, and send no heartbeat for it."""
    for gone_at, task_id, token in _verdicts(record, "gone"):
        beats = [at for at in _sent(record, token) if at > gone_at + LATE]
        if beats:
            yield f"a heartbeat of {task_id!r} was sent after the verdict gone"
        attempt = _attempts(record).get((task_id, token))
        late = [sign.at - gone_at for sign in record.signs if (sign.task_id, sign.attempt) == (task_id, attempt)]
        if late and max(late) > WIND_DOWN:
            yield f"{task_id!r} ran on for {max(late):.1f} s after the verdict gone"


WIND_DOWN = 1.5  # seconds that a handler may take until it has stopped


def results_are_repeated_unchanged(record: Record) -> Iterator[str]:
    """Repeat a result whose answer was lost, unchanged."""
    told: dict[tuple[str, str], Any] = {}
    answered: set[tuple[str, str]] = set()
    for exchange in _accepted(record, "/v1/results"):
        for item, _ in exchange.items("results"):
            key = item["id"], item["token"]
            said = {name: item.get(name) for name in ("outcome", "result")}
            if told.setdefault(key, said) != said:
                yield f"the result of {item['id']!r} was repeated with another outcome or result"
            if exchange.is_readable and exchange.status == 200:
                answered.add(key)
    for task_id, _ in told.keys() - answered:
        yield f"the answer to the result of {task_id!r} was lost, and the result was not repeated"


def retry_after_is_obeyed(record: Record) -> Iterator[str]:
    """Wait for `Retry-After` before a request is repeated that was answered 429 or 503 with it."""
    for index, busy in enumerate(record.exchanges):
        if busy.retry_after is None or busy.answered_at is None:
            continue
        for later in record.exchanges[index + 1 :]:
            if later.path == busy.path and _is_repeat(busy, later):
                waited = later.at - busy.answered_at
                if waited < busy.retry_after - LATE:
                    yield f"{busy.path} was repeated after {waited:.1f} s; Retry-After said {busy.retry_after:g} s"
                break


def request_headers_are_new(record: Record) -> Iterator[str]:
    """If `Leasekit-Request` is sent, send a new value with every try, also of a repeated request."""
    seen: set[str] = set()
    for exchange in record.exchanges:
        name = exchange.headers.get("leasekit-request")
        if name is not None and name in seen:
            yield f"two requests have the same Leasekit-Request header, {name!r}"
        seen |= {name} if name is not None else set()


RULES: tuple[Rule, ...] = (
    requests_fit_the_schema,
    a_refused_request_is_not_repeated,
    a_claim_id_names_one_claim,
    a_lost_claim_is_repeated_or_ended,
    tokens_are_those_of_claims,
    heartbeats_come_in_time,
    no_run_outlives_its_lease,
    no_run_goes_on_after_gone,
    results_are_repeated_unchanged,
    retry_after_is_obeyed,
    request_headers_are_new,
)


def _is_refused(exchange: Exchange) -> bool:
    """Return whether the server has refused the request: one that does not fit the schema is disturbed by nothing."""
    return exchange.fault is None and exchange.status in {400, 403, 404, 405, 413, 415, 422}


def _accepted(record: Record, path: str) -> Iterator[Exchange]:
    """Yield the exchanges of a path whose request has the form of the schema."""
    return (it for it in record.to(path) if not _is_refused(it))


def _is_repeat(busy: Exchange, later: Exchange) -> bool:
    if busy.path == "/v1/claims":
        return bool(busy.body["claim_id"] == later.body["claim_id"])
    return bool(busy.body == later.body)


def _attempts(record: Record) -> dict[tuple[str, str], int]:
    return {(it.task_id, it.token): it.attempt for exchange in record.exchanges for it in exchange.granted()}


def _sent(record: Record, token: str) -> list[float]:
    """Return when heartbeats with this token arrived, whatever became of them."""
    sent = ((exchange.at, exchange.items("beats")) for exchange in _accepted(record, "/v1/heartbeats"))
    return [at for at, items in sent if any(item["token"] == token for item, _ in items)]


def _renewals(record: Record) -> Mapping[tuple[str, int, str], list[tuple[float, float]]]:
    """Return of each lease (task, attempt, token) when a request that renewed it arrived, and until when it lasts.

    The client may count the ttl from when its request left at the earliest, thus not longer than from when it arrived.
    A claim that waited was granted later.
    """
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    keys: dict[tuple[str, str], tuple[str, int, str]] = {}
    for exchange in record.exchanges:
        if not exchange.is_readable or exchange.status != 200:
            continue
        for lease in exchange.granted():
            key = keys[lease.task_id, lease.token] = lease.task_id, lease.attempt, lease.token
            granted_at = exchange.at + exchange.answer.get("waited", 0.0)
            found.setdefault(key, []).append((granted_at, granted_at + lease.ttl))
        if exchange.path == "/v1/heartbeats":
            for item, verdict in exchange.items("beats"):
                renewed = keys.get((item["id"], item["token"]))
                if renewed is not None and verdict is not None and verdict["verdict"] == "renewed":
                    found[renewed].append((exchange.at, exchange.at + verdict["ttl"]))
    return found


def _verdicts(record: Record, wanted: str) -> Iterator[tuple[float, str, str]]:
    """Yield when a client read this verdict on a heartbeat, with the task and the token."""
    for exchange in _accepted(record, "/v1/heartbeats"):
        for item, verdict in exchange.items("beats"):
            if exchange.is_readable and verdict is not None and verdict["verdict"] == wanted:
                yield exchange.answered_at or exchange.at, item["id"], item["token"]
