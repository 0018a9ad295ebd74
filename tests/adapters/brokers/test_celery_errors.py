"""A Celery task that cannot be run now is never lost, and never run without its lease: whatever else fails."""

import itertools
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from billiard.einfo import ExceptionInfo
from celery import signals
from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.concurrency import solo
from celery.exceptions import Ignore, OperationalError, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request
from kombu.entity import Exchange, Queue

import leasekit
import leasekit_celery
from leasekit import LeaseLost, _blocks
from leasekit._driver.keeping.held_lease import HeldLease
from leasekit.testing import faults
from leasekit.testing.faults import Faulty
from leasekit.testing.memory import MemoryBackend, MemoryService
from leasekit_celery import copies, endings, setup
from leasekit_celery.children import DISMISSED, LeasedRequest
from leasekit_celery.leased import LeasedTask
from leasekit_celery.outage import Outage
from tests.injecting import Place, interrupts
from tests.sampling import in_soak
from tests.waiting import eventually


class Shop:
    """An app with one task, and what was sent to its broker meanwhile."""

    def __init__(self) -> None:
        self.faulty = Faulty(MemoryBackend(MemoryService(), worker="celery"))
        self.client = leasekit.Client(self.faulty, retry_for=0)
        self.app = celery.Celery("shop", broker="memory://", backend=None)
        leasekit_celery.install(self.app, "memory://")
        self.app.Task.leases = self.client
        self.sent = 0
        self.options: dict[str, Any] = {}  # of what was sent last
        self.delays: list[float] = []
        self.broker_is_away = False
        self.ran = 0

    def task(self, *, acks_late: bool) -> Any:
        @self.app.task(shared=False, acks_late=acks_late)  # type: ignore[untyped-decorator]
        def count() -> int:
            self.ran += 1
            return self.ran

        return count

    @contextmanager
    def delivered(self, task: Any, **request: Any) -> Iterator[None]:
        """As a worker has it."""
        task.push_request(id="1", called_directly=False, is_eager=False, args=(), kwargs={}, **request)
        try:
            yield
        finally:
            task.pop_request()

    def run(self, task: Any, **request: int) -> Any:
        with self.delivered(task, **request):
            return task()

    def send(self) -> None:
        if self.broker_is_away:
            raise ConnectionError("the broker is away")
        self.sent += 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its first run is alive."""
        with leasekit.lease(self.client.once("celery:1")) as lease:
            yield
            lease.release()


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    shop = Shop()

    def send_task(*_: Any, **options: Any) -> None:
        shop.send()
        shop.options = options
        shop.delays.append(options["countdown"])

    monkeypatch.setattr(celery.Celery, "send_task", send_task)
    yield shop
    shop.client.close()


@pytest.mark.parametrize("acks_late", [True, False])
def test_what_is_put_off_is_sent_again_and_acknowledged(shop: Shop, acks_late: bool) -> None:
    task = shop.task(acks_late=acks_late)
    with shop.held(), shop.delivered(task), pytest.raises(Ignore):
        task()
    assert (shop.sent, shop.ran) == (1, 0)


def test_what_runs_for_long_is_looked_at_more_and_more_rarely_and_said_once(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    task = shop.task(acks_late=True)
    caplog.set_level("INFO", "leasekit.celery")
    with shop.held():
        for _ in range(6):
            with shop.delivered(task, headers=shop.options.get("headers")), pytest.raises(Ignore):
                task()
    assert shop.delays == [5, 10, 20, 40, 60, 60]
    assert [record.getMessage() for record in caplog.records] == [
        "task 1 is put off for 5 s: another run has its lease"
    ]


def test_a_copy_that_was_put_off_says_so_to_the_task_and_not_to_its_retries(shop: Shop) -> None:
    @shop.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def look(task: Any) -> tuple[bool, dict[str, int]]:
        return task.request.delivery_info["redelivered"], task.request.headers

    with shop.delivered(look, headers={"leasekit_put_off": 1, "tenant": 7}, delivery_info={"redelivered": False}):
        assert look() == (True, {"tenant": 7})


def test_what_the_broker_does_not_take_for_later_is_not_acknowledged(shop: Shop) -> None:
    task = shop.task(acks_late=True)
    shop.broker_is_away = True
    with shop.held(), shop.delivered(task), pytest.raises(Reject) as rejected:
        task()
    assert (rejected.value.requeue, shop.ran) == (True, 0)


@pytest.mark.parametrize("error", [OperationalError("the broker is away"), SoftTimeLimitExceeded()])
def test_what_was_acknowledged_before_it_began_waits_for_the_broker(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    outage = iter([error, error, error])

    def send_task(*_: Any, **__: Any) -> None:
        for failure in outage:
            raise failure
        shop.send()

    monkeypatch.setattr(celery.Celery, "send_task", send_task)
    monkeypatch.setattr(copies, "_RESEND", 0.0)
    task = shop.task(acks_late=False)
    with shop.held(), shop.delivered(task), pytest.raises(Ignore):
        task()
    assert (shop.sent, shop.ran, next(outage, None)) == (1, 0, None)
    assert [record.levelname for record in caplog.records if "waits until the broker" in record.message] == ["WARNING"]


@pytest.mark.parametrize("acks_late", [True, False])
def test_without_the_service_a_message_is_put_off_for_longer_each_time(shop: Shop, acks_late: bool) -> None:
    task = shop.task(acks_late=acks_late)
    shop.faulty.always("schedule", faults.drop)
    for _ in range(8):
        with shop.delivered(task, headers=shop.options.get("headers")), pytest.raises(Ignore):
            task()
    assert (shop.sent, shop.ran) == (8, 0)
    assert shop.delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_an_outage_is_one_warning_however_many_messages_wait(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    task = shop.task(acks_late=True)
    caplog.set_level("INFO", "leasekit.celery")

    def deliver(*, during_outage: bool) -> int:
        with nullcontext() if during_outage else shop.held():
            if during_outage:
                shop.faulty.always("schedule", faults.drop)
            with shop.delivered(task), suppress(Ignore):
                task()
            shop.faulty.clear()
        return [record.levelname for record in caplog.records].count("WARNING")

    assert [deliver(during_outage=True) for _ in range(3)] == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert deliver(during_outage=False) == 2
    assert "the service of the leases answers again, after 0 s" in caplog.text
    assert [deliver(during_outage=True) for _ in range(2)] == [3, 3]


def test_an_outage_that_lasts_is_said_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1000.0, 1000.0, 1001.0, 1299.0, 1300.0, 1599.0, 1600.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    outage = Outage()
    outage.begins(before_tasks=True)
    assert [outage.begins() for _ in range(6)] == [True, False, False, True, False, True]


def test_what_ends_after_its_lease_was_lost_comes_again_if_the_service_is_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = shop.task(acks_late=True)
    monkeypatch.setattr(leasekit.Lease, "lost", True)
    shop.faulty.always("get", faults.drop)
    with shop.delivered(task), pytest.raises(Reject):
        task()
    assert (shop.ran, shop.faulty.calls["settle"]) == (1, 0)  # settled, the copy that comes would not run


def refuse(*_: object) -> None:
    raise LeaseLost("lost", task_id="once:celery:1", reason="taken")


# The order in which a run ends


class Traced:
    """An app with a result backend, whose tasks are run by Celery's own tracer, as in a worker."""

    def __init__(self, task_cls: Any = None) -> None:
        self.client = leasekit.Client(MemoryBackend(MemoryService(), worker="celery"), retry_for=0)
        self.app = celery.Celery("shop", broker="memory://", backend="cache+memory://", task_cls=task_cls)
        leasekit_celery.install(self.app, "memory://")
        self.app.Task.leases = self.client
        self.id = str(uuid.uuid4())  # all backends in memory are one
        self.ran = 0

        @self.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
        def count(*, fail: bool = False) -> int:
            self.ran += 1
            if fail:
                raise ValueError("oops")
            return self.ran

        self.task = count

    def deliver(self, task: Any = None, *args: Any, number: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """As a worker runs it."""
        task = task or self.task
        request = {"id": self.id, "delivery_info": {}, **(number or {})}
        build_tracer(task.name, task, app=self.app)(self.id, args, kwargs, request)

    @property
    def status(self) -> str:
        """Of its lease, at the service."""
        info = self.client.get(f"once:celery:{self.id}")
        return str(info.status) if info else "unknown"

    @property
    def result(self) -> Any:
        return self.app.AsyncResult(self.id)


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.client.close()


@pytest.mark.parametrize(("fail", "stores", "ended"), [
    (False, "mark_as_done", "success"), (True, "mark_as_failure", "fatal_failure"),
])  # fmt: skip
def test_its_end_is_reported_after_celery_has_stored_its_result(
    traced: Traced, fail: Any, stores: str, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    store = getattr(traced.app.backend, stores)

    def look(*args: Any, **kwargs: Any) -> Any:
        done = store(*args, **kwargs)
        seen.append(traced.status)
        return done

    monkeypatch.setattr(traced.app.backend, stores, look)
    traced.deliver(fail=fail)
    assert (seen, traced.status) == (["processing"], ended)


def test_a_retry_gets_the_lease_after_celery_has_stored_that_this_attempt_is_retried(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored later, the state RETRY could replace that of a retry that has ended already."""
    seen: list[str] = []

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def again(task: Any) -> None:
        task.retry()

    monkeypatch.setattr(Signature, "apply_async", lambda signature: None)
    monkeypatch.setattr(traced.app.backend, "mark_as_retry", lambda *_, **__: seen.append(traced.status))
    traced.deliver(again)
    assert (seen, traced.status) == (["processing"], "enqueued")


@pytest.mark.skipif(not hasattr(celery.Task, "acks_on_failure"), reason="an option of Celery 5.7")
@pytest.mark.parametrize(("acks", "status"), [(False, "enqueued"), (True, "fatal_failure")])
def test_a_failure_is_the_end_if_celery_acknowledges_failures(traced: Traced, acks: bool, status: str) -> None:
    @traced.app.task(shared=False, acks_late=True, acks_on_failure=acks, acks_on_failure_or_timeout=not acks)  # type: ignore[untyped-decorator]
    def fail() -> None:
        raise ValueError("oops")

    traced.deliver(fail)
    assert traced.status == status


@pytest.mark.parametrize(("fail", "stores"), [(False, "mark_as_done"), (True, "mark_as_failure")])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OperationalError("away"), ConnectionError("away")])
def test_what_was_broken_off_before_its_result_was_stored_runs_again(
    traced: Traced, error: BaseException, fail: bool, stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt, RuntimeWarning):  # of which Celery warns
        patch.setattr(traced.app.backend, stores, break_off)
        traced.deliver(fail=fail)
    assert traced.status == "enqueued"
    traced.deliver()
    assert (traced.ran, traced.result.result, traced.status) == (2, 2, "success")


def test_a_retry_that_the_broker_does_not_accept_is_no_end(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OperationalError("away")

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def again(task: Any) -> None:
        traced.ran += 1
        if traced.ran == 1:
            task.retry()

    with monkeypatch.context() as patch:
        patch.setattr(Signature, "apply_async", refuse)
        traced.deliver(again)
    assert traced.status == "enqueued"
    traced.deliver(again)  # the broker did not take the rejection either
    assert (traced.ran, traced.status) == (2, "success")


@pytest.mark.parametrize(("fail", "state"), [(False, "SUCCESS"), (True, "FAILURE")])
def test_what_ends_after_its_lease_was_lost_counts_if_it_does_not_come_again(
    traced: Traced, fail: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str) -> None:
        raise leasekit.Unavailable("away")

    @traced.app.task(shared=False)  # type: ignore[untyped-decorator]
    def early() -> str:
        monkeypatch.setattr(HeldLease, "lost", True)
        if fail:
            raise ValueError("oops")
        return "done"

    monkeypatch.setattr(traced.client, "get", away)
    traced.deliver(early)
    assert (traced.result.state, str(traced.result.result)) == (state, "oops" if fail else "done")


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("throw", [True, False])
def test_a_retry_stays_one_though_the_lease_was_lost_before(
    traced: Traced, acks_late: bool, throw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []

    def away(_: str) -> None:
        raise leasekit.Unavailable("away")

    @traced.app.task(shared=False, bind=True, acks_late=acks_late)  # type: ignore[untyped-decorator]
    def again(task: Any) -> None:
        monkeypatch.setattr(HeldLease, "lost", True)
        task.retry(throw=throw)

    monkeypatch.setattr(traced.client, "get", away)
    monkeypatch.setattr(Signature, "apply_async", lambda signature: None)
    for state in ("done", "failure", "retry"):
        monkeypatch.setattr(traced.app.backend, f"mark_as_{state}", lambda *_, state=state, **__: stored.append(state))
    traced.deliver(again)
    assert stored == ["retry" if throw else "done"]  # neither delivered again nor failed, beside its retry


def test_a_soft_time_limit_while_its_lease_is_left_does_not_make_a_retry_a_failure(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> float:
        raise SoftTimeLimitExceeded

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def again(task: Any) -> None:
        task.retry()

    monkeypatch.setattr(Signature, "apply_async", lambda signature: None)
    monkeypatch.setattr(_blocks, "_patience", interrupt)
    traced.deliver(again)
    assert traced.result.status == "RETRY"
    eventually(lambda: traced.status == "enqueued")


def test_a_failure_is_the_end_also_if_a_handler_of_it_raises(traced: Traced) -> None:
    class Raises(LeasedTask):
        abstract = True

        def on_failure(self, *_: Any) -> None:
            raise RuntimeError("in on_failure")

    @traced.app.task(shared=False, base=Raises, acks_late=True)  # type: ignore[untyped-decorator]
    def fail() -> None:
        traced.ran += 1
        raise ValueError("oops")

    for _ in range(2):
        with suppress(RuntimeError, RuntimeWarning):  # of which Celery warns
            traced.deliver(fail)
    assert (traced.ran, traced.result.status, traced.status) == (1, "FAILURE", "fatal_failure")


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("in repr")

    __str__ = __repr__


@pytest.mark.parametrize("error", [Unprintable(), Reject(Unprintable(), requeue=False)])
def test_a_failure_is_the_end_also_if_its_exception_has_no_repr(traced: Traced, error: Exception) -> None:
    @traced.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
    def fail() -> None:
        raise error

    with suppress(Reject):
        traced.deliver(fail)
    assert traced.status == "fatal_failure"


BEFORE_THE_BODY = [
    LeasedTask.__call__.__code__,
    LeasedTask._enter_lease.__code__,
    LeasedTask._check_attempt.__code__,
    endings.Run.__init__.__code__,
]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.slow
def test_a_soft_time_limit_anywhere_before_the_body_leaves_no_lease(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off: list[str] = []
    monkeypatch.setattr(celery.Celery, "send_task", lambda *_, task_id, **__: put_off.append(task_id))
    ended: list[str] = []
    traced.app.finalize()  # as a worker does before it runs tasks
    for number in itertools.count(step=in_soak(1, by_default=5)):  # sample: each fifth place
        traced.id = f"{uuid.uuid4()}"
        place = Place(number, also=BEFORE_THE_BODY, error=SoftTimeLimitExceeded)
        with interrupts(place):
            traced.deliver()
        if traced.ran:
            break
        eventually(lambda: traced.status not in ("claimed", "processing"), f"{place.at}")
        assert (traced.id in put_off) == (traced.result.status == "PENDING"), place.at
        ended.append(traced.status)
    assert "enqueued" in ended, "no lease was granted before the limit"


def test_a_report_that_is_refused_after_that_is_said(
    traced: Traced, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_blocks, "_conclude", refuse)
    traced.deliver()
    assert traced.result.result == 1
    assert f"task {traced.id} may run again, though it has ended" in caplog.text


@pytest.mark.parametrize("taken", [True, False])
def test_what_ends_after_its_lease_was_lost_counts_if_no_other_run_has_begun(
    traced: Traced, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    monkeypatch.setattr(leasekit.Lease, "lost", True)
    monkeypatch.setattr(leasekit.Lease, "fence", property(lambda held: held.task.fence - taken))
    monkeypatch.setattr(traced.app.backend, "mark_as_done", lambda *_: stored.append(traced.status))
    traced.deliver()
    assert stored == ([] if taken else ["processing"])
    assert traced.status == ("processing" if taken else "success")


def test_a_copy_that_is_put_off_is_the_same_message(traced: Traced) -> None:
    sent: list[dict[str, Any]] = []

    def hear(headers: dict[str, Any], **_: Any) -> None:
        sent.append(headers)

    signals.before_task_publish.connect(hear)
    try:
        with leasekit.lease(traced.client.once(f"celery:{traced.id}")) as held:
            traced.task.apply_async(task_id=traced.id, argsrepr="(…)", kwargsrepr="{…}", headers={"tenant": "x"})
            traced.deliver(number=dict(sent[0]))
            traced.deliver(number={**sent[0], "parent_id": "p", "root_id": "r"})
            held.release()
    finally:
        signals.before_task_publish.disconnect(hear)
    first, second, third = sent
    apart = {"eta", "leasekit_put_off"}
    assert {name: value for name, value in second.items() if name not in apart} == {
        name: value for name, value in first.items() if name not in apart
    }
    assert (third["parent_id"], third["root_id"], traced.ran) == ("p", "r", 0)


def test_a_copy_that_is_put_off_is_encoded_and_sent_like_the_message(traced: Traced) -> None:
    """A task without arguments of JSON is sent as pickle, say, whatever the default of its app is."""
    traced.app.conf.update(accept_content=["json", "pickle"], task_default_queue=traced.id)
    sending = {"serializer": "pickle", "compression": "gzip", "delivery_mode": 1, "priority": 3, "expires": 300}
    traced.task.apply_async(task_id=traced.id, headers={"tenant": "x"}, **sending)
    with traced.app.connection_for_read() as connection, connection.SimpleQueue(traced.id, accept=["pickle"]) as queue:
        first = queue.get(timeout=20)
        request = Request(first, app=traced.app, task=traced.task)
        signals.task_received.send(sender=None, request=request)
        with leasekit.lease(traced.client.once(f"celery:{traced.id}")) as held:
            traced.deliver(number=request.request_dict)
            held.release()
        second = queue.get(timeout=20)
    for name in ("content_type", "content_encoding", "payload"):
        assert getattr(second, name) == getattr(first, name)
    assert (first.content_type, first.content_encoding) == ("application/x-python-serialize", "binary")
    for were, are in ((first.headers, second.headers), (first.properties, second.properties)):
        kept = were.keys() - {"eta", "delivery_tag", "expiration"}
        assert {name: are[name] for name in kept} == {name: were[name] for name in kept}
    assert (first.headers["tenant"], first.headers["compression"], first.properties["priority"]) == (
        "x", "application/x-gzip", 3,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::celery.exceptions.AlwaysEagerIgnored")
@pytest.mark.parametrize("always_eager", [True, False])
def test_a_copy_is_sent_whatever_the_task_makes_of_being_sent(traced: Traced, always_eager: bool) -> None:
    """Classes that send a task once, or with more arguments, are common, and Celery may run what is sent at once."""

    class Once(LeasedTask):
        abstract = True

        def apply_async(self, *_: Any, **__: Any) -> None:
            return None

    @traced.app.task(shared=False, base=Once, acks_late=True)  # type: ignore[untyped-decorator]
    def count(*_: int) -> None:
        traced.ran += 1

    traced.app.conf.update(task_always_eager=always_eager, task_default_queue=traced.id)
    with leasekit.lease(traced.client.once(f"celery:{traced.id}")) as held:
        traced.deliver(count, 7)
        held.release()
    with traced.app.connection_for_read() as connection, connection.SimpleQueue(traced.id) as queue:
        copy = queue.get(timeout=20)
    assert (copy.headers["id"], copy.payload[0], traced.ran) == (traced.id, [7], 0)


# Retries and replacements: each attempt runs to its end once


class Attempts:
    """A task that is to run again, and what its runs have sent in their own place."""

    def __init__(self, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traced = traced
        self.sent: list[dict[str, int]] = []
        self.runs: list[int] = []

        def send(signature: Any) -> None:
            self._send(signature)

        monkeypatch.setattr(Signature, "apply_async", send)
        monkeypatch.setattr(Signature, "delay", send)

        @traced.app.task(shared=False, bind=True, acks_late=True, max_retries=5)  # type: ignore[untyped-decorator]
        def poll(task: Any, how: str) -> str:
            self.runs.append(task.request.retries)
            if len(self.runs) >= 3:
                return "done"
            if how == "replace":
                task.replace(poll.s(how))
            retry = task.retry(countdown=0, throw=how == "raise")
            if how == "fail":
                raise ValueError("oops")
            return str(retry)

        self.task = poll

    def _send(self, signature: Any) -> None:
        options = signature.options
        self.sent.append({name: options.get(name, 0) for name in ("retries", "replaced_task_nesting")})

    def deliver(self, how: str, number: dict[str, int] | None = None) -> None:
        self.traced.deliver(self.task, how, number=number)


@pytest.fixture
def attempts(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(traced, monkeypatch)


WAYS = ["raise", "return", "fail", "replace"]


@pytest.mark.parametrize("how", WAYS)
def test_what_a_run_has_sent_in_its_own_place_runs_after_it(attempts: Attempts, how: str) -> None:
    attempts.deliver(how)
    attempts.deliver(how, attempts.sent[0])
    assert (attempts.traced.status, len(attempts.sent)) == ("enqueued", 2)
    attempts.deliver(how, attempts.sent[1])
    assert (len(attempts.runs), attempts.traced.status) == (3, "success")


# The messages of older Celery do not carry the number of replacements.
@pytest.mark.parametrize("how", WAYS if celery.VERSION >= (5, 7) else WAYS[:-1])
def test_an_attempt_that_has_sent_another_in_its_own_place_does_not_run_again(attempts: Attempts, how: str) -> None:
    attempts.deliver(how)
    attempts.deliver(how)
    attempts.deliver(how, attempts.sent[0])
    attempts.deliver(how)
    attempts.deliver(how, attempts.sent[0])
    attempts.deliver(how)
    assert (len(attempts.runs), len(attempts.sent)) == (2, 2)


@pytest.mark.parametrize("how", ["return", "fail"])
def test_an_attempt_that_was_broken_off_runs_again_though_it_has_sent_a_retry(
    attempts: Attempts, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(attempts.traced.app.backend, "mark_as_done", break_off)
        patch.setattr(attempts.traced.app.backend, "mark_as_failure", break_off)
        attempts.deliver(how)
    attempts.deliver(how)
    assert attempts.runs == [0, 0]


@pytest.mark.parametrize(("error", "times", "status"), [
    (Reject("later", requeue=True), 2, "enqueued"),
    (Reject("never"), 1, "fatal_failure"),
    (Ignore(), 1, "success"),
])  # fmt: skip
def test_a_task_runs_again_if_it_gives_its_message_back_and_never_if_it_dismisses_it(
    traced: Traced, error: Exception, times: int, status: str
) -> None:
    runs: list[int] = []

    @traced.app.task(shared=False, acks_late=True, acks_on_failure_or_timeout=False)  # type: ignore[untyped-decorator]
    def later() -> None:
        runs.append(1)
        raise error

    for _ in range(2):
        with suppress(Ignore):
            traced.deliver(later)
    assert (len(runs), traced.status) == (times, status)


@pytest.mark.parametrize(("acks_late", "number", "again"), [
    (True, {}, ["REJECTED"]),
    (True, {"retries": 1}, ["IGNORED"]),  # the message of another attempt
    (True, {"x-death": [{"count": 1}]}, ["IGNORED"]),  # it was sent back by a dead-letter exchange
    (False, {}, ["IGNORED"]),  # its message was acknowledged before the run
])  # fmt: skip
def test_a_copy_of_a_message_that_its_task_has_rejected_is_rejected_too(
    traced: Traced, *, acks_late: bool, number: dict[str, Any], again: list[str]
) -> None:
    ended: list[str] = []

    def hear(state: str, **_: object) -> None:
        ended.append(state)

    @traced.app.task(shared=False, acks_late=acks_late)  # type: ignore[untyped-decorator]
    def never() -> None:
        raise Reject("never")

    signals.task_postrun.connect(hear)
    traced.deliver(never)
    traced.deliver(never, number=number)
    signals.task_postrun.disconnect(hear)
    assert ended == ["REJECTED", *again]


@pytest.mark.parametrize(("stored", "states"), [(True, ["FAILURE"]), (False, ["FAILURE", "FAILURE"])])
def test_a_message_is_rejected_again_though_its_failure_is_stored_and_sent_once(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, *, stored: bool, states: list[str]
) -> None:
    kept: list[str] = []
    rejected: list[bool] = []
    store = traced.app.backend.store_result

    def keep(task_id: str, result: object, state: str, *args: Any, **options: Any) -> None:
        kept.append(state)
        if stored or len(kept) > 1:
            store(task_id, result, state, *args, **options)

    monkeypatch.setattr(traced.app.backend, "store_result", keep)
    for reason in ("never", DISMISSED):
        message = SimpleNamespace(
            headers={"id": traced.id, "task": traced.task.name},
            body=b"",
            content_type=None,
            content_encoding=None,
            payload=((), {}, {}),
            delivery_info={},
            properties={},
        )
        request = traced.task.Request(
            message, app=traced.app, task=traced.task, on_reject=lambda *given: rejected.append(given[-1])
        )
        try:
            raise Reject(reason)
        except Reject:
            request.on_failure(ExceptionInfo(), return_ok=True)
    stores = kept or celery.VERSION >= (5, 7)  # older ones store nothing of a message that its task has rejected
    assert (kept, rejected) == (states if stores else [], [False, False])


def test_a_task_that_is_replaced_by_several_leaves_its_lease_to_them(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signature, "delay", lambda signature: signature)

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def split(task: Any) -> None:
        task.replace(celery.chain(traced.task.si(), traced.task.si()))

    traced.deliver(split)
    assert traced.status == "enqueued"


@pytest.mark.parametrize("number", [{"retries": 1}, {"replaced_task_nesting": 1}])
def test_a_task_that_was_replaced_by_several_may_be_the_last_of_them_after_a_retry(
    traced: Traced, number: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    monkeypatch.setattr(Signature, "delay", lambda signature: signature)
    monkeypatch.setattr(Signature, "apply_async", lambda signature: signature)

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def poll(task: Any, what: str) -> None:
        runs.append(what)
        if what == "retry":
            task.retry(countdown=0)
        if what == "replace":
            task.replace(poll.si("split"))
        if what == "split":
            task.replace(celery.chord([traced.task.si()], celery.chain(traced.task.si(), poll.si("end"))))

    traced.deliver(poll, "retry" if "retries" in number else "replace")
    traced.deliver(poll, "split", number=number)
    traced.deliver(poll, "end")  # Celery gives it no number
    assert (runs[1:], traced.status) == (["split", "end"], "success")


def test_a_replacement_runs_whose_message_does_not_carry_the_number_of_replacements(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    monkeypatch.setattr(Signature, "delay", lambda signature: signature)
    traced.app.conf.task_protocol = 1

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def poll(task: Any, what: str) -> None:
        runs.append(what)
        if what == "replace":
            task.replace(poll.si("end"))

    traced.deliver(poll, "replace")
    traced.deliver(poll, "end")
    assert (runs, traced.status) == (["replace", "end"], "success")


def test_its_end_is_reported_after_the_handlers_that_were_there_before_the_worker(traced: Traced) -> None:
    seen: list[str] = []

    def look(**_: Any) -> None:
        seen.append(traced.status)

    signals.task_postrun.connect(look)
    try:
        setup._prepare_worker(SimpleNamespace(app=traced.app, pool_cls="solo"))
        traced.deliver()
    finally:
        signals.task_postrun.disconnect(look)
    assert (seen, traced.status) == (["processing"], "success")


# Cancelled at the service of the leases


@pytest.fixture
def cancelled(traced: Traced) -> Traced:
    with leasekit.lease(traced.client.once(f"celery:{traced.id}")) as held:
        held.release()
    traced.client.cancel(f"once:celery:{traced.id}")
    return traced


def test_what_was_cancelled_at_the_service_is_revoked_and_never_runs(
    cancelled: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    revoked: list[str] = []

    def hear(request: Any, **_: object) -> None:
        revoked.append(request.id)

    signals.task_revoked.connect(hear)
    cancelled.deliver()
    signals.task_revoked.disconnect(hear)
    assert (cancelled.ran, cancelled.result.state, revoked) == (0, "REVOKED", [cancelled.id])
    assert f"task {cancelled.id} is revoked, and acknowledged without running" in caplog.text


def test_what_was_cancelled_while_the_result_backend_is_away_is_revoked_later(
    cancelled: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_store(*_: object, **__: object) -> None:
        raise ConnectionError("away")

    sent: list[str] = []
    monkeypatch.setattr(celery.Celery, "send_task", lambda *_, **__: sent.append("again"))
    monkeypatch.setattr(cancelled.app.backend, "mark_as_revoked", refuse_to_store)
    cancelled.deliver()
    assert (cancelled.ran, sent) == (0, ["again"])


# What a task may ask of its lease


def test_a_task_has_its_lease_at_hand(traced: Traced) -> None:
    seen: list[Any] = []

    @traced.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
    def inner() -> None:
        seen.append(leasekit_celery.current_lease())

    @traced.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
    def outer() -> None:
        held = leasekit_celery.current_lease()
        assert held is not None
        held.check()
        assert (held.fence > 0, held.lost, held.remaining() > 0) == (True, False, True)
        inner()
        seen.append(held)

    traced.deliver(outer)
    assert seen[0] is seen[1] is not None
    assert leasekit_celery.current_lease() is None
    inner()
    assert seen.pop() is None


def test_a_task_goes_on_where_an_earlier_run_was_also_after_a_retry(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Signature, "apply_async", lambda _: None)

    @traced.app.task(shared=False, bind=True, acks_late=True)  # type: ignore[untyped-decorator]
    def pages(task: Any) -> None:
        held = leasekit_celery.current_lease()
        assert held is not None
        seen.append(held.checkpoint)
        held.progress({"pages": len(seen)})
        if len(seen) < 3:
            raise task.retry(countdown=0)

    for retries in (0, 0, 1, 2):
        traced.deliver(pages, number={"retries": retries})
    assert seen == [None, {"pages": 1}, {"pages": 2}]


def test_an_id_may_be_a_uuid_as_kombus_json_keeps_it(traced: Traced) -> None:
    traced.deliver(number={"id": uuid.UUID(traced.id)})
    assert (traced.ran, traced.status) == (1, "success")


class Own(leasekit_celery.LeasedTask):
    abstract = True


@pytest.mark.parametrize("base", [{}, {"base": Own}])
@pytest.mark.parametrize("all_tasks", [True, False])
def test_tasks_may_be_left_out_or_chosen(all_tasks: bool, base: dict[str, Any]) -> None:
    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "memory://", leased=all_tasks)

    def held(**options: bool) -> bool:
        @app.task(shared=False, name=str(options), **base, **options)  # type: ignore[untyped-decorator]
        def look() -> bool:
            return leasekit_celery.current_lease() is not None

        request = {"id": str(uuid.uuid4()), "delivery_info": {}}
        retval, _, _, _ = build_tracer(look.name, look, app=app)(request["id"], (), {}, request)
        return bool(retval)

    assert [held(), held(leased=True), held(leased=False)] == [all_tasks, True, False]
    app.Task.leases.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:6379/1", "'localhost:6379/1'"),
        ("reddis://ada:secret@localhost/1", "'reddis://***'"),
        ("redis://localhost/1?retension=secret", "'redis://localhost/1'"),
        ("redis://localhost/x?sentinel_password=s@secret", "'redis://***'"),
    ],
)
def test_a_bad_url_is_named_without_its_secrets_beside_a_good_one(url: str, shown: str) -> None:
    with pytest.raises((leasekit.ConfigError, leasekit.UnknownScheme)) as bad:
        leasekit_celery.install(celery.Celery("shop"), url)
    assert f"(install was given {shown}; a Redis is redis://localhost:6379/1?retention=1d)" in str(bad.value)
    assert "secret" not in str(bad.value)


def test_a_misspelled_measure_is_refused() -> None:
    with pytest.raises(leasekit.ConfigError, match="on_lost='raise' is not known"):
        leasekit_celery.install(celery.Celery("shop"), "memory://", on_lost="raise")  # type: ignore[arg-type]


# What others do with tasks


def test_a_base_class_of_a_tasks_own_may_derive_from_leased_task(traced: Traced) -> None:
    said: list[str] = []

    class Own(leasekit_celery.LeasedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            said.append("called")
            return super().__call__(*args, **kwargs)

        def on_success(self, *_: Any) -> None:
            said.append(traced.status)

    @traced.app.task(shared=False, base=Own, acks_late=True)  # type: ignore[untyped-decorator]
    def look() -> bool:
        return leasekit_celery.current_lease() is not None

    traced.deliver(look)
    assert (traced.result.result, said) == (True, ["called", "processing"])


@pytest.mark.parametrize(
    ("by_app", "by_class", "options", "state"),
    [
        (True, None, {}, "STARTED"),
        (False, True, {}, "STARTED"),
        (False, False, {"track_started": True}, "STARTED"),
        (True, None, {"leased": False}, "STARTED"),
        (False, None, {}, "PENDING"),
        (True, False, {}, "PENDING"),
        (True, True, {"track_started": False}, "PENDING"),
        (True, None, {"ignore_result": True}, "PENDING"),
    ],
)
def test_a_run_shows_that_it_has_started_if_its_task_says_so_and_a_copy_shows_nothing(
    traced: Traced, by_app: bool, by_class: bool | None, options: dict[str, bool], state: str
) -> None:
    class Own(leasekit_celery.LeasedTask):
        abstract = True
        track_started = by_class

    traced.app.conf.task_track_started = by_app

    @traced.app.task(shared=False, base=Own, **({"acks_late": True} | options))  # type: ignore[untyped-decorator]
    def look() -> None:
        seen.append(str(traced.result.state))
        raise ValueError("oops")

    seen: list[str] = []
    look.bind(traced.app)  # Celery, too, may do it twice
    traced.deliver(look)
    assert seen == [state]
    after = traced.result.state
    if look.leased:
        traced.deliver(look)
        assert (seen, traced.result.state) == ([state], after)


def test_what_a_broker_sends_to_each_worker_has_no_lease(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    every: Any = Queue("all", Exchange("all", type="fanout"))  # type: ignore[no-untyped-call]
    traced.app.conf.task_queues = [every]

    @traced.app.task(shared=False, bind=True, track_started=True)  # type: ignore[untyped-decorator]
    def reload(task: Any) -> None:
        seen.append(str(traced.result.state))
        if len(seen) == 1:  # another worker has its message, too
            traced.deliver(task, number={"delivery_info": {"exchange": "all", "routing_key": ""}})

    seen: list[str] = []
    traced.deliver(reload, number={"delivery_info": {"exchange": "all", "routing_key": ""}})
    assert (seen, traced.status, caplog.messages) == (["STARTED", "STARTED"], "unknown", [])
    traced.deliver(reload, number={"delivery_info": {"exchange": "", "routing_key": "celery"}})
    assert traced.status == "success"


def test_a_class_that_goes_round_the_lease_is_named(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    class Own(leasekit_celery.LeasedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    @traced.app.task(shared=False, name="m.job", base=Own, acks_late=True)  # type: ignore[untyped-decorator]
    def job() -> None: ...

    traced.deliver(job)
    job.apply()
    job()
    lines = [record.getMessage() for record in caplog.records if record.name == "leasekit.celery"]
    why = "the __call__ of its class must call super().__call__, not self.run"
    assert lines == [f"task {traced.id} (m.job) ran without a lease: {why}"]


def test_a_class_of_a_library_runs_without_leases_in_an_app_that_has_none(caplog: pytest.LogCaptureFixture) -> None:
    app = celery.Celery("plain", broker="memory://", backend="cache+memory://")
    task_id = str(uuid.uuid4())

    @app.task(shared=False, base=leasekit_celery.LeasedTask, track_started=True)  # type: ignore[untyped-decorator]
    def job() -> str:
        return str(app.AsyncResult(task_id).state)

    build_tracer(job.name, job, app=app)(task_id, (), {}, {"id": task_id, "delivery_info": {}})
    assert app.AsyncResult(task_id).result == "STARTED"
    assert "runs without a lease: its app has not called leasekit_celery.install" in caplog.text


def test_a_worker_names_the_tasks_that_have_no_lease_because_of_their_class(
    traced: Traced, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "leasekit.celery")
    monkeypatch.setenv("LEASEKIT_URL", "memory://")  # the test's own service has no URL

    class DBTask(celery.Task):  # type: ignore[misc]
        abstract = True

    class Report(celery.Task):  # type: ignore[misc]
        name = "m.report"

        def run(self) -> None: ...

    def job() -> None: ...

    app = traced.app
    app.task(job, shared=False, name="m.job", base=DBTask)
    app.task(job, shared=False, name="m.short", base=DBTask, leased=False)
    app.task(job, shared=False, name="m.leased")
    app.register_task(Report())
    signals.celeryd_after_setup.send(sender="w", instance=SimpleNamespace(app=app), conf=app.conf)
    lines = [record.getMessage() for record in caplog.records if record.name == "leasekit.celery"]
    assert [line for line in lines if line.startswith("not under leases")] == [
        "not under leases: m.job (its class DBTask does not derive from leasekit_celery.LeasedTask)",
        "not under leases: m.report (its class Report does not derive from leasekit_celery.LeasedTask)",
    ]
    assert lines[-1].startswith("tasks run under leases (")
    assert lines[-1].endswith("), but not m.job, m.report")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_pool_of_processes_is_refused_where_each_has_leases_of_its_own(pool: str) -> None:
    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "memory://")
    refused = pytest.raises(SystemExit, match=r"each process of a prefork pool has leases of its own with memory://")
    with refused if pool == "prefork" else nullcontext():
        signals.worker_init.send(sender=type("Worker", (), {"app": app, "pool_cls": pool}))


@pytest.mark.parametrize(
    ("pool", "start_method", "said"),
    [
        ("prefork", "spawn", "start method 'spawn'"),
        ("tests.adapters.brokers.test_celery_errors:Coroutines", "fork", "test_celery_errors.Coroutines is not a pool"),
    ],
)
def test_a_worker_does_not_start_with_a_pool_that_cannot_have_leases(pool: str, start_method: str, said: str) -> None:
    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "redis://127.0.0.1:9")
    worker = type("Worker", (), {"app": app, "pool_cls": pool, "pool_start_method": start_method})
    with pytest.raises(SystemExit, match=rf"leasekit: .*{said}"):
        signals.worker_init.send(worker)


class Coroutines(solo.TaskPool):  # type: ignore[misc]  # celery has no types
    """A pool of somebody else's, which may run several tasks at once."""


@pytest.mark.parametrize("attribute", ["Task", "task_cls"])
@pytest.mark.parametrize("base", [celery.Task, leasekit_celery.LeasedTask])
def test_a_worker_does_not_start_if_its_app_was_given_another_task_class_since(attribute: str, base: type) -> None:
    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "memory://")
    setattr(app, attribute, type("InContext", (base,), {"abstract": True}))
    with pytest.raises(SystemExit, match=r"leasekit: app 'shop' was given another task class"):
        signals.worker_init.send(type("Worker", (), {"app": app, "pool_cls": "solo"}))


def test_a_task_class_that_was_set_on_the_app_is_kept() -> None:
    app = celery.Celery("shop", broker="memory://")

    class InContext(app.Task):  # type: ignore[misc,name-defined]
        abstract = True

    app.Task = InContext
    leasekit_celery.install(app, "memory://")
    assert issubclass(app.Task, InContext)
    assert issubclass(app.Task, leasekit_celery.LeasedTask)


def test_a_worker_does_not_start_with_a_task_that_collects_messages_unless_it_has_no_lease() -> None:
    class Batches(leasekit_celery.LeasedTask):
        abstract = True

        def Strategy(self, *_: object) -> None: ...  # noqa: N802 - Celery's name

    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "memory://")

    def job(_: object) -> None: ...

    app.task(job, shared=False, name="m.some", base=Batches, leased=False)
    worker = SimpleNamespace(app=app)
    signals.celeryd_after_setup.send(sender="w", instance=worker, conf=app.conf)
    app.task(job, shared=False, name="m.job", base=Batches)
    with pytest.raises(SystemExit, match=r"leasekit: the class of m\.job has a Strategy of its own"):
        signals.celeryd_after_setup.send(sender="w", instance=worker, conf=app.conf)


def test_a_task_that_calls_itself_runs_under_the_lease_that_it_has(traced: Traced) -> None:
    @traced.app.task(shared=False, acks_late=True)  # type: ignore[untyped-decorator]
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * int(factorial(n - 1))

    traced.deliver(factorial, 5)
    assert traced.result.result == 120


@pytest.mark.parametrize("follows", [{"retries": 1}, {"replaced_task_nesting": 1}])
def test_what_a_run_has_sent_in_its_own_place_waits_until_that_has_ended(shop: Shop, follows: dict[str, int]) -> None:
    task = shop.task(acks_late=True)
    with ThreadPoolExecutor(1) as pool:
        with shop.held():
            run = pool.submit(shop.run, task, **follows)
            with pytest.raises(TimeoutError):
                run.result(0.1)
        assert run.result(30) == 1
    assert shop.sent == 0


@pytest.mark.parametrize("long", ["x" * 400, "reports/" * 30, "reports/" * 12, "ü" * 40])
def test_an_id_may_be_as_long_as_celery_lets_it_be(traced: Traced, long: str) -> None:
    traced.id = long
    traced.deliver()
    traced.deliver()
    assert traced.ran == 1


def test_a_task_class_of_the_apps_own_is_kept() -> None:
    entered: list[bool] = []

    class InContext(celery.Task):  # type: ignore[misc]  # celery has no types
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append(apart.status == "processing")
            return self.run(*args, **kwargs)

    apart = Traced(task_cls=InContext)
    apart.deliver()
    apart.client.close()
    assert (apart.result.result, entered) == (1, [True])


def test_a_request_class_of_the_apps_own_is_kept() -> None:
    class Own(Request):  # type: ignore[misc]  # celery has no types
        pass

    class InContext(celery.Task):  # type: ignore[misc]
        abstract = True
        Request = Own

    app = celery.Celery("shop", broker="memory://", task_cls=InContext)
    leasekit_celery.install(app, "memory://")
    check_request(app, Own)


def test_a_request_class_of_a_tasks_own_class_is_kept(traced: Traced) -> None:
    class Own(Request):  # type: ignore[misc]  # celery has no types
        pass

    class Watched(leasekit_celery.LeasedTask):
        abstract = True
        Request = Own

    check_request(traced.app, Own, base=Watched)


def check_request(app: celery.Celery, own: type, **options: Any) -> None:
    """Check that messages of a task are of the class of its app, or its own, and have leases."""

    @app.task(shared=False, **options)  # type: ignore[untyped-decorator]
    def look() -> None:
        pass

    assert issubclass(look.Request, own)
    assert issubclass(look.Request, LeasedRequest)


def test_to_install_it_a_second_time_does_no_harm(traced: Traced) -> None:
    again = celery.Celery("again", broker="memory://", task_cls=traced.app.task_cls)
    leasekit_celery.install(again, "memory://")
    leasekit_celery.install(again, "memory://")
    assert issubclass(again.Task, leasekit_celery.LeasedTask)


# What a worker says when it starts


def test_a_worker_does_not_start_if_the_service_will_never_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    app = celery.Celery("shop", broker="memory://")
    leasekit_celery.install(app, "memory://")
    monkeypatch.setattr(leasekit.Client, "get", refuse_for_good)
    with pytest.raises(SystemExit, match=r"leasekit: it has no database 99"):
        signals.celeryd_after_setup.send(sender="w", instance=SimpleNamespace(app=app), conf=app.conf)


def refuse_for_good(*_: object) -> None:
    raise leasekit.Refused("it has no database 99")


@pytest.mark.parametrize(
    ("url", "visibility", "said"),
    [
        ("redis://127.0.0.1:9?retention=5m", 300, "300 s, and the broker may deliver it again after 300"),
        ("redis://127.0.0.1:9?retention=30m", None, "1800 s, and the broker may deliver it again after 3600"),
        ("redis://127.0.0.1:9?retention=5m", 60, ""),
        ("redis://127.0.0.1:9", None, ""),
        ("http://127.0.0.1:9", None, ""),
    ],
)
def test_a_retention_that_is_too_short_for_the_broker_is_named_when_a_worker_starts(
    url: str, visibility: int | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = celery.Celery("shop", broker="memory://", backend=None)
    app.conf.broker_transport_options = {} if visibility is None else {"visibility_timeout": visibility}
    leasekit_celery.install(app, url)
    signals.celeryd_after_setup.send(sender="w", instance=SimpleNamespace(app=app), conf=app.conf)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings.pop().startswith("no task runs before the service of the leases answers")
    assert said in "".join(warnings)
    assert bool(warnings) is bool(said)
