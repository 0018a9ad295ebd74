"""The models of AWS's services, read once for all clients of a test process."""

import functools
from collections.abc import Iterator

import botocore.session
import pytest

__all__ = ["read_once"]


@pytest.fixture(autouse=True, scope="session")
def read_once() -> Iterator[None]:
    """Spare each session of botocore from looking for the models of all services, and from reading its own (0.1 s)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield
