"""URLs: what is an address of a Redis, and what is refused without being repeated."""

import pytest

from leasekit.backend import Backend, Scheduler, WorkerDirectory
from leasekit.errors import ConfigError
from leasekit.registry import open_backend
from leasekit_redis import RedisBackend, connect
from leasekit_redis.address import parse
from leasekit_redis.keys import Keys


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost", "rediss://localhost:6380/1", "redis+cluster://a:7000,b:7001", "redis+sentinel://a,b/main",
        "unix:///run/redis.sock",
    ],
)  # fmt: skip
def test_all_schemes_are_registered(url: str) -> None:
    backend: Backend = open_backend(url, worker="w")
    assert isinstance(backend, RedisBackend)
    assert isinstance(backend, Scheduler)
    assert isinstance(backend, WorkerDirectory)


def test_a_url_says_all_that_there_is_to_say() -> None:
    address = parse("rediss://us%40er:pa%2Fss@host:6380/3?prefix=mine&retention=12h")
    assert address.hosts == (("host", 6380),)
    assert (address.tls, address.is_cluster, address.db) == (True, False, 3)
    assert (address.username, address.password) == ("us@er", "pa/ss")
    assert (address.prefix, address.retention) == ("mine", 12 * 3600)


def test_ended_tasks_are_kept_for_180_days_unless_something_else_is_said() -> None:
    assert parse("redis://host").retention == 14 * 86400


def test_a_cluster_has_several_hosts_and_perhaps_tls() -> None:
    address = parse("redis+cluster://:pw@a:1,b,[::1]:2?tls=true")
    assert address.hosts == (("a", 1), ("b", 6379), ("::1", 2))
    assert (address.tls, address.is_cluster, address.username, address.password) == (True, True, None, "pw")


def test_sentinels_have_the_name_of_the_primary_and_a_password_of_their_own() -> None:
    address = parse("redis+sentinel://u:pw@a,b:1/my%20main?db=2&tls=true&sentinel_username=s&sentinel_password=hunter2")
    assert address.hosts == (("a", 26379), ("b", 1))
    assert (address.primary, address.db, address.tls, address.is_cluster) == ("my main", 2, True, False)
    assert (address.username, address.password) == ("u", "pw")
    assert (address.sentinel_username, address.sentinel_password) == ("s", "hunter2")
    assert str(address) == "Redis 'my main' of the Sentinels at a:26379,b:1"


def test_a_socket_has_its_path_and_options_as_in_redis_py() -> None:
    address = parse("unix://u:pw@/run/my%20redis.sock?db=3&prefix=mine")
    assert (address.socket, address.db, address.prefix, address.hosts) == ("/run/my redis.sock", 3, "mine", ())
    assert (address.username, address.password) == ("u", "pw")
    assert str(address) == "Redis at /run/my redis.sock"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a",
        "redis+sentinel://a/main/0",
        "redis+sentinel://a/main?db=zero",
        "redis+sentinel:///main",
        "redis://a?db=1",
        "redis://a?sentinel_password=x",
        "unix://",
        "unix:///",
        "unix://host/run/redis.sock",
        "unix:///run/redis.sock?tls=true",
        "redis://",
        "redis://host:port",
        "redis://host:99999",
        "redis://[::1",
        "redis://a,b",
        "redis://host/zero",
        "redis://host#1",
        "redis://host?retention=soon",
        "redis://host?retention=1s",
        "redis://host?retention=-5d",
        "redis://host?prefix=",
        "redis://host?prefix=a{b}",
        "redis://host?prefix=a&prefix=b",
        "redis://host?colour=red",
        "redis://host?tls=true",
        "redis://host?ssl_cert_reqs=none",
        "rediss://host?ssl_cert_reqs=perhaps",
        "rediss://host?ssl_ca_certs=/no/such/file",
        "redis+cluster://host?ssl_cert_reqs=none",
        "redis+cluster://a,",
        "redis+cluster://a/1",
        "redis+cluster://a?tls=perhaps",
        "http://host",
        "host:6379",
        "",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        connect(url, worker="w")


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("ttl=abc", "unknown options ttl"),
        ("ttl=nan", "unknown options ttl"),
        ("prefix=a&prefix=b", "the option 'prefix' of the URL is given twice"),
        ("retention=nan", "retention must be from a minute to 100 years"),
        ("retention=99999999999", "retention must be from a minute to 100 years"),
    ],
)
def test_a_wrong_option_is_named(query: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect(f"redis://host?{query}", worker="w")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@",
        "redis://u:hunter2@a,b",
        "redis://u:hunter2@a/x",
        "redis+cluster://:hunter2@a:b",
        "redis+sentinel://a?sentinel_password=hunter2",
        "unix://:hunter2@host/a",
    ],
)
def test_a_password_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(url, worker="w")
    assert "hunter2" not in str(refused.value)


def test_an_address_is_shown_without_its_password() -> None:
    address = parse("redis://user:hunter2@host/1")
    assert "hunter2" not in f"{address} {address!r}"


@pytest.mark.parametrize("kind", ["plain", "}", "{", "{}", "a}b{c", "%7B", "a{b"])
def test_all_keys_of_a_kind_have_one_hash_tag_whatever_its_name(kind: str) -> None:
    tags = {key.decode().partition("{")[2].partition("}")[0] for key in Keys("leasekit").of_kind(kind)}
    assert len(tags) == 1
    assert tags != {""}


def test_two_kinds_have_no_key_in_common() -> None:
    kinds = ["a", "{", "%7B", "{}", "}", "a:b"]
    keys = [key for kind in kinds for key in Keys("leasekit").of_kind(kind)]
    assert len(set(keys)) == len(keys)
