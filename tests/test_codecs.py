"""Codecs: what users write leaves their process encoded, and comes back clear to those who have the key."""

# ruff: noqa: PT012 - what a whole block raises is what is tested here

import base64
import logging
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import leasekit
from leasekit import CannotDecode, Client, ConfigError, NewTask, PeriodicTask, Status, TaskInfo, Worker
from leasekit._arguments import checked_codecs
from leasekit._driver.coding import Coding
from leasekit._lifecycle.sameness import payload_digest
from leasekit.codecs import Codec, Codecs, Compressed, Encoded
from leasekit.server.console.rendering import json_line, json_text
from tests.waiting import eventually

SECRET = "canary-31c7"
CLEAR = {"name": SECRET, "pages": [1, None, 2.5]}


class Aes(Codec):
    """AES-GCM with a random nonce: one value never has the same form twice."""

    digest_key = b"the key of digests"

    def __init__(self, name: str = "aes-1", key: bytes = b"k" * 32, *, errors: bool = False) -> None:
        self.name, self.errors = name, errors
        self._cipher = AESGCM(key)

    def encode(self, clear: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, clear, None)

    def decode(self, data: bytes) -> bytes:
        return self._cipher.decrypt(data[:12], data[12:], None)


class Url:
    """A store that several clients share, with codecs or without."""

    def __init__(self, url: str, backend: Any = None) -> None:
        self.url = url
        self._clients: list[Client] = []

    def client(self, codec: Codecs = None) -> Client:
        self._clients.append(leasekit.connect(self.url, codec=codec))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Url]:
    name = f"codecs-{request.node.nodeid.encode().hex()[-40:]}-{os.getpid()}"
    store = Url(f"memory://{name}" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db")
    yield store
    store.close()


def found(client: Client, task_id: str) -> TaskInfo:
    info = client.get(task_id)
    assert info is not None
    return info


def run(client: Client, kind: str, code: Callable[[leasekit.Lease], object]) -> None:
    with leasekit.lease(next(client.tasks(kind))) as held:
        code(held)


def leaves(held: leasekit.Lease, checkpoint: Any) -> None:
    held.progress(checkpoint)
    held.release()


def test_what_code_writes_is_encoded_at_the_service_and_clear_to_a_client_with_the_key(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    task = client.schedule("k", CLEAR)

    def code(held: leasekit.Lease) -> None:
        assert held.task.payload == CLEAR
        held.progress({"at": SECRET})
        held.then("next", CLEAR, id="follows")
        held.complete([SECRET])

    run(client, "k", code)
    run(client, "next", lambda held: held.complete(held.task.payload["name"]))
    for task_id, result in ((task.id, [SECRET]), ("follows", SECRET)):
        seen, stored = found(client, task_id), found(stranger, task_id)
        assert (seen.payload, seen.result, seen.history[-1].result) == (CLEAR, result, result)
        assert {type(value) for value in (stored.payload, stored.result, stored.history[-1].result)} == {Encoded}
        assert SECRET not in str(msgspec.to_builtins(stored))
    assert found(client, task.id).progress == {"at": SECRET}
    assert isinstance(found(stranger, task.id).progress, Encoded)


@pytest.mark.anyio
async def test_the_async_doors_encode_and_decode_too(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    task = await client.aschedule("k", CLEAR)
    async for claimed in client.tasks("k", until_idle=0):
        assert claimed.payload == CLEAR
        async with leasekit.lease(claimed) as held:
            held.complete(SECRET)
    (info,) = await client.await_tasks(task.id)
    assert (info.payload, info.result) == (CLEAR, SECRET)
    page = await stranger.alist_tasks(kind="k")
    assert [type(info.payload) for info in page.tasks] == [Encoded]
    assert [info.payload for info in (await client.alist_tasks(kind="k")).tasks] == [CLEAR]


def test_the_next_holder_gets_the_checkpoint_clear(store: Url) -> None:
    client = store.client(Aes())
    client.schedule("k", CLEAR)
    run(client, "k", lambda held: leaves(held, SECRET))
    run(client, "k", lambda held: held.complete(held.checkpoint))
    assert [info.result for info in client.list_tasks(kind="k").tasks] == [SECRET]


def test_null_stays_null(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    task = client.schedule("k")
    run(client, "k", lambda held: held.complete())
    assert (found(stranger, task.id).payload, found(stranger, task.id).result) == (None, None)


def test_a_repeated_submission_is_known_although_its_nonce_differs(store: Url) -> None:
    client = store.client(Aes())
    client.schedule("k", {"a": 1, "b": SECRET}, id="one")
    again = client.schedule("k", {"b": SECRET, "a": 1}, id="one")
    other = client.schedule("k", {"a": 2, "b": SECRET}, id="one")
    assert [(answer.created, answer.conflict) for answer in (again, other)] == [(False, False), (False, True)]


def test_a_repeat_is_known_after_a_rotation_and_equal_payloads_of_two_tasks_cannot_be_told(store: Url) -> None:
    old, new = Aes("aes-1"), Aes("aes-2", b"n" * 32)
    before, after, stranger = store.client(old), store.client([new, old]), store.client()
    before.schedule("k", CLEAR, id="one")
    assert not after.schedule("k", CLEAR, id="one").conflict
    before.schedule("k", CLEAR, id="two")
    one, two = (found(stranger, name).payload for name in ("one", "two"))
    assert one.digest != two.digest  # the id is in it
    assert (
        msgspec.json.decode(Coding([new]).encoded(msgspec.Raw(b"1"), known_as="a"))["digest"]
        != (msgspec.json.decode(Coding([Compressed()]).encoded(msgspec.Raw(b"1"), known_as="a"))["digest"])
    )  # and so is the key


def test_the_first_codec_encodes_and_any_decodes(store: Url) -> None:
    old, new = Aes("aes-1"), Aes("aes-2", b"n" * 32)
    before, after, stranger = store.client(old), store.client([new, old]), store.client()
    first, second = before.schedule("k", CLEAR).id, after.schedule("k", CLEAR).id
    assert [found(stranger, name).payload.codec for name in (first, second)] == ["aes-1", "aes-2"]
    assert [found(after, name).payload for name in (first, second)] == [CLEAR, CLEAR]
    assert [type(found(before, name).payload) for name in (first, second)] == [dict, Encoded]


def test_a_replacement_by_debounce_is_encoded(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    for number in (1, 2):
        answer = client.schedule("k", [SECRET, number], dedupe_key="one", debounce=60, delay=30)
    assert answer.replaced
    assert found(client, answer.id).payload == [SECRET, 2]
    assert isinstance(found(stranger, answer.id).payload, Encoded)


def test_the_payload_of_a_periodic_task_is_encoded(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    info = client.set_periodic("nightly", PeriodicTask(kind="k", payload=CLEAR, every=3600))
    assert info.task.payload == CLEAR
    fired = client.trigger_periodic("nightly")
    seen = stranger.get_periodic("nightly")
    assert seen is not None
    assert [type(it) for it in (seen.task.payload, found(stranger, fired.id).payload)] == [Encoded, Encoded]
    assert [one.task.payload for one in client.list_periodic()] == [CLEAR]
    assert found(client, fired.id).payload == CLEAR


def test_code_that_declares_an_encoded_payload_again_undoes_no_change_by_hand(
    store: Url, caplog: pytest.LogCaptureFixture
) -> None:
    client = store.client(Aes())
    worker = Worker(client)

    @worker.periodic(every=86_400, payload=CLEAR)
    @worker.handler("k")
    def k(payload: Any) -> None:
        raise AssertionError

    def work(until: Callable[[], object]) -> None:
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        eventually(until, what="the declaration")
        worker.stop()
        thread.join()

    with caplog.at_level(logging.INFO, logger="leasekit"):
        work(lambda: client.get_periodic("k"))
        assert "is not as this code declares" not in caplog.text
        client.set_periodic("k", PeriodicTask(kind="k", payload="by hand", every=3600))
        work(lambda: "is not as this code declares" in caplog.text)
    info = client.get_periodic("k")
    assert info is not None
    assert info.task.payload == "by hand"


def test_a_loop_without_the_codec_says_so_and_gives_the_task_back(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client(Aes("other"))
    task = client.schedule("k", CLEAR)
    with pytest.raises(
        CannotDecode, match=rf"^the payload of task {task.id} \(k\) is encoded with 'aes-1', and"
    ) as told:
        next(stranger.tasks("k"))
    assert (told.value.codec, told.value.has_codec) == ("aes-1", False)
    info = found(client, task.id)
    assert (info.status, [run.outcome for run in info.history]) == (Status.ENQUEUED, ["release"])


@pytest.mark.anyio
async def test_an_async_loop_without_the_codec_says_so_and_gives_the_task_back(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    task = client.schedule("k", CLEAR)
    with pytest.raises(CannotDecode, match="this client has no codec of that name"):
        async for _ in stranger.tasks("k", until_idle=0):
            raise AssertionError
    assert [run.outcome for run in found(client, task.id).history] == ["release"]


def test_with_another_key_of_that_name_the_run_fails_and_is_tried_again(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client(Aes(key=b"x" * 32))
    task = client.schedule("k", CLEAR)
    with pytest.raises(
        CannotDecode, match=f"task {task.id} .*cannot be decoded with 'aes-1' .InvalidTag: .*another key"
    ):
        next(stranger.tasks("k"))
    info = found(client, task.id)
    assert (info.status, info.error["type"], info.payload) == (Status.RETRIABLE_FAILURE, "CannotDecode", CLEAR)


def test_a_damaged_checkpoint_is_named(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client()
    damaged = {"$codec": "aes-1", "data": base64.b64encode(b"no ciphertext at all").decode()}
    stranger.schedule("k", CLEAR)
    run(stranger, "k", lambda held: leaves(held, damaged))
    with pytest.raises(CannotDecode, match=r"^the progress of task"):
        next(client.tasks("k"))


def test_a_client_with_a_codec_takes_clear_tasks_too(store: Url) -> None:
    store.client().schedule("k", {"$codec": 5, "clear": True})
    run(store.client(Aes()), "k", lambda held: held.complete(held.task.payload["clear"]))


def test_what_a_client_cannot_decode_can_be_scheduled_again_as_it_is(store: Url) -> None:
    client, stranger = store.client(Aes()), store.client(Aes("other"))
    payload = found(stranger, client.schedule("k", CLEAR).id).payload
    assert str(payload) == "(encoded with aes-1)"
    assert found(client, stranger.schedule("k", payload).id).payload == CLEAR


@pytest.mark.parametrize("run_in", ["thread", "async", "process"])
def test_handlers_and_dedupe_functions_see_clear_values(store: Url, run_in: str) -> None:
    if run_in == "process" and sys.platform != "linux":
        pytest.skip("processes need Linux")
    client, stranger = store.client(Aes()), store.client()
    worker = Worker(client)
    function = in_thread if run_in != "async" else in_loop
    handler = worker.handler("k", run=run_in, dedupe=lambda payload: f"key-{payload['pages'][0]}")(function)  # type: ignore[arg-type]
    task = handler.options(client=client).schedule(CLEAR)
    worker_thread = threading.Thread(target=worker.run, daemon=True)
    worker_thread.start()
    (info,) = client.wait_tasks(task.id, timeout=60)
    (follows,) = client.list_tasks(kind="next").tasks
    worker.stop()
    worker_thread.join()
    assert (info.status, info.result, info.progress) == (Status.SUCCESS, [SECRET], SECRET)
    assert follows.payload == SECRET
    assert not client.schedule("k", dedupe_key="key-1").created
    hidden = (found(stranger, task.id).result, found(stranger, task.id).progress, found(stranger, follows.id).payload)
    assert {type(value) for value in hidden} == {Encoded}


def in_thread(payload: Any, held: leasekit.Lease) -> list[str]:
    held.progress(payload["name"])
    held.then("next", payload["name"])
    return [payload["name"]]


async def in_loop(payload: Any, held: leasekit.Lease) -> list[str]:
    return in_thread(payload, held)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_worker_that_cannot_decode_says_so_and_runs_no_code(
    store: Url, is_wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = store.client(Aes())
    task = client.schedule("k", CLEAR)
    stranger = Worker(store.client(Aes(key=b"x" * 32) if is_wrong else None))
    ran: list[object] = []
    stranger.handler("k")(ran.append)
    thread = threading.Thread(target=stranger.run, daemon=True)
    with caplog.at_level(logging.WARNING, logger="leasekit"):
        thread.start()
        eventually(lambda: found(client, task.id).history, what="the end of the run")
        stranger.stop()
        thread.join()
    assert not ran
    assert found(client, task.id).history[0].outcome == ("retry" if is_wrong else "release")
    (said,) = [record.getMessage() for record in caplog.records if task.id in record.getMessage()]
    assert f"the payload of task {task.id} (k) {'cannot be decoded' if is_wrong else 'is encoded'} with 'aes-1'" in said


def test_a_flow_goes_on_with_encoded_states_results_and_marks(store: Url) -> None:
    client, stranger = store.client(Aes(errors=True)), store.client()
    flow: leasekit.Flow[list[str]] = leasekit.Flow("f", state=list[str])
    executions: list[object] = []

    @flow.step(on_success="each")
    def begin(state: list[str], step: leasekit.Step) -> list[str]:
        executions.append(step.checkpoint)
        if len(executions) < 3:
            step.progress(state)
            raise leasekit.NotYet(after=0)
        return [*state, *state]

    @flow.step(each=lambda state: state, on_success="joined")
    def each(item: str) -> str:
        return item

    @flow.step()
    def joined(state: list[str], step: leasekit.Step) -> list[str]:
        return [*step.results, "end"]

    worker = Worker(client)
    worker.add(flow)
    started = flow.start(client, [SECRET])
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    eventually(lambda: (it := client.flow(started.id)) is not None and it.status == "succeeded", what="the end")
    worker.stop()
    thread.join()
    info = client.flow(started.id)
    assert info is not None
    assert (info.state, executions) == ([SECRET, SECRET, "end"], [None, [SECRET], [SECRET]])
    assert SECRET not in str(msgspec.to_builtins(stranger.list_tasks(root=started.id).tasks))


@pytest.mark.parametrize("errors", [False, True])
def test_the_text_of_errors_is_encoded_if_the_codec_says_so_and_their_type_stays_readable(
    store: Url, errors: bool
) -> None:
    client, stranger = store.client(Aes(errors=errors)), store.client()
    raised, told = client.schedule("k", max_attempts=1).id, client.schedule("j").id
    with pytest.raises(KeyError):
        run(client, "k", lambda held: dict[str, int]()[SECRET])
    run(client, "j", lambda held: held.fail({"who": SECRET}, retry=False))
    assert (found(client, raised).error["type"], SECRET in found(client, raised).error["message"]) == ("KeyError", True)
    assert found(client, told).error == {"who": SECRET}
    seen = [found(stranger, name) for name in (raised, told)]
    assert seen[0].error["type"] == "KeyError"
    assert (SECRET in str(msgspec.to_builtins(seen))) is not errors
    if errors:
        assert seen[0].error["message"] == "(encoded with aes-1)"
        assert [info.id for info in stranger.list_dead(error_type="KeyError").tasks] == [raised]
        assert [SECRET in info.error["message"] for info in client.list_dead(error_type="KeyError").tasks] == [True]


def test_the_longest_text_of_an_error_has_room_once_it_is_encoded(store: Url) -> None:
    def fails(held: leasekit.Lease) -> None:
        raise ValueError("\x01" * 20_000)  # each takes six bytes as JSON

    client = store.client(Aes(errors=True))
    task = client.schedule("k")
    with pytest.raises(ValueError, match=r"^\x01"):
        run(client, "k", fails)
    info = found(client, task.id)
    assert (info.status, info.error["message"]) == (Status.RETRIABLE_FAILURE, "\x01" * 2_000)


def test_a_codec_that_fails_is_told_where_the_value_is_given(store: Url) -> None:
    class Broken(Aes):
        def encode(self, clear: bytes) -> bytes:
            raise OSError("no key")

    client = store.client(Broken(errors=True))
    with pytest.raises(OSError, match="no key"):
        client.schedule("k", 1)
    task = client.schedule("k")
    with pytest.raises(OSError, match="no key"):
        run(client, "k", lambda held: held.complete(1))
    error = found(client, task.id).error
    assert error == {"type": "OSError", "message": "(codec aes-1 could not encode it: OSError)"}


def test_a_result_that_is_given_before_the_block_begins_is_encoded(store: Url) -> None:
    held = leasekit.lease(_claimed(store))
    held.complete(SECRET)  # before the block: the codec is that of the client that claimed
    with held:
        pass
    (info,) = store.client().list_tasks(kind="k").tasks
    assert isinstance(info.result, Encoded)


def _claimed(store: Url) -> leasekit.Task:
    client = store.client(Aes())
    client.schedule("k")
    return next(client.tasks("k"))


@pytest.mark.parametrize("codec", [Compressed(), Compressed(Aes())], ids=["alone", "around"])
def test_compressed_values_are_smaller_and_come_back(codec: Compressed) -> None:
    coding = Coding(checked_codecs(codec))
    clear = msgspec.Raw(msgspec.json.encode([SECRET] * 1000))
    raw = coding.encoded(clear)
    assert len(bytes(raw)) < 500
    task = leasekit.Task(id="t", kind="k", token="x", ttl=1, payload=msgspec.json.decode(raw))
    assert coding.open(task).payload == [SECRET] * 1000
    assert codec.name == ("zlib" if codec.digest_key == b"" else "aes-1+zlib")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (zlib.compress(b" " * 2_000_001), "more than 2,000,000 bytes"),
        (zlib.compress(b"1")[:-1], "cut off"),
        (zlib.compress(b"1") + b"2", "more bytes"),
        (b"no zlib", "incorrect header"),
    ],
)
def test_what_zlib_has_not_written_and_what_is_too_large_is_refused(data: bytes, why: str) -> None:
    with pytest.raises((ValueError, zlib.error), match=why):
        Compressed(at_most=2_000_000).decode(data)


def test_a_value_that_could_not_be_decompressed_is_not_compressed() -> None:
    with pytest.raises(ValueError, match="this value has 11 bytes: 10 at most"):
        Compressed(at_most=10).encode(b"x" * 11)


class Nameless(Aes):
    name = "ü"

    def __init__(self) -> None:
        pass


class Keyless(Nameless):
    name, digest_key = "keyless", "text"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        (object(), "must be an object of a subclass of leasekit.codecs.Codec"),
        ([Aes(), Aes(key=b"y" * 32)], "two codecs are called 'aes-1'"),
        (Nameless(), "1-64 printable ASCII characters, got 'ü'"),
        (Keyless(), "codec 'keyless' needs a digest_key of up to 64 bytes"),
    ],
)
@pytest.mark.parametrize("connect", [leasekit.connect, Worker])
def test_what_is_no_codec_is_refused_at_once(codec: Any, why: str, connect: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=why):
        connect("memory://", codec=codec)


def test_a_payload_has_one_digest_however_it_is_written_and_an_encoded_one_that_of_its_clear_value() -> None:
    same = [b'{"a":1,"b":2}', b'{ "b": 2, "a": 1 }']
    encoded = [b'{"$codec":"a","data":"eA==","digest":"d"}', b'{"data":"eQ==","digest":"d","$codec":"b"}']
    others = [b"{}", b'{"$codec":"a","data":"eA==","digest":"e"}', b'{"$codec":"a","data":"eA=="}', b'"d"']
    digests = [payload_digest(payload) for payload in (same[0], encoded[0], *others)]
    assert len(set(digests)) == len(digests)
    assert payload_digest(same[0]) == payload_digest(same[1])
    assert payload_digest(encoded[0]) == payload_digest(encoded[1])


@pytest.mark.parametrize("name", ["", "x" * 65, "line\nof a log", "\x1b[31m", "ü"])
def test_a_name_that_no_codec_has_is_no_encoded_value_and_comes_into_no_log(name: str) -> None:
    assert Encoded.of({"$codec": name, "data": "eA=="}) is None


def test_the_console_shows_the_name_of_the_codec() -> None:
    value = msgspec.Raw(b'{"$codec": "aes-1", "data": "eA=="}')
    assert {json_text(value), json_line(value)} == {"(encoded with aes-1)"}
    assert json_line(msgspec.Raw(b'{"$codec":5}')) == '{"$codec":5}'


def test_a_batch_is_encoded_and_its_bad_payload_named(store: Url) -> None:
    client = store.client(Aes())
    with pytest.raises(ValueError, match="this payload is not JSON"):
        client.schedule_all([NewTask(kind="k", payload=1), NewTask(kind="k", payload=object())])
    assert client.list_tasks(kind="k").tasks == []
