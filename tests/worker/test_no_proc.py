"""Where there is no /proc a supervisor sees no children, and works all the same."""

import os
from pathlib import Path
from typing import Any

import pytest

from leasekit._worker import linux


def test_without_proc_no_children_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: Any) -> Path:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "readlink", missing)
    assert linux.children(os.getpid()) == set()
