"""Answers are bad input: whatever a server sends, the adapter raises a typed error, soon and in bounded memory."""

import asyncio
import contextlib
import gzip
import tracemalloc

import msgspec
import pytest

from leasekit.errors import BackendError, ProtocolError, Refused, Throttled, Unavailable
from leasekit.task import Beat, NewTask, Settlement, Stats, Verdict
from leasekit_http import HttpBackend
from tests.adapters.http.conftest import Meet, Stranger

pytestmark = pytest.mark.anyio


BEATS = [Beat(id="a", token="t"), Beat(id="b", token="u")]

GARBAGE = {
    "nothing": b"",
    "no json": b"<html>It works!</html>",
    "truncated": b'{"verdicts":[{"id":"a","verd',
    "trailing": b'{"verdicts":[]} and more',
    "not an object": b"[]",
    "null": b"null",
    "wrong type": b'{"verdicts":{"a":"renewed"}}',
    "no verdict": b'{"verdicts":[{"id":"a"},{"id":"b"}]}',
    "too few": b'{"verdicts":[{"id":"a","verdict":"renewed"}]}',
    "too many": b'{"verdicts":[' + b",".join([b'{"id":"a","verdict":"renewed"}'] * 3) + b"]}",
    "other order": b'{"verdicts":[{"id":"b","verdict":"renewed"},{"id":"a","verdict":"renewed"}]}',
    "bad utf-8": b'{"verdicts":[{"id":"\xff","verdict":"renewed"}]}',
    "lone surrogate": b'{"verdicts":[{"id":"\\ud800","verdict":"renewed"}]}',
    "nan": b'{"verdicts":NaN}',
    "infinity": b'{"verdicts":[{"id":"a","verdict":"renewed","ttl":Infinity}]}',
    "nested": b"[" * 100_000,
    "nested objects": b'{"verdicts":' * 100_000,
    "long integer": b'{"verdicts":' + b"1" * 5000 + b"}",
    "byte order mark": b'\xef\xbb\xbf{"verdicts":[]}',
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
async def test_an_answer_that_makes_no_sense_is_a_protocol_error(meet: Meet, body: bytes) -> None:
    async with meet(lambda stranger: stranger.answer(body)) as backend:
        with pytest.raises(ProtocolError):
            await backend.beat(BEATS)


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_never_escapes_as_an_untyped_error(meet: Meet, body: bytes) -> None:
    async with meet(lambda stranger: stranger.answer(body)) as backend:
        for call in (
            backend.claim(["k"], limit=1, wait=0, claim_id="c"),
            backend.settle([Settlement(id="a", token="t", outcome="success")]),
            backend.schedule([NewTask(kind="k")]),
            backend.cancel(["a"]),
            backend.get("a"),
            backend.list_tasks(),
        ):
            with contextlib.suppress(BackendError):
                await call


RAW = {
    "no http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing at all": b"",
    "half a status line": b"HTTP/1.1 20",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "body shorter than announced": b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "broken chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "chunks without end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x-header: filler\r\n" * 100_000,
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
async def test_what_is_no_http_is_unavailable(meet: Meet, data: bytes) -> None:
    async with meet(lambda stranger: stranger.send(data)) as backend:
        with pytest.raises(Unavailable):
            await backend.beat(BEATS)


async def test_a_reset_connection_is_unavailable(meet: Meet) -> None:
    async def reset(stranger: Stranger) -> None:
        stranger.reset()

    async with meet(reset) as backend:
        with pytest.raises(Unavailable):
            await backend.beat(BEATS)


async def test_a_server_that_is_not_there_is_unavailable(unused_port: int) -> None:
    backend = HttpBackend(f"http://127.0.0.1:{unused_port}", worker="w")
    with pytest.raises(Unavailable):
        await backend.beat(BEATS)
    await backend.aclose()


async def test_a_name_that_does_not_resolve_is_unavailable() -> None:
    backend = HttpBackend("http://nowhere.invalid", worker="w")
    with pytest.raises(Unavailable):
        await backend.beat(BEATS)
    await backend.aclose()


# Time and size ------------------------------------------------------------------------------------------------


async def test_a_server_that_never_answers_is_given_up(meet: Meet) -> None:
    async def hang(_: Stranger) -> None:
        await asyncio.sleep(3600)

    async with meet(hang, timeout=0.2) as backend:
        with pytest.raises(Unavailable, match="did not answer within"):
            await backend.beat(BEATS)


async def test_the_deadline_is_for_the_whole_answer_however_steadily_it_drips(meet: Meet) -> None:
    async def drip(stranger: Stranger) -> None:
        await stranger.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            await stranger.send(b" ")
            await asyncio.sleep(0.01)

    async with meet(drip, timeout=0.3) as backend:
        with pytest.raises(Unavailable, match="did not answer within"):
            await backend.beat(BEATS)


async def test_a_claim_has_the_time_that_it_asked_to_wait(meet: Meet) -> None:
    async def late(stranger: Stranger) -> None:
        await asyncio.sleep(0.5)
        await stranger.answer(b'{"waited":0.5,"tasks":[]}')

    async with meet(late, timeout=0.1) as backend:
        assert (await backend.claim(["k"], limit=1, wait=60, claim_id="c")).waited == 0.5


async def test_an_endless_answer_is_broken_off_in_bounded_memory(meet: Meet) -> None:
    async def flood(stranger: Stranger) -> None:
        await stranger.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
        while True:
            await stranger.send(b" " * 65536)

    async with meet(flood) as backend:
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="larger than"):
            await backend.beat(BEATS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * 1024 * 1024


async def test_compression_is_not_asked_for(meet: Meet) -> None:
    seen: list[bytes] = []

    async def look(stranger: Stranger) -> None:
        seen.append(stranger.request.lower())
        await stranger.answer(b'{"kinds":{}}')

    async with meet(look) as backend:
        await backend.stats()
    assert b"accept-encoding: identity\r\n" in seen[0]


async def test_a_compressed_answer_is_not_unpacked(meet: Meet) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    async with meet(lambda stranger: stranger.answer(bomb, headers="content-encoding: gzip\r\n")) as backend:
        with pytest.raises(ProtocolError, match="compressed"):
            await backend.beat(BEATS)


# Statuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad Gateway", "503 Busy", "504 Slow", "599 What", "408 Slow"])
async def test_a_fault_of_the_server_is_unavailable(meet: Meet, status: str) -> None:
    async with meet(lambda stranger: stranger.answer(b"<html>", status=status)) as backend:
        with pytest.raises(Unavailable):
            await backend.beat(BEATS)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Elsewhere", "308 Moved"])
async def test_no_redirect_is_followed(meet: Meet, unused_port: int, status: str) -> None:
    where = f"location: http://127.0.0.1:{unused_port}/\r\n"
    async with meet(lambda stranger: stranger.answer(b"", status=status, headers=where)) as backend:
        with pytest.raises(ProtocolError, match="redirects are not followed"):
            await backend.beat(BEATS)


async def test_a_refusal_says_which_item_and_field(meet: Meet) -> None:
    document = b'{"type":"urn:leasekit:problem:refused","status":422,"title":"","detail":"no",'
    document += b'"errors":[{"item":1,"field":"progress","detail":"too big"}]}'
    problem = b"content-type: application/problem+json\r\n"

    async def refuse(stranger: Stranger) -> None:
        head = b"HTTP/1.1 422 No\r\ncontent-length: %d\r\n" % len(document)
        await stranger.send(head + problem + b"\r\n" + document)

    async with meet(refuse) as backend:
        with pytest.raises(Refused) as refused:
            await backend.beat(BEATS)
    assert refused.value.errors == [{"item": 1, "field": "progress", "detail": "too big"}]


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_refusal_that_makes_no_sense_refuses_nothing(meet: Meet, body: bytes) -> None:
    headers = "content-type: application/problem+json\r\n"
    async with meet(lambda stranger: stranger.answer(body, status="422 No", headers=headers)) as backend:
        with pytest.raises(ProtocolError):
            await backend.beat(BEATS)


async def test_a_page_that_is_missing_is_not_taken_for_a_task_that_is(meet: Meet) -> None:
    async with meet(lambda stranger: stranger.answer(b"<html>", status="404 Not Found")) as backend:
        with pytest.raises(ProtocolError):
            await backend.get("a")


RETRY_AFTER = {
    "7": 7.0,
    "0": 0.0,
    "1000000000": 300.0,
    "9" * 1000: 300.0,
    "-1": None,
    "1.5": None,
    "nan": None,
    "inf": None,
    "soon": None,
    "": None,
    "Fri, 31 Dec 1999 23:59:59 GMT": None,
    "٣": None,
}


@pytest.mark.parametrize(("value", "expected"), RETRY_AFTER.items())
async def test_retry_after_is_a_bounded_number_or_nothing(meet: Meet, value: str, expected: float | None) -> None:
    async def throttle(stranger: Stranger) -> None:
        await stranger.answer(b"", status="429 Later", headers=f"retry-after: {value}\r\n")

    async with meet(throttle) as backend:
        with pytest.raises(Throttled) as throttled:
            await backend.beat(BEATS)
    assert throttled.value.retry_after == expected


# Answers that are JSON, and wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["settled", "failed", "exploded", "", "renewed\\u0000"])
async def test_a_verdict_that_this_call_cannot_have_fails_its_item_alone(meet: Meet, odd: str) -> None:
    body = f'{{"verdicts":[{{"id":"a","verdict":"{odd}"}},{{"id":"b","verdict":"renewed","ttl":9}}]}}'
    async with meet(lambda stranger: stranger.answer(body.encode())) as backend:
        first, second = await backend.beat(BEATS)
    assert first.verdict == "failed"
    assert second == Verdict(id="b", verdict="renewed", ttl=9.0)


@pytest.mark.parametrize("ttl", ["0", "-5", "1e300", '"long"', "true", "[]", "1e999"])
async def test_a_ttl_that_cannot_be_fails_its_item_alone(meet: Meet, ttl: str) -> None:
    body = f'{{"verdicts":[{{"id":"a","verdict":"renewed","ttl":{ttl}}},{{"id":"b","verdict":"renewed"}}]}}'
    async with meet(lambda stranger: stranger.answer(body.encode())) as backend:
        first, second = await backend.beat(BEATS)
    assert first.verdict == "failed"
    assert second.verdict == "renewed"


async def test_a_pause_of_less_than_nothing_fails_its_item_alone(meet: Meet) -> None:
    body = b'{"verdicts":[{"id":"a","verdict":"throttled","retry_after":-1},{"id":"b","verdict":"throttled"}]}'
    async with meet(lambda stranger: stranger.answer(body)) as backend:
        assert [v.verdict for v in await backend.beat(BEATS)] == ["failed", "throttled"]


async def test_fields_of_a_later_version_are_passed_over(meet: Meet) -> None:
    body = b'{"mood":"good","verdicts":[{"id":"a","verdict":"renewed","new":1},{"id":"b","verdict":"gone"}]}'
    async with meet(lambda stranger: stranger.answer(body)) as backend:
        assert [v.verdict for v in await backend.beat(BEATS)] == ["renewed", "gone"]


GRANT = '{{"id":"a","kind":"{kind}","token":"{token}","ttl":{ttl}}}'
BAD_CLAIMS = {
    "more than asked for": [GRANT.format(kind="k", token="t", ttl=9)] * 2,
    "of another kind": [GRANT.format(kind="other", token="t", ttl=9)],
    "without a token": [GRANT.format(kind="k", token="", ttl=9)],
    "for no time": [GRANT.format(kind="k", token="t", ttl=0)],
    "for ever": [GRANT.format(kind="k", token="t", ttl=1e300)],
}


@pytest.mark.parametrize("tasks", BAD_CLAIMS.values(), ids=BAD_CLAIMS.keys())
async def test_tasks_that_cannot_have_been_granted_are_not_taken(meet: Meet, tasks: list[str]) -> None:
    body = f'{{"waited":0,"tasks":[{",".join(tasks)}]}}'.encode()
    async with meet(lambda stranger: stranger.answer(body)) as backend:
        with pytest.raises(ProtocolError):
            await backend.claim(["k"], limit=1, wait=0, claim_id="c")


async def test_a_claim_cannot_have_waited_less_than_nothing(meet: Meet) -> None:
    async with meet(lambda stranger: stranger.answer(b'{"waited":-1,"tasks":[]}')) as backend:
        with pytest.raises(ProtocolError):
            await backend.claim(["k"], limit=1, wait=0, claim_id="c")


# Requests -----------------------------------------------------------------------------------------------------


async def test_a_batch_that_is_too_big_for_one_request_goes_in_several_and_comes_back_in_order(meet: Meet) -> None:
    sizes: list[int] = []

    async def settle(stranger: Stranger) -> None:
        body = stranger.request.partition(b"\r\n\r\n")[2]
        sizes.append(len(body))
        ids = [item["id"] for item in msgspec.json.decode(body)["results"]]
        await stranger.answer(msgspec.json.encode({"verdicts": [{"id": i, "verdict": "settled"} for i in ids]}))

    batch = [Settlement(id=f"{i}", token="t", outcome="success", result="x" * 1_000_000) for i in range(20)]
    async with meet(settle) as backend:
        found = await backend.settle(batch)
    assert [v.id for v in found] == [s.id for s in batch]
    assert max(sizes) <= 8 * 1024 * 1024


async def test_a_refusal_of_a_part_names_the_position_in_the_whole(meet: Meet) -> None:
    async def refuse_the_last(stranger: Stranger) -> None:
        body = stranger.request.partition(b"\r\n\r\n")[2]
        if b'"id":"9"' not in body:
            ids = [b'{"id":"%d","verdict":"settled"}' % i for i in range(10) if b'"id":"%d"' % i in body]
            await stranger.answer(b'{"verdicts":[' + b",".join(ids) + b"]}")
            return
        document = b'{"type":"urn:leasekit:problem:refused","status":422,"title":"","detail":"no",'
        document += b'"errors":[{"item":%d,"detail":"bad"}]}' % (body.count(b'"id"') - 1)
        await stranger.send(
            b"HTTP/1.1 422 No\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n\r\n" % len(document)
            + document
        )

    batch = [Settlement(id=f"{i}", token="t", outcome="success", result="x" * 1_000_000) for i in range(10)]
    async with meet(refuse_the_last) as backend:
        with pytest.raises(Refused) as refused:
            await backend.settle(batch)
    assert refused.value.errors == [{"item": 9, "detail": "bad"}]


async def test_a_value_that_is_no_json_is_refused_before_it_is_sent(unused_port: int) -> None:
    backend = HttpBackend(f"http://127.0.0.1:{unused_port}", worker="w")
    with pytest.raises(Refused, match="JSON"):
        await backend.schedule([NewTask(kind="k", payload=object())])


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_another_loop_gets_connections_of_its_own(meet: Meet) -> None:
    async with meet(lambda stranger: stranger.answer(b'{"kinds":{}}')) as backend:
        await backend.stats()
        parents = backend._transport._client
        assert parents is not None

        async def in_child() -> Stats:
            try:
                return await backend.stats()
            finally:
                await backend.aclose()

        # As in a forked child: the loop is new, and the connection of the old one is its parent's.
        assert await asyncio.to_thread(asyncio.run, in_child()) == Stats(kinds={})
        await parents.aclose()
