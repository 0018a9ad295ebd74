"""What the tests of the driver share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the driver's own loop is nothing else
