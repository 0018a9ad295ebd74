"""A Redis whose scripts see the clock of a test."""

from collections.abc import Iterator

import pytest

from harness.chaos import redis_clock
from leasekit_redis import scripts
from tests.redis_server import Server


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), "--appendonly", "no")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def settable_scripts() -> Iterator[None]:
    kept = [(one, one.text, one.sha) for one in vars(scripts).values() if isinstance(one, scripts.Script)]
    redis_clock.install()
    yield
    for script, text, sha in kept:
        object.__setattr__(script, "text", text)
        object.__setattr__(script, "sha", sha)
