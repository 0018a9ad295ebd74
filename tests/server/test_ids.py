"""Names that the server makes up."""

import uuid
from random import Random, SystemRandom

from leasekit.ids import uuid7s
from leasekit.server.ids import successor_id, tokens


def test_ids_are_uuids_of_version_7_of_their_millisecond() -> None:
    found = [uuid.UUID(one) for one in uuid7s(1000, 1_700_000_000.1239)]
    assert {(one.version, one.variant) for one in found} == {(7, uuid.RFC_4122)}
    assert {one.int >> 80 for one in found} == {1_700_000_000_123}
    assert len(set(found)) == 1000


def test_all_else_in_an_id_is_chance() -> None:
    seen = [uuid.UUID(one).int for one in uuid7s(1000, 1.0)]
    free = (1 << 80) - 1 & ~(0xF << 76) & ~(0x3 << 62)
    ones, zeros = 0, 0
    for one in seen:
        ones |= one
        zeros |= ~one
    assert ones & zeros & free == free, "every bit is sometimes set and sometimes not"


def test_none_are_made_where_none_are_asked_for() -> None:
    assert uuid7s(0, 1.0) == tokens(0, Random(1)) == []


def test_tokens_have_128_bits_each_and_do_not_repeat() -> None:
    found = tokens(1000, SystemRandom())
    assert len(set(found)) == 1000
    assert {len(one) for one in found} == {32}
    assert all(bytes.fromhex(one) for one in found)


def test_a_successor_has_one_id_per_run_and_position() -> None:
    ids = {successor_id(name, token, position) for name in ("a", "b") for token in ("1", "11") for position in (0, 1)}
    assert len(ids) == 8
    assert successor_id("a", "1", 0) == successor_id("a", "1", 0)
    assert successor_id("a", "1", 11) != successor_id("a", "11", 1)
