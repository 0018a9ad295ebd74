"""What holds for every test: no keeper outlives it, and randomised tests say how to repeat them."""

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Timings never decide. CI repeats the same examples, so that what turns red there is the change; developers explore.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What workers keep on disk is not kept in the home of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def no_driver_is_left() -> Iterator[None]:
    """The driver's thread ends with its last client: a test that leaves one alive has not closed what it opened."""
    before = _drivers()
    yield
    left = _drivers() - before
    for thread in left:
        thread.join(timeout=5)
    assert not {thread for thread in left if thread.is_alive()}, "a client or a lease was not closed"


def _drivers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "leasekit-driver"}
